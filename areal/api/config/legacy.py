"""Keys of AReaL files (v0.5 and 1.0) that have no field here: which values they may hold, and where they go.

A file written for AReaL loads when such a key has an equivalent here, or requires nothing that this version lacks.
Any other value is refused, because an option that nothing reads must not look as if it worked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.allocation import AllocationError, AllocationMode
from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.fields import choice, number
from areal.api.config.schema import fields_of, sections_in
from areal.api.config.validate import shown, validated
from areal.api.errors import ConfigProblem


@dataclass(frozen=True, slots=True)
class Accepts:
    """Only these values are accepted; they have no effect here."""

    values: tuple[Any, ...]
    instead: str = ""
    """What to use in place of the key, if there is something."""


@dataclass(frozen=True, slots=True)
class CopyOf:
    """A repetition of another key: null, empty or equal to it."""

    path: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """Any value is accepted and has no effect; `notice` says whether the user is notified."""

    notice: bool = True


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """A section that is accepted while its `enabled` is false."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """The value belongs to another option of the same section."""

    path: str
    """Dotted, below the section of the key."""
    switches_to: str = ""
    """Not empty: the key is a switch; true means this value at `path`, false any other."""


@dataclass(frozen=True, slots=True)
class RejectionSampling:
    """AReaL 1.0's `rejection_sampling`, whose equivalent is `rollout_correction`."""


@dataclass(frozen=True, slots=True)
class Backend:
    """AReaL 1.0's backend and sizes of one model, which are part of `allocation_mode` here."""


LegacyRule = Accepts | CopyOf | Ignored | SwitchedOff | MovedTo | RejectionSampling | Backend

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
        "backend": Backend(),
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
        "use_sapo_loss": MovedTo("policy_loss", switches_to="sapo"),
        "sapo_tau_pos": MovedTo("sapo.tau_pos"),
        "sapo_tau_neg": MovedTo("sapo.tau_neg"),
        "rejection_sampling": RejectionSampling(),
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
        "backend": Backend(),
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
    """The rule for `key`, for which section class `cls` (at dotted `path`) has no field; None = an unknown key."""
    for base in cls.__mro__:
        rule = _LEGACY.get(base.__name__, {}).get(key)
        if rule is not None:
            return rule
    if path == "ref" and (key in PPOActorConfig.__dataclass_fields__ or key in _LEGACY["PPOActorConfig"]):
        return _SILENT  # AReaL's ref has the fields of an actor, which a model without a loss never reads
    return None


