"""The native inference server as a backend: its command and its memory."""

from __future__ import annotations

import sys

from areal.api.config import PPOConfig
from areal.fleet.replica import Replica
from areal.fleet.server_backend import ServerBackend, ServerCommand
from areal.system.model_shape import ModelShape
from areal.system.network import Host
from areal.system.run_paths import RunPaths

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_CPU_TOKENS_PER_REQUEST = 512
"""KV cache per running request on the CPU, in tokens, when native.max_total_tokens is null."""


def _command(config: PPOConfig, on_gpu: bool, host: Host) -> ServerCommand:
    argv = (sys.executable, "-m", "areal.inference.server", "--config", str(RunPaths.of(config).config))
    return ServerCommand(argv=argv, memory_bytes=_served_bytes(config, on_gpu))


def _served_bytes(config: PPOConfig, on_gpu: bool) -> int | None:
    """On a GPU without native.max_total_tokens only the weights: the cache takes the memory that is left."""
    native, shape = config.native, ModelShape.read(NATIVE.model(config))
    if shape is None:
        return None
    tokens = native.max_total_tokens or (0 if on_gpu else native.max_running_requests * _CPU_TOKENS_PER_REQUEST)
    return (shape.parameters + tokens * shape.kv_values_per_token) * _ELEMENT_BYTES[native.dtype]


def _client(name: str, address: str, token: str) -> Replica:
    from areal.fleet.native import NativeReplica  # the launcher reads this table and needs no client

    return NativeReplica(name, address, token=token)


NATIVE = ServerBackend(
    name="native",
    title="the native server",
    client=_client,
    command=_command,
    model_key="model_path",
    context_key="context_length",
)
