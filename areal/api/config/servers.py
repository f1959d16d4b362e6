"""Owns what the mappings `sglang:` and `vllm:` may hold: flags of foreign servers, verbatim, but for those areal sets.

Whether a flag exists and takes its value is known to the installed server alone: the launcher asks it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.config.fields import Problems

Flags = Mapping[str, Any]
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignServer:
    """What areal has to know of one kind of server to check its mapping."""

    name: str
    """As people write it."""
    minimum: str
    """The oldest version that takes the command areal starts it with."""
    tested: str
    context: str
    """The flag that limits prompt plus answer."""
    model: str
    seed: str
    owned: Mapping[str, str]
    """Flags that areal sets itself -> where it takes them from, or why."""
    fixed: Mapping[str, tuple[Any, str]]
    """Flags that may hold one value only -> the value, and why no other."""
    negatable: bool
    """Whether a switch that is on by default has a form --no-..., which false is written as."""
    bare: frozenset[str] = frozenset()
    """Switches without that form: false leaves them out."""
    ignored: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Keys of AReaL files that only AReaL's own patches or older servers read -> the values that ask nothing of us;
    () = any."""


_ALLOCATED = "allocation_mode says it"
_LISTENS = "areal chooses free ports on loopback"
_ONE_PROCESS = "areal talks to one HTTP process of each server"
_ONE_GROUP = "areal ends a server as one group of processes"
_OWN_GPUS = "areal gives each server its GPUs"
_NO_KEY = "servers that areal starts listen on loopback only, where nobody is asked for a key"
_NO_TLS = "areal speaks plain HTTP to its servers"
_NO_FILE = "write the flags of that file here"

SGLANG = ForeignServer(
    name="SGLang",
    minimum="0.5.10",  # --incremental-streaming-output
    tested="0.5.23",
    context="context_length",
    model="model_path",
    seed="random_seed",
    owned={
        "host": _LISTENS,
        "port": _LISTENS,
        "nccl_port": _LISTENS,
        "grpc_port": _ONE_PROCESS,
        "grpc_mode": _ONE_PROCESS,
        "smg_grpc_mode": _ONE_PROCESS,
        "tp": _ALLOCATED,
        "tp_size": _ALLOCATED,
        "tensor_parallel_size": _ALLOCATED,
        "device": "areal gives each server its GPUs, or none",
        "base_gpu_id": _OWN_GPUS,
        "gpu_id_step": _OWN_GPUS,
        "node_rank": _ALLOCATED,
        "dist_init_addr": _LISTENS,
        "nccl_init_addr": _LISTENS,
        "weight_version": "areal counts the versions of the weights",
        "stream_output": "areal sets how answers are streamed",
        "incremental_streaming_output": "areal sets how answers are streamed",
        "api_key": _NO_KEY,
        "admin_api_key": _NO_KEY,
        "ssl_keyfile": _NO_TLS,
        "ssl_certfile": _NO_TLS,
        "config": _NO_FILE,
    },
    fixed={
        "enable_metrics": (True, "areal reads them"),
        "dp_size": (1, _ALLOCATED),
        "data_parallel_size": (1, _ALLOCATED),
        "pp_size": (1, _ALLOCATED),
        "pipeline_parallel_size": (1, _ALLOCATED),
        "nnodes": (1, "a server lives on one machine"),
        "tokenizer_worker_num": (1, _ONE_PROCESS),
        "use_ray": (False, _ONE_GROUP),
        "disaggregation_mode": ("null", "each server reads prompts and writes answers"),
    },
    negatable=False,
    ignored={
        "enable_multithread_load": (),  # patches of AReaL's for SGLang 0.5.2
        "enable_fast_load": (),
        "enable_ep_moe": (False,),
        "enable_nan_detection": (False,),
    },
)

