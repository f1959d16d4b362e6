"""A translated configuration with the origin of each option, and what became of each key of the source. Pure."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import isfinite, isnan
from typing import Any, Literal, cast

from areal.api.allocation import ParallelDims
from areal.api.config.redaction import public
from areal.api.errors import ConfigError

Fate = Literal["kept", "computed", "server", "dropped", "missing"]
"""kept: an option with the same meaning. computed: from this and other keys. server: a flag of the inference server.
dropped: safe to leave out. missing: there is no counterpart."""
UNKNOWN = "no counterpart is known"
TENSORBOARD = "${cluster.fileroot}/${experiment_name}/${trial_name}/tensorboard"
"""A folder in the run folder, so that every run has another one."""


@dataclass(frozen=True, slots=True)
class Note:
    fate: Fate
    text: str  # The option that it became, or why there is none.


@dataclass(frozen=True, slots=True)
class Option:
    value: Any
    origin: str  # Where the value comes from; a comment in the YAML file.
    keys: tuple[str, ...] = ()  # Keys of the source that it is computed from, whether the source has them or not.


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. Lists and empty mappings are values."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            values |= flat(cast("dict[str, Any]", value), f"{key}.")
        else:
            values[key] = value
    return values


@dataclass
class Draft:
    system: str
    values: dict[str, Any]  # The values of the source, by dotted key.
    options: dict[str, Option] = field(default_factory=dict[str, Option])
    notes: dict[str, Note] = field(default_factory=dict[str, Note])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` without one. The key stays unclassified."""
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float, *, least: float = 0) -> float:
        """A number of at least `least`. Raises ConfigError for another value, which may be a variable of a shell."""
        value = self.get(key, default)
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not (isfinite(number) and number >= least):
            message = f"{key}: {value!r} is no number of at least {least}: give {key}=NUMBER after the file"
            raise ConfigError(message, code="config.wrong_type" if isnan(number) else "config.out_of_range")
        return number

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        number = self.number(key, default, least=least)
        if number != int(number):
            message = f"{key}: {number} is no whole number: give {key}=NUMBER after the file"
            raise ConfigError(message, code="config.wrong_type")
        return int(number)

    def listed(self, key: str, default: Sequence[Any] = ()) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, str | list | tuple):
            message = f"{key}: {value!r} is no list: give {key}=[VALUE,...] after the file"
            raise ConfigError(message, code="config.wrong_type")
        return [value] if isinstance(value, str) else list(cast("list[Any]", value))

    def keep(self, key: str, *options: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """The key means the same as each of `options`. A null is left out: the default is used."""
        if key not in self.values or key in self.notes or not options:
            return
        value = self.values[key]
        if value is None:
            self.notes[key] = Note("dropped", "null: the default is used")
            return
        for option in options:
            self.options[option] = Option(convert(value), f"{self.system}: {key}")
        self.notes[key] = Note("kept", ", ".join(options))

    def keep_all(self, table: Mapping[str, str]) -> None:
        for key, option in table.items():
            self.keep(key, option)

    def set(self, option: str, value: Any, why: str, *keys: str) -> None:
        """An option that is computed from `keys`, or required here. `why` is its comment."""
        self.options[option] = Option(value, why, keys)
        for key in keys:
            if key in self.values:
                computed = [(path, option.value) for path, option in self.options.items() if key in option.keys]
                self.notes[key] = Note(
                    "computed", ", ".join(f"{path}={public(value, path)}" for path, value in computed)
                )

    def defaults(self, values: Mapping[str, Any]) -> None:
        """Defaults of the source that differ from ours, by option: for the options that no key has set."""
        for option, value in values.items():
            if option not in self.options:
                self.set(option, value, f"{self.system}: its default")

    def server(self, prefix: str, section: str, names: Mapping[str, str] | None = None) -> None:
        """The keys below `prefix` are flags of the server. `names`: only these, with the names of the flags."""
        for key in [key for key in self.values if key.startswith(prefix)]:
            name = key.removeprefix(prefix)
            flag = name if names is None else names.get(name)
            if flag is None or key in self.notes:
                continue
            option = f"{section}.{flag}"
            if self.values[key] is None:
                self.notes[key] = Note("dropped", "null: the server's default")
            else:
                self.options[option] = Option(self.values[key], f"{self.system}: {key}, a flag of the server")
                self.notes[key] = Note("server", option)

    def drop(self, why: str, *patterns: str) -> None:
        """Keys that need no counterpart."""
        self._note("dropped", why, patterns)

    def lack(self, why: str, *patterns: str, off: Sequence[Any] = (None, False, 0, 0.0, -1, "", [], {})) -> None:
        """Keys of something that does not exist here. With a value of `off` they have no effect."""
        for key in self._matching(patterns):
            is_off = any(self.values[key] == value and type(self.values[key]) is type(value) for value in off)
            self.notes[key] = Note("dropped", "it is switched off") if is_off else Note("missing", why)

    def finish(self) -> None:
        """Required options get a value; every key that nothing has classified is missing, unless it is null."""
        for role, rate in (("actor", 1e-6), ("critic", 1e-5)):
            has_role = any(option.startswith(f"{role}.") for option in self.options)
            if self.system != "AReaL" and has_role and f"{role}.optimizer.lr" not in self.options:
                self.set(f"{role}.optimizer.lr", rate, f"{self.system} has it as its default: check it")
        self.lack("the file of this entry of Hydra's defaults was not found", "defaults.*", "defaults", off=())
        self.lack(UNKNOWN, "*", off=(None,))

    @property
    def num_known(self) -> int:
        """Keys that became options or flags."""
        return sum(note.fate in ("kept", "computed", "server") for note in self.notes.values())

    @property
    def is_foreign(self) -> bool:
        """Whether the source is of another system: it has no known key, or more than ten unknown ones for each."""
        unknown = sum(note.fate == "missing" and note.text.startswith(UNKNOWN) for note in self.notes.values())
        return self.num_known == 0 or unknown > 10 * self.num_known

    def unresolved(self, key: str, written: Any, why: str) -> None:
        """A key, or a section, without a value. The comments of the options that it decides say so."""
        self.values[key], self.notes[key] = written, Note("missing", f"give {key}=VALUE after the file: {why}")
        for path, option in self.options.items():
            names = (*option.keys, *re.findall(r"[\w.]+", option.origin))
            if any(f"{name}.".startswith(f"{key}.") for name in names):
                origin = f"{option.origin}: the default of {key}, which has no value"
                self.options[path] = replace(option, origin=origin)

    def refer(self, references: Mapping[str, str]) -> None:
        """Options whose key was `${other}` in the source refer to the other option, so that one override changes both.

        `references`: the key -> the other key. Only where both were kept with equal values.
        """
        values = {path: option.value for path, option in self.options.items()}
        for key, other in references.items():
            mine, theirs = self._kept_as(key), self._kept_as(other)
            if mine and theirs and values[mine] == values[theirs]:
                self.options[mine] = replace(self.options[mine], value=f"${{{theirs}}}")

    def _kept_as(self, key: str) -> str:
        note = self.notes.get(key)
        option = self.options.get(note.text) if note is not None and note.fate == "kept" else None
        return note.text if note is not None and option is not None and option.origin.endswith(f": {key}") else ""

    def _note(self, fate: Fate, why: str, patterns: Sequence[str]) -> None:
        for key in self._matching(patterns):
            self.notes[key] = Note(fate, why)

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        return [
            key
            for key in self.values
            if key not in self.notes and any(fnmatchcase(key, pattern) for pattern in patterns)
        ]


def minibatches(batch: int, size: int) -> int:
    return max(1, -(-batch // max(1, size)))


# Devices of a draft: allocation_mode, the number of machines, and options of Megatron that several systems share.

_OPTIONS = {
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
} | {
    name: name
    for name in (
        "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "distribute_saved_activations", "moe_token_dispatcher_type", "moe_router_dtype", "moe_permute_fusion",
        "moe_shared_expert_overlap", "fp8", "fp8_recipe",
    )
} | {"fp8_param": "ddp.fp8_param_gather"}  # fmt: skip
"""Name in Megatron-Core -> option below actor.megatron, if both mean the same without stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer of one data rank, which `set_devices` multiplies."""

    backend: str = "fsdp"
    sizes: ParallelDims


def megatron_trainer(draft: Draft, prefix: str, *more: str) -> Trainer:
    """The sizes of Megatron-Core below `prefix`, and its options there and below `more`."""
    tensor, pipeline, expert = (
        draft.whole(f"{prefix}{name}_model_parallel_size", 1) for name in ("tensor", "pipeline", "expert")
    )
    context = draft.whole(f"{prefix}context_parallel_size", 1)
    expert_tensor = draft.whole(f"{prefix}expert_tensor_parallel_size", 1)
    for place in (prefix, *more):
        if draft.get(f"{place}fp8") is False:
            draft.drop("it is switched off", f"{place}fp8*")
        for name, option in _OPTIONS.items():
            draft.keep(f"{place}{name}", f"actor.megatron.{option}")
    if pipeline > 1:
        draft.keep(f"{prefix}virtual_pipeline_model_parallel_size", "actor.megatron.virtual_pipeline_parallel_size")
    sizes = ParallelDims(tp=tensor, pp=pipeline, cp=context, ep=expert, etp=expert_tensor)
    return Trainer(backend="megatron", sizes=sizes)


def halves(total: int, server_size: int, trainer: Trainer) -> tuple[int, int, int]:
    """Replicas and size of servers, and GPUs of the trainer, where the source uses `total` GPUs for both in turn."""
    sizes = trainer.sizes
    unit = sizes.pp * math.lcm(sizes.world_size // sizes.pp, sizes.ep * sizes.etp)
    if total % unit:  # experts that the source cannot divide either
        unit = sizes.world_size
    while server_size > max(1, total // 2):
        server_size //= 2
    replicas = max(1, total // 2 // server_size)
    trained = max(unit, (total - replicas * server_size) // unit * unit)
    return max(1, (total - trained) // server_size), server_size, trained


def set_devices(
    draft: Draft,
    server: str,
    parts: tuple[int, int, int],
    trainer: Trainer,
    why: str,
    keys: Sequence[str],
    *,
    nodes: int = 1,
    per_node: int = 8,
) -> ParallelDims:
    """Set allocation_mode, and cluster.n_nodes where that needs more than `nodes`. `parts`: as `halves` returns them.

    There are at most as many data ranks as prompts in a batch. Returns the sizes of the trainer.
    """
    replicas, server_size, gpus = parts
    ranks, batch = max(1, gpus // trainer.sizes.world_size), int(draft.options["train_dataset.batch_size"].value)
    data = min(ranks, batch)
    why += f"; {data} of {ranks} data ranks: a batch has {batch} prompts" if data < ranks else ""
    sizes = replace(trainer.sizes, dp=data)
    if sizes.world_size // sizes.pp % (sizes.ep * sizes.etp):
        keys_of_experts = ("*expert*parallel_size", "policy.parallelism.ep_size")
        draft.lack(f"it does not divide the {data} data ranks and those of a model", *keys_of_experts, off=(1,))
        sizes = replace(sizes, ep=1, etp=1)
    servers = f"{server}:{ParallelDims(dp=replicas, tp=server_size)}+" if replicas else ""
    unread = (key for key in keys if key not in draft.notes)
    draft.set("allocation_mode", f"{servers}{trainer.backend}:{sizes}", why, *unread)
    needed = replicas * server_size + sizes.world_size
    keys_of_nodes = ("trainer.nnodes", "num_nodes")
    if needed > nodes * per_node:
        draft.set("cluster.n_nodes", -(-needed // per_node), f"{needed} GPUs of allocation_mode", *keys_of_nodes)
    return sizes


_NAMED = ("actor.policy_loss", "actor.adv_estimator")


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by path as a tree. A name with options of its own (policy_loss, policy_loss.ratio) is their `name`."""
    tree: dict[str, Any] = {}
    for path, value in options.items():
        has_own = path in _NAMED and any(other.startswith(f"{path}.") for other in options)
        *sections, name = [*path.split("."), *(["name"] if has_own else [])]
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree
