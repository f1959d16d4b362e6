"""`ServerBackend`: everything that areal knows about one kind of inference server."""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.config.redaction import HIDDEN, is_secret
from areal.api.config.train import ALL_LINEAR, LoRAConfig, is_target
from areal.api.data import ScoredRow, TokenScores
from areal.api.errors import InputError
from areal.api.registry import registered
from areal.fleet.replica import AnswerForm, Replica, ReplicaFactory
from areal.fleet.server_client import ServerClient
from areal.models.checkpoint_files import stored_weights
from areal.models.model_shape import ModelShape, context_length
from areal.models.vision_layout import FAMILIES, read_vision_layout
from areal.system.network import LOOPBACK, run_token

# ----------------------------------------------------------------------------------------------------------------------
# Checks of the flags that a config section (`sglang:`, `vllm:`) passes to a foreign server; their command line form.
#
# Only the installed server knows whether a flag exists and which values it takes: it reports that when it starts.

Flags = Mapping[str, Any]
Problems = Iterable[tuple[str, str]]
"""(path of a configuration key, a sentence that says what is wrong and what to change)."""
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

ALLOCATED = "allocation_mode sets it"
LISTENS = "areal chooses free ports on loopback"
ONE_PROCESS = "areal uses one HTTP process of each server"
ONE_GROUP = "areal stops a server as one process group"
OWN_GPUS = "areal assigns the GPUs of each server"
GETS_ADAPTERS = "the servers get the adapters of actor.lora"
NO_KEY = "servers that areal starts listen on loopback only and require no key"
COMMON_OWNED = {
    **dict.fromkeys(("host", "port"), LISTENS),
    **dict.fromkeys(("tp", "tensor_parallel_size", "node_rank"), ALLOCATED),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), "areal speaks plain HTTP to its servers"),
    "grpc_port": ONE_PROCESS,
    "api_key": NO_KEY,
    "config": "write the flags of that file here",
}
"""`FlagRules.owned` of every foreign server."""
COMMON_FIXED = {
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), (1, ALLOCATED)),
    "nnodes": (1, ALLOCATED),
}
"""`FlagRules.fixed` of every foreign server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRules:
    """What areal knows about the flags of one kind of foreign server. Names are plain: underscores, no dashes."""

    seed: str
    tokenizer: str
    owned: Mapping[str, str]
    """Flags that areal sets itself -> why the user cannot set them."""
    fixed: Mapping[str, tuple[Any, str]]
    """Flags that must have one value -> the value and why no other works."""
    negatable: bool
    """Whether a switch that is on by default is written as --no-... to turn it off."""
    bare: frozenset[str] = frozenset()
    """Switches without a --no-... form: false leaves them out."""
    ignored: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    """Keys of AReaL files that this server does not read, or whose value areal chooses -> the values that may be
    dropped; () = all values."""
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Flags with lists -> items of AReaL files and their names on this server."""


def plain_name(key: str) -> str:
    """The name of a flag with underscores and without leading dashes."""
    return key.lstrip("-").replace("-", "_")


def is_unset(value: Any) -> bool:
    """Whether a value leaves its flag out: null, "" and [], as in AReaL's files."""
    return value is None or value in ("", [])


def _is_ignored(rules: FlagRules, key: str, value: Any) -> bool:
    name = plain_name(key)
    return name in rules.ignored and (not rules.ignored[name] or value in rules.ignored[name])


def given_flags(rules: FlagRules, flags: Flags) -> dict[str, Any]:
    """The flags that reach the server, by plain name and with its values: without unset and ignored ones."""
    options = {
        plain_name(key): value
        for key, value in flags.items()
        if not is_unset(value) and not _is_ignored(rules, key, value)
    }
    if options.get("quantization") == "none":  # as in native.quantization; servers leave the flag out
        del options["quantization"]
    for name, names in rules.renamed.items():
        if isinstance(items := options.get(name), list):
            options[name] = [names.get(str(item), item) for item in cast("list[Any]", items)]
    return options


def ignored_flags(rules: FlagRules, flags: Flags) -> list[str]:
    """Keys that a user set and that have no effect on this kind of server."""
    return [
        key
        for key, value in flags.items()
        if _is_ignored(rules, key, value) and not is_unset(value) and value is not False
    ]