VLLM = ForeignServer(
    name="vLLM",
    minimum="0.30.0",  # --enable-scale-out
    tested="0.32.0",
    context="max_model_len",
    model="model",
    seed="seed",
    owned={
        "host": _LISTENS,
        "port": _LISTENS,
        "uds": _LISTENS,
        "grpc": _ONE_PROCESS,
        "grpc_port": _ONE_PROCESS,
        "headless": _ONE_PROCESS,
        "tensor_parallel_size": _ALLOCATED,
        "tp": _ALLOCATED,
        "enable_scale_out": "areal needs it",
        "tokens_only": "areal needs the other endpoints too",
        "weight_transfer_config": "areal brings its own",
        "logprobs_mode": "areal chooses it by gconfig",
        "device_ids": _OWN_GPUS,
        "node_rank": _ALLOCATED,
        "master_addr": _LISTENS,
        "master_port": _LISTENS,
        "api_key": _NO_KEY,
        "root_path": "areal calls the server directly",
        "ssl_keyfile": _NO_TLS,
        "ssl_certfile": _NO_TLS,
        "config": _NO_FILE,
    },
    fixed={
        "data_parallel_size": (1, _ALLOCATED),
        "pipeline_parallel_size": (1, _ALLOCATED),
        "prefill_context_parallel_size": (1, _ALLOCATED),
        "nnodes": (1, "a server lives on one machine"),
        "distributed_executor_backend": ("mp", _ONE_GROUP),
        "api_server_count": (1, _ONE_PROCESS),
        "disable_log_stats": (False, "areal reads the metrics"),
    },
    negatable=True,
    bare=frozenset({"disable_log_stats", "aggregate_engine_logging"}),
    ignored={
        "worker_extension_cls": (),  # areal brings its own; AReaL files name AReaL's
        "swap_space": (),  # gone with vLLM's first engine
    },
)

FOREIGN_SERVERS = {"sglang": SGLANG, "vllm": VLLM}
"""By backend as allocation_mode names it, which is also the name of the mapping."""


def plain_name(key: str) -> str:
    """A flag as its mapping's other keys are compared with it: underscores, no leading dashes."""
    return key.lstrip("-").replace("-", "_")


def asks_nothing(value: Any) -> bool:
    """null, "" and [] leave a flag out, as in AReaL's files."""
    return value is None or value in ("", [])


def is_ignored(server: ForeignServer, key: str, value: Any) -> bool:
    """Whether a key is one that AReaL files hold and no server reads."""
    name = plain_name(key)
    return name in server.ignored and (not server.ignored[name] or value in server.ignored[name])


def flag_problems(section: str, flags: Flags) -> Problems:
    """What is wrong with a mapping as far as it can be told without the server. Paths start with `section`."""
    server = FOREIGN_SERVERS[section]
    seen: set[str] = set()
    for key, value in flags.items():
        name, path = plain_name(str(key)), f"{section}.{key}"
        if not _FLAG.fullmatch(str(key)):
            yield path, f"is no name of a flag: write {name or 'it'} as {server.name}'s help does, without --"
        elif name in seen:
            yield path, "is given twice, with dashes and with underscores: keep one"
        elif name in server.owned and not asks_nothing(value):
            yield path, f"{value!r} cannot be chosen here, {server.owned[name]}: remove it"
        elif name in server.fixed and not asks_nothing(value) and value != server.fixed[name][0]:
            expected, why = server.fixed[name]
            yield path, f"{value!r} cannot be chosen here, {why}: remove it or set it to {_yaml(expected)}"
        elif problem := _value_problem(value):
            yield path, problem
        elif name == server.seed and not asks_nothing(value) and (isinstance(value, bool) or not _is_seed(value)):
            yield path, f"{value!r} is no seed: use a whole number of at least 0"
        seen.add(name)


def given_flags(section: str, flags: Flags) -> dict[str, Any]:
    """The flags that a mapping really gives, by plain name, without what asks nothing and what is ignored."""
    server = FOREIGN_SERVERS[section]
    return {
        plain_name(key): value
        for key, value in flags.items()
        if not asks_nothing(value) and not is_ignored(server, key, value)
    }


def ignored_keys(section: str, flags: Flags) -> list[str]:
    """Keys of a mapping that have no effect, for a notice."""
    server = FOREIGN_SERVERS[section]
    return [
        f"{section}.{key}"
        for key, value in flags.items()
        if is_ignored(server, key, value) and not asks_nothing(value) and value is not False
    ]


def context_limit(section: str, flags: Flags) -> tuple[str, int] | None:
    """The configured limit of prompt plus answer and its path; None when the server takes the model's own."""
    name = FOREIGN_SERVERS[section].context
    value = given_flags(section, flags).get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return f"{section}.{name}", value
    return None


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value_problem(value: Any) -> str:
    if value == "???":
        return "is required: give it a value or remove it"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value!r} is no number that a command line can carry"
    if isinstance(value, dict):
        inner = list(cast("dict[Any, Any]", value).values())
    elif isinstance(value, list):
        inner = cast("list[Any]", value)
    elif value is None or isinstance(value, bool | int | float | str):
        return "" if "\0" not in str(value) else "holds a zero byte"
    else:
        return f"{value!r} is of a type that a command line cannot carry: put it in quotes"
    return next((problem for one in inner if (problem := _value_problem(one))), "")
