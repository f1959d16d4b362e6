"""Owns the choice of an adapter: which client speaks to the servers of a backend."""

from __future__ import annotations

from areal.api.errors import ConfigError
from areal.engine.native import make_native_replica
from areal.engine.replica import ReplicaFactory


def replica_factory(backend: str) -> ReplicaFactory:
    """What makes the clients of a fleet whose servers are of this backend, as `allocation_mode` names it."""
    if backend == "native":
        return make_native_replica
    raise ConfigError(f"there is no adapter for {backend} servers: use native, sglang or vllm")
