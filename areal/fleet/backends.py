"""Owns the choice of an adapter: which client speaks to the servers of a backend."""

from __future__ import annotations

from areal.api.errors import ConfigError
from areal.fleet.native import make_native_replica
from areal.fleet.replica import ReplicaFactory
from areal.fleet.sglang import make_sglang_replica
from areal.fleet.vllm import make_vllm_replica

_FACTORIES: dict[str, ReplicaFactory] = {
    "native": make_native_replica,
    "sglang": make_sglang_replica,
    "vllm": make_vllm_replica,
}


def replica_factory(backend: str) -> ReplicaFactory:
    """What makes the clients of a fleet whose servers are of this backend, as `allocation_mode` names it."""
    if backend not in _FACTORIES:
        raise ConfigError(f"there is no adapter for {backend} servers: use {', '.join(_FACTORIES)}")
    return _FACTORIES[backend]
