"""What the commands of all foreign servers share: interpreter, listening address, seed, dtype, memory."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.api.config import PPOConfig
from areal.fleet.server_backend import ServerBackend, ServerCommand
from areal.fleet.server_flags import flag_words
from areal.system.model_shape import ModelShape, context_length
from areal.system.network import LOOPBACK

SERVER_SIDE = Path(__file__).parents[1] / "server_side"
"""The code that runs inside the environments of foreign servers."""
ADAPTERS = 3
"""LoRA adapters in one batch: the current policy version and those that running requests still use."""
CPU_REQUESTS = 64
"""Maximum requests that a server on the CPU decodes together, unless the user sets another limit."""
_CPU_TOKENS_PER_REQUEST = 512


def server_python(config: PPOConfig) -> str:
    """Absolute path of the servers' interpreter. A symlink is kept: a virtual environment is found through it."""
    if not config.server_python:
        return sys.executable
    on_path = shutil.which(config.server_python) if "/" not in config.server_python else None
    return on_path or str(Path(config.server_python).expanduser().absolute())


def foreign_command(
    config: PPOConfig,
    backend: ServerBackend,
    *,
    program: Sequence[str],
    defaults: Mapping[str, Any],
    owned: Mapping[str, Any],
    env: Mapping[str, str],
) -> ServerCommand:
    """The command of a foreign server. `program` includes the model. Flags: `defaults`, overridden by the user's,
    overridden by `owned`. The server listens on loopback; elsewhere its gateway protects it.
    """
    rules, given, model = backend.flags, backend.given(config), backend.model(config)
    assert rules is not None, "a foreign server has flags"
    flags = {"dtype": config.actor.dtype, **defaults}
    if config.tokenizer_path not in ("", config.actor.path, model):
        flags[rules.tokenizer] = config.tokenizer_path
    flags |= {name: value for name, value in given.items() if name not in (backend.model_key, "model")}
    flags |= owned
    if config.servers_start_empty:
        flags["load_format"] = "dummy"  # the server serves once it has the random weights of the trainer
    seed = given.get(rules.seed, config.seed)
    flags |= {"host": LOOPBACK, "port": "{port}", rules.seed: f"{{index+{seed}}}"}
    words = [word for name, value in flags.items() for word in flag_words(rules, name, value)]
    return ServerCommand(
        argv=(server_python(config), *program, *words),
        env=dict(env),
        memory_bytes=_served_bytes(model, flags),
    )


def cpu_cache_tokens(config: PPOConfig, backend: ServerBackend) -> int:
    """KV cache of a server on the CPU, in tokens: one request of full length, or `CPU_REQUESTS` short ones."""
    context = backend.given(config).get(backend.context_key)
    context = context if isinstance(context, int) and context > 0 else context_length(backend.model(config)) or 0
    return max(context, CPU_REQUESTS * _CPU_TOKENS_PER_REQUEST)


def _served_bytes(model: str, flags: Mapping[str, Any]) -> int | None:
    """On a GPU without a configured cache only the weights: the cache takes the memory that is left."""
    shape = ModelShape.read(model)
    if shape is None:
        return None
    element = element_bytes(flags.get("dtype"))
    tokens, cache = flags.get("max_total_tokens"), flags.get("kv_cache_memory_bytes")
    if not isinstance(cache, int):
        cache = tokens * shape.kv_values_per_token * element if isinstance(tokens, int) else 0
    return shape.parameters * element + cache


def element_bytes(dtype: Any) -> int:
    return 4 if dtype in ("float32", "float") else 2


def prepended(env: Mapping[str, str], name: str, first: str) -> str:
    """A search path like PYTHONPATH with `first` before what `env` has."""
    return os.pathsep.join(part for part in (first, env.get(name, "")) if part)