def flag_problems(section: str, rules: FlagRules, flags: Flags) -> Problems:
    """Every problem of a section that can be found without the server. Paths start with `section`."""
    seen: set[str] = set()
    for key, value in flags.items():
        name, path = plain_name(str(key)), f"{section}.{key}"
        if not _FLAG.fullmatch(str(key)):
            yield path, f"is not the name of a flag: write {name or 'it'} as the server's --help does, without --"
        elif name in seen:
            yield path, "is given twice, with dashes and with underscores: keep one"
        elif name in rules.owned and not is_unset(value):
            shown = HIDDEN if is_secret(name, value) else repr(value)
            yield path, f"{shown} cannot be set here, {rules.owned[name]}: remove it"
        elif is_secret(name, value):
            text = "would be in the list of processes: use launcher.inference_server_env_vars, for example HF_TOKEN=..."
            yield path, text
        elif name in rules.fixed and not is_unset(value) and value != rules.fixed[name][0]:
            expected, why = rules.fixed[name]
            shown = str(expected).lower() if isinstance(expected, bool) else expected
            yield path, f"{value!r} cannot be set here, {why}: remove it or set it to {shown}"
        elif problem := _value_problem(value):
            yield path, problem
        elif name == rules.seed and not is_unset(value) and not (type(value) is int and value >= 0):
            yield path, f"{value!r} is not a seed: use an integer of at least 0"
        seen.add(name)


def _value_problem(value: Any) -> str:
    if value == "???":
        return "is required: give it a value or remove it"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value!r} cannot be written on a command line: use a finite number"
    if isinstance(value, dict):
        inner = list(cast("dict[Any, Any]", value).values())
    elif isinstance(value, list):
        inner = cast("list[Any]", value)
    elif value is None or isinstance(value, bool | int | float | str):
        return "" if "\0" not in str(value) else "contains a zero byte: remove it"
    else:
        return f"{value!r} has a type that cannot be written on a command line: quote it"
    return next((problem for value in inner if (problem := _value_problem(value))), "")


def flag_words(rules: FlagRules, name: str, value: Any) -> list[str]:
    """The command line words of one flag. `name` is plain."""
    flag = name.replace("_", "-")
    if value is True:
        return [f"--{flag}"]
    if value is False:
        return [f"--no-{flag}"] if rules.negatable and name not in rules.bare else []
    if isinstance(value, list):
        return [f"--{flag}", *map(_word, cast("list[Any]", value))]
    return [f"--{flag}={_word(value)}"]


def _word(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list | bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How each server of a run is started. The host of a foreign server replaces {port} and {index+N}."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Defaults that launcher.inference_server_env_vars overrides, except PYTHONPATH, which is put first."""
    memory_bytes: int | None
    """Weights and KV cache of one server, all its devices together; None when the model is not on this machine."""


QWEN_VL = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl")
"""Families whose images vLLM and SGLang take without settings of their own."""
_TEXT_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj"}
"""Layers of the language models of `QWEN_VL` that their towers do not have under these names."""
SamplingLimits = Callable[[GenerationHyperparameters, Flags, bool], Problems]
"""(settings, the server's flags, whether answers are trained on) -> (field, sentence) for each setting that the server
does not apply exactly."""


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """How servers are asked for the log-probabilities of given tokens."""

    path: str
    body: Callable[[Sequence[int], int, int], dict[str, Any]]
    """(token ids, first >= 1 to be scored, number of likeliest tokens at each place) -> the request."""
    parse: Callable[[Any, Sequence[int], int, int], TokenScores]
    """(answer, and the same) -> the scores. KeyError, TypeError or ValueError for another form."""

    async def ask(
        self, client: ServerClient, row: ScoredRow, top_k: int, more: Mapping[str, str] = MappingProxyType({})
    ) -> TokenScores:
        """The scores by one server. `more`: fields of the request that name an adapter."""
        ids, first = row.token_ids, row.first
        answer = await client.post(self.path, self.body(ids, first, top_k) | dict(more))
        return client.parsed(answer, lambda body: self.parse(body, ids, first, top_k))


def _generate_body(token_ids: Sequence[int], first: int, top_k: int) -> dict[str, Any]:
    # SGLang returns null for the first token of its range, so the range begins one token earlier
    body = {"input_ids": list(token_ids), "return_logprob": True, "logprob_start_len": first - 1, "stream": False}
    return body | {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "top_logprobs_num": top_k}


def _generate_scores(answer: Any, token_ids: Sequence[int], first: int, top_k: int) -> TokenScores:
    meta, count, top = answer["meta_info"], len(token_ids) - first, list[list[tuple[int, float]]]()
    for place in meta["input_top_logprobs"][-count:] if top_k else ():
        top.append([(token, logprob) for logprob, token, *_ in place])
    return checked_scores([entry[0] for entry in meta["input_token_logprobs"][-count:]], top, count, top_k)


def checked_scores(logprobs: list[float], top: list[list[tuple[int, float]]], count: int, top_k: int) -> TokenScores:
    """ValueError unless there is a finite number for each of `count` tokens, with `top_k` tokens at each place."""
    if len(logprobs) != count or not all(isinstance(value, float) and math.isfinite(value) for value in logprobs):
        raise ValueError(f"log-probabilities of {count} tokens are not {count} finite numbers")
    if top_k and (len(top) != count or any(len(place) != top_k for place in top)):
        raise ValueError(f"it does not list {top_k} tokens at each of {count} places")
    return TokenScores(logprobs, top)


GENERATE_SCORING = ScoringCall("/generate", _generate_body, _generate_scores)
"""That of SGLang and of the native server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBackend:
    """One row of `areal.fleet.server_backend`."""

    name: str
    """Name in `allocation_mode`, of its config section, and of the package of a foreign server."""
    title: str
    client: Callable[[str, str, str, AnswerForm], Replica]
    """(name, address, token, form) -> the client that speaks the server's dialect."""
    command: Callable[[PPOConfig, bool], ServerCommand]
    """(config, whether each server gets GPUs) -> how the servers of a run are started."""
    model_key: str
    """The option that names the model to serve; empty = actor.path."""
    context_key: str
    """The option that limits prompt plus answer, in tokens."""
    scoring: ScoringCall | None = None
    """How these servers score given tokens; None: they cannot."""
    sampling_problems: SamplingLimits | None = None
    own_problems: Callable[[PPOConfig], Problems] | None = None
    """What else in a configuration these servers cannot do."""
    image_families: tuple[str, ...] = ()
    """`model_type` of the models whose images these servers expand as areal does; empty: all."""
    run_flags: Callable[[PPOConfig], dict[str, tuple[Any, str]]] | None = None
    """Flags that this configuration needs -> the value and why; as `FlagRules.fixed`, and areal sets them."""
    flags: FlagRules | None = None
    """Rules of a foreign server, whose section holds flags, and which a host process runs in its environment. None:
    the section is a dataclass and the server is a process of areal."""
    returns_experts: bool = False
    """Whether answers can have the experts that the model chose (actor.router_replay)."""
    areal_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Flags that AReaL v0.5 gives the server where it has another default (server_defaults=areal)."""
    minimum_version: str = ""
    """The oldest version that accepts the command."""
    tested_version: str = ""
    core_bindings: Callable[[int, int, int, Sequence[int]], dict[str, str]] | None = None
    """(index of the server, its ranks, threads per rank, cores) -> variables that bind the ranks on a CPU machine."""
    part_words: Callable[[int, int], tuple[str, ...]] | None = None
    """(part, parts) -> more words of the command of a server over several machines, in which the host replaces {first},
    {first_address} and {first_port} by where part 0 listens for the others. None: a server uses one machine."""
    address_variable: str = ""
    """Environment variable with the address on which a part listens for the others."""
    nccl_defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """NCCL variables that the trainers must share with the servers."""

    def given(self, config: PPOConfig) -> dict[str, Any]:
        """The options of this backend's section that reach the server."""
        section = config.server_section(self.name)
        if self.flags is None:
            return dataclasses.asdict(section)
        defaults = self.areal_defaults if config.server_defaults == "areal" else {}
        # A null in the section takes the server's own default.
        named = {plain_name(key) for key in section}
        defaults = {name: value for name, value in defaults.items() if name not in named}
        return defaults | given_flags(self.flags, section)

    def model(self, config: PPOConfig) -> str:
        """Folder or hub name of the model that the servers load when they start."""
        options = self.given(config)
        return str(options.get(self.model_key) or options.get("model") or config.actor.path)

    def problems(self, config: PPOConfig) -> Problems:
        """Everything in a configuration that these servers cannot do: (path of the key, what to change)."""
        options = self.given(config)
        if config.actor.router_replay and not self.returns_experts:
            text = f"needs servers that return the chosen experts, and {self.title} does not: use native or sglang"
            yield "actor.router_replay", text
        layout = read_vision_layout(self.model(config))
        if layout is not None and self.image_families and layout.family not in self.image_families:
            text = f"{self.title} cannot serve images of {layout.family} (docs/vision.md says why): use native servers"
            yield "allocation_mode", text
        if self.own_problems is not None:
            yield from self.own_problems(config)
        lora = config.actor.lora if config.publishes_adapters else None
        if layout is not None and lora is not None and _may_be_in_tower(lora, layout.family, self.model(config)):
            text = f"{self.title} applies adapters to the language model only, and these may be in the vision tower"
            advice = "use all-linear, exclude_modules, or actor.adapter_update_mode=merged"
            yield "actor.lora.target_modules", f"{text}: {advice}"
        if self.flags is not None:
            needed = {} if self.run_flags is None else self.run_flags(config)
            rules = dataclasses.replace(self.flags, fixed={**self.flags.fixed, **needed})
            yield from flag_problems(self.name, rules, config.server_section(self.name))
            load_format = options.get("load_format", "dummy")
            if config.actor.init_from_scratch and load_format != "dummy":
                text = f"{load_format!r} loads other weights than actor.init_from_scratch draws: remove it"
                yield f"{self.name}.load_format", text
        limit = options.get(self.context_key)
        for path, gconfig in (("gconfig", config.gconfig), ("eval_gconfig", config.eval_gconfig)):
            if gconfig is None:
                continue
            if isinstance(limit, int) and 0 < limit <= min(gconfig.max_new_tokens, gconfig.max_tokens - 1):
                limited = f"{self.name}.{self.context_key}={limit}"
                text = f"{gconfig.max_new_tokens} leaves no room for a prompt in {limited}: lower it"
                yield f"{path}.max_new_tokens", text
            if self.sampling_problems is not None:
                problems = self.sampling_problems(gconfig, options, path == "gconfig")
                yield from ((f"{path}.{name}", text) for name, text in problems)


def _may_be_in_tower(lora: LoRAConfig, family: str, model: str) -> bool:
    """Whether adapters may be in layers that only images use: by their names in the checkpoint, if it is here."""
    targets = lora.target_modules
    if targets in (ALL_LINEAR, [ALL_LINEAR]) or (family in QWEN_VL and set(targets) <= _TEXT_LAYERS):
        return False
    try:
        names = stored_weights(Path(model).expanduser())
    except InputError:
        return True
    parts = set(FAMILIES[family].modules)
    layers = [f"model.{name.removeprefix('model.').removesuffix('.weight')}" for name in names]
    tower = [name for name in layers if parts.intersection(name.split("."))]
    return any(is_target(name, targets) and not is_target(name, lora.exclude_modules) for name in tower)


# ----------------------------------------------------------------------------------------------------------------------
# What the commands of all foreign servers share: interpreter, listening address, seed, dtype, memory.

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
    rules, options, model = backend.flags, backend.given(config), backend.model(config)
    assert rules is not None, "a foreign server has flags"
    flags = {"dtype": config.actor.compute_dtype, **defaults}
    if config.tokenizer_path not in ("", config.actor.path, model):
        flags[rules.tokenizer] = config.tokenizer_path
    flags |= {name: value for name, value in options.items() if name not in (backend.model_key, "model")}
    flags |= owned
    if config.servers_start_empty:
        flags["load_format"] = "dummy"  # the server serves once it has the random weights of the trainer
    seed = options.get(rules.seed, config.seed)
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
    """Bytes of weights and cache; of the weights alone on a GPU where the cache takes the memory that is left."""
    shape = ModelShape.read(model)
    if shape is None:
        return None
    element = element_bytes(flags.get("dtype"))
    tokens, cache = flags.get("max_total_tokens"), flags.get("kv_cache_memory_bytes")
    if not isinstance(cache, int):
        cache = tokens * shape.kv_values_per_token * element if isinstance(tokens, int) else 0
    saved = element - 1 if flags.get("quantization") else 0
    return shape.parameters * element - shape.block_matrices * saved + cache


def element_bytes(dtype: Any) -> int:
    return 4 if dtype in ("float32", "float") else 2


def prepended(env: Mapping[str, str], name: str, first: str) -> str:
    """A search path like PYTHONPATH with `first` before what `env` has."""
    return os.pathsep.join(part for part in (first, env.get(name, "")) if part)


# ----------------------------------------------------------------------------------------------------------------------
# The inference backend of a run, by name. `docs/servers.md` describes how to add one.


def backend_named(name: str) -> ServerBackend:
    """The backend that `allocation_mode` calls `name`. ConfigError when there is none."""
    return registered("backends", name, key="allocation_mode").load()


def replica_factory(name: str) -> ReplicaFactory:
    """Makes clients of the servers of a backend, with the token that the launcher gives to every process of a run."""
    make_client, token = backend_named(name).client, run_token()
    return lambda replica_name, address, form: make_client(replica_name, address, token, form)
