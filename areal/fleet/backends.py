"""The table of inference backends. `docs/servers.md` describes how to add one."""

from areal.api.errors import ConfigError
from areal.fleet.native import NATIVE
from areal.fleet.replica import ReplicaFactory
from areal.fleet.server_backend import ServerBackend
from areal.fleet.sglang import SGLANG
from areal.fleet.vllm import VLLM
from areal.system.network import run_token

BACKENDS: dict[str, ServerBackend] = {backend.name: backend for backend in (NATIVE, SGLANG, VLLM)}


def backend_named(name: str) -> ServerBackend:
    """The backend that `allocation_mode` calls `name`. ConfigError when the table has none."""
    if name not in BACKENDS:
        raise ConfigError(
            f"allocation_mode: there is no inference backend {name!r}: use one of {', '.join(BACKENDS)}",
            code="fleet.unknown_backend",
        )
    return BACKENDS[name]


def replica_factory(name: str) -> ReplicaFactory:
    """Makes clients of the servers of a backend, with the token that the launcher gives to every process of a run."""
    make_client, token = backend_named(name).client, run_token()
    return lambda replica_name, address, form: make_client(replica_name, address, token, form)
