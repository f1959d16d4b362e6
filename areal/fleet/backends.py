"""The inference backend of a run, by name. `docs/servers.md` describes how to add one."""

from areal.api.registry import registered
from areal.fleet.replica import ReplicaFactory
from areal.fleet.server_backend import ServerBackend
from areal.system.network import run_token


def backend_named(name: str) -> ServerBackend:
    """The backend that `allocation_mode` calls `name`. ConfigError when there is none."""
    return registered("backends", name, key="allocation_mode").load()


def replica_factory(name: str) -> ReplicaFactory:
    """Makes clients of the servers of a backend, with the token that the launcher gives to every process of a run."""
    make_client, token = backend_named(name).client, run_token()
    return lambda replica_name, address, form: make_client(replica_name, address, token, form)
