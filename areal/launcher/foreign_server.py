"""Owns the command and the environment that an SGLang or vLLM server is started with, as pure data from the config."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.config import PPOConfig
from areal.api.config.servers import FOREIGN_SERVERS, SGLANG, ForeignServer, given_flags
from areal.api.config.vllm_limits import logprobs_mode
from areal.api.errors import ConfigError
from areal.launcher.memory import ModelShape, context_length
from areal.system.network import Host, is_loopback

SERVER_SIDE = Path(__file__).parents[1] / "server_side"
"""What runs inside the servers' environments."""
_CPU_REQUESTS = 64
"""Most requests that a server on the CPU decodes together, unless the user says otherwise."""
_CPU_TOKENS_PER_REQUEST = 512
_CPU_CACHE_BYTES = 2**30
"""KV cache of a model whose sizes are not at hand."""
_HTTP_LOG = {"SGLang": "log_level_http", "vLLM": "uvicorn_log_level"}
_DTYPE_BYTES = {"float32": 4, "float": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How each server of a run is started. Its host fills in {port} and {index+N}."""

    argv: tuple[str, ...]
    env: dict[str, str]
    flags: dict[str, Any]
    """What the command asks for besides the model, by plain name: defaults, what the user gave, what areal sets."""
    model_words: tuple[str, ...]


def server_model(config: PPOConfig) -> str:
    """Folder or hub name of the model that the servers load at their start."""
    if config.server_backend not in FOREIGN_SERVERS:
        return config.native.model_path or config.actor.path
    flags = given_flags(config.server_backend, config.server_flags)
    return str(flags.get(FOREIGN_SERVERS[config.server_backend].model) or flags.get("model") or config.actor.path)


def server_python(config: PPOConfig) -> str:
    """Absolute path of the interpreter that runs the servers. A link stays one: that is how it knows its packages."""
    if not config.server_python:
        return sys.executable
    on_path = shutil.which(config.server_python) if "/" not in config.server_python else None
    return on_path or str(Path(config.server_python).expanduser().absolute())


def server_command(config: PPOConfig, *, on_gpu: bool, host: Host | None = None) -> ServerCommand:
    """The command of every server of a run whose servers are foreign, on `host` (None = loopback).

    ConfigError when the host is not loopback: a token does not protect all routes of these servers.
    """
    host = host or Host()
    if not is_loopback(host.bind):
        raise ConfigError(
            f"allocation_mode: {config.server_backend} servers cannot listen on {host.bind}, because the run's token "
            "does not protect them there: use native servers, or start the servers yourself (rollout.server_addrs)",
            code="launch.server_unprotected",
        )
    server = FOREIGN_SERVERS[config.server_backend]
    given = given_flags(config.server_backend, config.server_flags)
    servers = config.allocation.inference
    assert servers is not None, "a run with foreign servers has a part for them"
    # Without a line in the log for each of our own questions.
    defaults: dict[str, Any] = {"dtype": config.actor.dtype, _HTTP_LOG[server.name]: "warning"}
    if config.tokenizer_path not in ("", config.actor.path, server_model(config)):
        defaults["tokenizer_path" if server is SGLANG else "tokenizer"] = config.tokenizer_path
    if server is SGLANG:
        defaults["skip_server_warmup"] = True  # its text may be no token at all for a small tokenizer, which kills it
    program, model, ours = (_sglang if server is SGLANG else _vllm)(config, servers.instance_size, on_gpu)
    if config.actor.init_from_scratch:
        ours["load_format"] = "dummy"  # it serves once the trainer's random weights have arrived
    if not on_gpu:
        defaults |= _cpu_flags(server, config, given)
    ours |= {"host": host.bind, "port": "{port}", server.seed: f"{{index+{given.get(server.seed, config.seed)}}}"}
    flags = defaults | {name: value for name, value in given.items() if name not in (server.model, "model")} | ours
    words = [word for name, value in flags.items() for word in flag_words(server, name, value)]
    return ServerCommand(
        argv=(server_python(config), *program, model, *words),
        env=_environment(server, flags, host, on_gpu),
        flags=flags,
        model_words=(model,),
    )


def _sglang(config: PPOConfig, size: int, on_gpu: bool) -> tuple[list[str], str, dict[str, Any]]:
    """The program, its model, and the flags that areal sets."""
    return (
        ["-m", "sglang.launch_server"],
        f"--model-path={server_model(config)}",
        {
            "tp_size": size,
            "nccl_port": "{port_nccl}",  # it would pick one at random, which two servers may do alike
            "enable_metrics": True,
            "incremental_streaming_output": True,
            **({} if on_gpu else {"device": "cpu"}),
        },
    )


def _vllm(config: PPOConfig, size: int, on_gpu: bool) -> tuple[list[str], str, dict[str, Any]]:
    """The same; whether it runs on a GPU is decided by how vLLM was built."""
    return (
        ["-m", "vllm.entrypoints.cli.main", "serve"],
        server_model(config),
        {
            "tensor_parallel_size": size,
            "enable_scale_out": True,
            "worker_extension_cls": "areal_vllm.extension.WorkerExtension",
            "weight_transfer_config": {"backend": "areal"},
            "logprobs_mode": logprobs_mode(config.gconfig),
        },
    )


def _cpu_flags(server: ForeignServer, config: PPOConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a server needs on a machine without GPU, and a cache for some dozens of requests instead of the memory."""
    model = server_model(config)
    context = given.get(server.context)
    context = context if isinstance(context, int) and context > 0 else context_length(model) or 0
    tokens = max(context, _CPU_REQUESTS * _CPU_TOKENS_PER_REQUEST)
    if server is SGLANG:
        return {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "lora_backend": "torch_native",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,  # its scheduler would keep a core busy with waiting
            "max_running_requests": _CPU_REQUESTS,
            "max_total_tokens": tokens,
        }
    shape = ModelShape.read(model)
    size = _CPU_CACHE_BYTES
    if shape is not None:
        element = _DTYPE_BYTES.get(str(given.get("dtype", config.actor.dtype)), 2)
        size = tokens * shape.kv_values_per_token * element
    return {"enforce_eager": True, "max_num_seqs": _CPU_REQUESTS, "kv_cache_memory_bytes": size}


def _environment(server: ForeignServer, flags: Mapping[str, Any], host: Host, on_gpu: bool) -> dict[str, str]:
    """Variables of the server, below those that the user sets. All servers of a run are on this machine."""
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    if server is SGLANG:
        env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else a paused server soon counts as ill
        if not on_gpu:
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SERVER_SIDE / "sglang_cpu")}
        return env
    env |= {
        "PYTHONPATH": str(SERVER_SIDE),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": host.advertise,
    }
    if flags.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        # Bound threads of two servers would share one core.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def core_bindings(backend: str, index: int, size: int, threads: int, cores: Sequence[int]) -> dict[str, str]:
    """Which cores each rank of a server on the CPU computes on; SGLang asks for it when a server has several ranks."""
    if backend != "sglang" or size == 1:
        return {}
    first = index * size * threads
    places = [[cores[(first + rank * threads + k) % len(cores)] for k in range(threads)] for rank in range(size)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, place)) for place in places)}


def prepended(env: Mapping[str, str], name: str, first: str) -> str:
    """A list of folders like PYTHONPATH with `first` before what `env` has."""
    return os.pathsep.join(part for part in (first, env.get(name, "")) if part)


def flag_words(server: ForeignServer, name: str, value: Any) -> list[str]:
    """One flag, by plain name, as words of a command line."""
    flag = name.replace("_", "-")
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"] if server.negatable and name not in server.bare else []
    if isinstance(value, list):
        return [f"--{flag}", *map(_word, value)]
    return [f"--{flag}={_word(value)}"]


def _word(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list | bool) else str(value)
