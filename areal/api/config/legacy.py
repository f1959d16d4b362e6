"""Owns the keys of AReaL v0.5 files that this version has no field for: which values they may hold, and why.

A file written for AReaL loads when such a key asks nothing of us. Otherwise the run is refused: an option that is
read by nothing must not look as if it worked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from areal.api.config.algorithm import PPOActorConfig


@dataclass(frozen=True, slots=True)
class Accepts:
    """Only these values ask nothing of us; any other is refused."""

    values: tuple[Any, ...]
    instead: str = ""
    """What to do in its place, if there is something."""


@dataclass(frozen=True, slots=True)
class CopyOf:
    """A repetition of another key: null, empty or equal to it."""

    path: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """Any value is accepted and has no effect; `notice` says whether the user is told."""

    notice: bool = True


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """A section that may stand there as long as its `enabled` is false."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """The value goes to another option of the same section, which has taken this key's place."""

    path: str
    """Dotted, below the section that the key stands in."""
    values: tuple[tuple[Any, Any], ...] | None = None
    """What old values are called there; of a switch, false asks only that none of them is given. None: the same."""

    def translated(self, value: Any) -> tuple[Any, ...]:
        """(the value there,), or () when the key does not decide it."""
        if self.values is None:
            return (value,)
        return tuple(new for old, new in self.values if type(value) is type(old) and value == old)


LegacyRule = Accepts | CopyOf | Ignored | SwitchedOff | MovedTo

_FALSE = Accepts((False,))
_NULL = Accepts((None,))
_SILENT = Ignored(notice=False)
_NAMES: dict[str, LegacyRule] = {"experiment_name": CopyOf("experiment_name"), "trial_name": CopyOf("trial_name")}
_PLACE: dict[str, LegacyRule] = {**_NAMES, "fileroot": CopyOf("cluster.fileroot")}
_SCHEDULING: dict[str, LegacyRule] = {"scheduling_spec": Ignored(), "scheduling_strategy": Ignored()}
_ONLY_FILES = "this version finds processes through files (type: nfs)"

_LEGACY: dict[str, dict[str, LegacyRule]] = {
    "BaseExperimentConfig": {
        "enable_offload": _FALSE,
        "async_training": Accepts((True,), "rollout.max_head_offpolicyness=0 makes training synchronous"),
        "sglang": Ignored(),
        "vllm": Ignored(),
        "scheduler": Ignored(),
    },
    # Only the single-controller mode of AReaL reads the scheduling keys; the local launcher has none.
    "TrainEngineConfig": {
        **_NAMES,
        **_SCHEDULING,
        "pad_to_maximum": _FALSE,
        "megatron": Ignored(),
        "use_lora": _FALSE,
        "lora_rank": _SILENT,
        "lora_alpha": _SILENT,
        "target_modules": _SILENT,
        "peft_type": _SILENT,
        "is_critic": _FALSE,
        "weight_update_mode": _SILENT,  # only the actor's weights are published
    },
    "ScoreModelConfig": {"is_critic": Accepts((False, True))},
    "PPOCriticConfig": {"is_critic": Accepts((False, True)), "mask_no_eos_with_zero": _SILENT},
    "PPOActorConfig": {
        "max_new_tokens": CopyOf("gconfig.max_new_tokens"),
        "log_agent_stats": _FALSE,
        "log_agent_stats_keys": _SILENT,
        "use_sapo_loss": MovedTo("policy_loss", ((True, "sapo"),)),
        "sapo_tau_pos": MovedTo("sapo.tau_pos"),
        "sapo_tau_neg": MovedTo("sapo.tau_neg"),
    },
    "OptimizerConfig": {
        "offload": Accepts((False,), "fsdp.offload_params does it"),
        "initial_loss_scale": Accepts((2**32,)),
        "min_loss_scale": Accepts((1.0,)),
        "loss_scale_window": Accepts((5,)),
        "hysteresis": Accepts((2,)),
    },
    "GenerationHyperparameters": {"lora_name": Accepts(("", None))},
    "InferenceEngineConfig": {
        **_PLACE,
        **_SCHEDULING,
        "queue_size": Accepts((None,), "rollout.max_concurrent_rollouts bounds the episodes in flight"),
        "use_lora": _FALSE,
        "tokenizer_path": CopyOf("tokenizer_path"),
        "dump_to_file": _SILENT,  # the ledger keeps every trajectory
    },
    # How AReaL's data loader works, not what it yields.
    "DatasetConfig": {"pin_memory": _SILENT, "num_workers": _SILENT},
    "ValidDatasetConfig": {
        "batch_size": _SILENT,  # rollout.max_concurrent_rollouts bounds an evaluation too
        "shuffle": _SILENT,  # a mean does not depend on the order
        "drop_last": Accepts((False,), "max_rows leaves rows out"),
    },
    "ClusterSpecConfig": {"cluster_name": _SILENT},
    "LauncherConfig": {
        "inference_server_mem_per_gpu": _SILENT,  # a request to a cluster's scheduler; the local launcher has none
        "trainer_mem_per_gpu": _SILENT,
        "slurm": Ignored(),
    },
    "NameResolveConfig": {
        "etcd3_addr": Accepts(("localhost:2379",), _ONLY_FILES),
        "ray_actor_name": Accepts(("ray_kv_store",), _ONLY_FILES),
    },
    "EvaluatorConfig": _PLACE,
    "RecoverConfig": _PLACE,
    "SaverConfig": _PLACE,
    "StatsLoggerConfig": _PLACE,
    "SwanlabConfig": {"config": _NULL, "logdir": _NULL},
    "WandBConfig": {"config": _NULL},
    "PerfTracerConfig": {**_PLACE, "profile_steps": _NULL, "session_tracer": SwitchedOff()},
}


def legacy_rule(cls: type[Any], key: str, path: str) -> LegacyRule | None:
    """The rule for `key`, which section class `cls` (at dotted `path`) has no field for; None = simply unknown."""
    for base in cls.__mro__:
        rule = _LEGACY.get(base.__name__, {}).get(key)
        if rule is not None:
            return rule
    if path == "ref" and (key in PPOActorConfig.__dataclass_fields__ or key in _LEGACY["PPOActorConfig"]):
        return Ignored(notice=False)  # AReaL's ref has the fields of an actor, which a model without a loss never reads
    return None


def moved(cls: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What the user gave for a section of class `cls`, the values of moved keys at their new places.

    A key stays where it stands when its new place holds something else, or when it does not decide what stands there.
    """
    result = dict(given)
    for key, value in given.items():
        rule = None if key in cls.__dataclass_fields__ else legacy_rule(cls, key, "")
        if not isinstance(rule, MovedTo):
            continue
        section, _, name = rule.path.rpartition(".")
        place: Any = result.get(section, {}) if section else result
        if not isinstance(place, dict):
            continue
        entry = cast("dict[str, Any]", place)
        for new in rule.translated(value):
            if entry.get(name, new) == new:
                entry = {**entry, name: new}
                result = {**result, section: entry} if section else entry
                del result[key]
    return result


def refusal(rule: LegacyRule, value: Any, copied: Any) -> str | None:
    """Why `value` cannot be accepted under `rule`, or None. `copied` is what a CopyOf or MovedTo rule points at."""
    match rule:
        case Ignored():
            return None
        case CopyOf(path):
            if value in (None, "", copied):
                return None
            return f"{value!r} differs from {path}={copied!r}: remove it, this version reads only {path}"
        case Accepts(values, instead):
            if value in values:
                return None
            hint = f"; {instead}" if instead else ""
            return f"{value!r} is not supported by this version of areal: remove it{hint}"
        case MovedTo(path, values):
            if value is False and copied not in [new for _, new in values or ()]:
                return None
            return f"{value!r} differs from {path}={copied!r}, which has taken its place: remove it"
        case SwitchedOff():
            section: dict[str, Any] = value or {}
            if not section.get("enabled", False):
                return None
            return "is not supported by this version of areal: set enabled: false there or remove it"
