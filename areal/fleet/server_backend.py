"""`ServerBackend`: everything that areal knows about one kind of inference server."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.api.config import GenerationHyperparameters, PPOConfig
from areal.api.config.lora import ALL_LINEAR, LoRAConfig, is_target
from areal.api.errors import InputError
from areal.fleet.replica import Replica
from areal.fleet.server_flags import FlagRules, Flags, Problems, flag_problems, given_flags, plain_name
from areal.system.checkpoint_files import stored_weights
from areal.system.vision_layout import FAMILIES, read_vision_layout


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBackend:
    """One row of `areal.fleet.backends`."""

    name: str
    """In `allocation_mode`; also the name of its config section, and of the package of a foreign server."""
    title: str
    client: Callable[[str, str, str], Replica]
    """(name, address, token) -> the client that speaks the server's dialect."""
    command: Callable[[PPOConfig, bool], ServerCommand]
    """(config, whether each server gets GPUs) -> how the servers of a run are started."""
    model_key: str
    """The option that names the model to serve; empty = actor.path."""
    context_key: str
    """The option that limits prompt plus answer, in tokens."""
    sampling_problems: SamplingLimits | None = None
    image_problems: Callable[[PPOConfig], Problems] | None = None
    """What these servers cannot do with a model that takes images; None: they can do everything."""
    image_families: tuple[str, ...] = ()
    """`model_type` of the models whose images these servers expand as areal does; empty: all."""
    run_flags: Callable[[PPOConfig], dict[str, tuple[Any, str]]] | None = None
    """Flags that this configuration needs -> the value and why; as `FlagRules.fixed`, and areal sets them."""
    flags: FlagRules | None = None
    """Of a foreign server: its section holds flags, it has a separate environment, and a host process runs it. None:
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
        section = getattr(config, self.name)
        if self.flags is None:
            return dataclasses.asdict(section)
        defaults = self.areal_defaults if config.server_defaults == "areal" else {}
        # A null in the section takes the server's own default.
        named = {plain_name(key) for key in section}
        defaults = {name: value for name, value in defaults.items() if name not in named}
        return defaults | given_flags(self.flags, section)

    def model(self, config: PPOConfig) -> str:
        """Folder or hub name of the model that the servers load when they start."""
        given = self.given(config)
        return str(given.get(self.model_key) or given.get("model") or config.actor.path)

    def problems(self, config: PPOConfig) -> Problems:
        """Everything in a configuration that these servers cannot do: (path of the key, what to change)."""
        given = self.given(config)
        if config.actor.router_replay and not self.returns_experts:
            text = f"needs servers that return the chosen experts, and {self.title} does not: use native or sglang"
            yield "actor.router_replay", text
        layout = read_vision_layout(self.model(config))
        if layout is not None and self.image_families and layout.family not in self.image_families:
            text = f"{self.title} cannot serve images of {layout.family} (docs/vision.md says why): use native servers"
            yield "allocation_mode", text
        if layout is not None and self.image_problems is not None:
            yield from self.image_problems(config)
        lora = config.actor.lora if config.publishes_adapters else None
        if layout is not None and lora is not None and _may_be_in_tower(lora, layout.family, self.model(config)):
            text = f"{self.title} applies adapters to the language model only, and these may be in the vision tower"
            advice = "use all-linear, exclude_modules, or actor.adapter_update_mode=merged"
            yield "actor.lora.target_modules", f"{text}: {advice}"
        if self.flags is not None:
            needed = {} if self.run_flags is None else self.run_flags(config)
            rules = dataclasses.replace(self.flags, fixed={**self.flags.fixed, **needed})
            yield from flag_problems(self.name, rules, getattr(config, self.name))
            load_format = given.get("load_format", "dummy")
            if config.actor.init_from_scratch and load_format != "dummy":
                text = f"{load_format!r} loads other weights than actor.init_from_scratch draws: remove it"
                yield f"{self.name}.load_format", text
        limit = given.get(self.context_key)
        for path, gconfig in (("gconfig", config.gconfig), ("eval_gconfig", config.eval_gconfig)):
            if gconfig is None:
                continue
            if isinstance(limit, int) and 0 < limit <= min(gconfig.max_new_tokens, gconfig.max_tokens - 1):
                limited = f"{self.name}.{self.context_key}={limit}"
                text = f"{gconfig.max_new_tokens} leaves no room for a prompt in {limited}: lower it"
                yield f"{path}.max_new_tokens", text
            if self.sampling_problems is not None:
                found = self.sampling_problems(gconfig, given, path == "gconfig")
                yield from ((f"{path}.{name}", text) for name, text in found)


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