@dataclass
class LegacyKeys:
    """Applies the rules to the values of a file; `apply` removes every key that has a rule from `tree`."""

    tree: dict[str, Any]
    """All values: defaults included, interpolations resolved."""
    given: dict[str, Any]
    """The values that the user wrote."""
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    ignored: list[str] = field(default_factory=list[str])
    """Accepted keys without effect that the user should know of."""
    _backends: dict[str, str] = field(default_factory=dict[str, str])

    def apply(self, cls: type[Any]) -> None:
        for section_class, values, path in list(sections_in(cls, self.tree)):
            for key in [key for key in values if key not in fields_of(section_class)]:
                rule = legacy_rule(section_class, str(key), path)
                value = values.pop(key)
                if rule is None:
                    values[str(key)] = value  # unknown; YAML may give a number as the key
                else:
                    given = _below(self.given, path) if path else self.given
                    self._apply(rule, value, values, given, f"{path}.{key}" if path else str(key))
        self._set_allocation()

    def _apply(self, rule: LegacyRule, value: Any, tree: dict[str, Any], given: Any, path: str) -> None:
        match rule:
            case Ignored(notice):
                self.ignored += [path] if notice else []
            case Accepts(values, instead):
                if value not in values:
                    hint = f"; {instead}" if instead else ""
                    self._unsupported(path, f"{shown(value)} is not supported: remove it{hint}")
            case SwitchedOff():
                if _below(value, "enabled", default=False):
                    self._unsupported(path, "is not supported: set enabled: false or remove it")
            case CopyOf(other):
                if value not in (None, "", copied := _below(self.tree, other)):
                    self._differs(path, value, other, copied, f"this version reads only {other}")
            case MovedTo(other, switches_to) if switches_to and not isinstance(value, bool):
                self._differs(path, value, other, _below(tree, other), f"this version reads only {other}")
            case MovedTo(other, switches_to) if switches_to and not value:
                if _below(tree, other) == switches_to:
                    self._differs(path, value, other, switches_to, f"this version reads only {other}")
            case MovedTo(other, switches_to):
                self._move(value, switches_to or value, tree, given, path, other)
            case RejectionSampling():
                self._rejection_sampling(value, tree, given, path)
            case Backend():
                if value not in (None, "", "fsdp"):  # "fsdp" without sizes is in files older than v0.5
                    self._backends[path] = str(value)

    def _move(self, value: Any, new: Any, tree: dict[str, Any], given: Any, path: str, other: str) -> None:
        """Set `other` to `new`, the equivalent of `value`, unless the user gave it another one."""
        section, _, name = other.rpartition(".")
        place, found = _below(tree, section) if section else tree, _below(tree, other)
        parts = cast("dict[str, Any]", new if isinstance(new, dict) else {})
        agrees = found == new or (bool(parts) and all(_below(found, key) == parts[key] for key in parts))
        if not isinstance(place, dict) or (_below(given, other) is not None and not agrees):
            self._differs(path, value, other, found, "this version reads only the other")
        else:
            place[name] = new

    def _rejection_sampling(self, value: Any, tree: dict[str, Any], given: Any, path: str) -> None:
        if value is None:
            return
        if not tree.get("use_decoupled_loss"):
            self.ignored.append(path)  # AReaL compares a policy with itself then
            return
        if not isinstance(value, dict):
            self.problems.append(ConfigProblem(path, f"{shown(value)} is not a section", "config.wrong_type"))
            return
        values = dict(cast("dict[str, Any]", value))
        options, wrong = validated(_RejectionSamplingOptions, values)
        self.problems += [problem._replace(path=f"{path}.{problem.path}") for problem in wrong]
        if options is not None and not wrong:
            correction = options.as_rollout_correction()
            if correction is None:
                self._unsupported(
                    path, f"{shown(values)} has no equivalent: write the rule for actor.rollout_correction.rules"
                )
            else:
                self._move(values, correction, tree, given, path, "rollout_correction")

    def _set_allocation(self) -> None:
        """allocation_mode of the servers and the trainer; all models of the trainer share its ranks."""
        servers = self._backends.pop("rollout.backend", "")
        first = next((path for path in ("actor.backend", "model.backend") if path in self._backends), "")
        trainer = self._backends.get(first, "")
        for path, backend in self._backends.items():
            if backend != trainer:
                self._differs(path, backend, first or "actor.backend", trainer, "all models share the trainer's ranks")
        wanted, written = "+".join(part for part in (servers, trainer) if part), self.tree.get("allocation_mode")
        if wanted and written in ("", None):
            self.tree["allocation_mode"] = wanted
        elif wanted and not _same_allocation(wanted, str(written)):
            path = "rollout.backend" if servers else first
            self._differs(path, wanted, "allocation_mode", written, "remove one of them")

    def _unsupported(self, path: str, message: str) -> None:
        self.problems.append(ConfigProblem(path, message, "config.unsupported"))

    def _differs(self, path: str, value: Any, other: str, found: Any, why: str) -> None:
        self.problems.append(
            ConfigProblem(path, f"{shown(value)} differs from {other}={shown(found)}: remove it, {why}")
        )


@dataclass(frozen=True, kw_only=True)
class _RejectionSamplingOptions:
    """The options of AReaL 1.0's `rejection_sampling`: bounds on the old policy / rollout policy, or their KL."""

    level: str = choice("token", "token", "sequence")
    action: str = choice("mask", "mask", "clamp")
    metric: str = choice("ratio", "ratio", "kl_k1", "kl_k2", "kl_k3")
    agg: str = choice("mean", "mean", "sum", "max")
    upper: float = number(5.0)
    lower: float | None = number(None)

    def as_rollout_correction(self) -> dict[str, Any] | None:
        """The equal `rollout_correction`; None where there is none.

        AReaL weights by the geometric mean of a sequence for level=sequence with metric=ratio, else by tokens. Its k1
        has the other sign than ours, its k3 is the divergence in the other direction.
        """
        level = f"sequence_{self.agg}" if self.level == "sequence" else "token"
        weights: dict[str, Any] = {"level": "geometric" if self.metric == "ratio" and level != "token" else "token"}
        if self.action == "mask":
            weights["drop_from_ratio"] = True
        if self.metric == "ratio" and level in ("token", "sequence_mean"):
            return weights | {"mode": self.action, "lower": self.lower or 0.0, "upper": self.upper}
        if self.action == "clamp" or self.metric == "kl_k3" or (self.metric, level) == ("kl_k1", "sequence_max"):
            return None
        lower, upper = self.lower, self.upper
        if self.metric == "kl_k1":
            lower, upper = -self.upper, None if self.lower is None else -self.lower
        rule = {"metric": self.metric.removeprefix("kl_"), "level": level, "lower": lower, "upper": upper}
        return weights | {"mode": "truncate", "rules": [rule]}


def _below(tree: Any, path: str, default: Any = None) -> Any:
    """The value at the dotted `path` of nested mappings, or `default`."""
    for name in path.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return default
        tree = cast("dict[str, Any]", tree)[name]
    return tree


def _same_allocation(one: str, other: str) -> bool:
    try:
        return AllocationMode.parse(one) == AllocationMode.parse(other)
    except AllocationError:
        return one == other
