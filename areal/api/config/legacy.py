"""Keys of AReaL files (v0.5 and 1.0) that have no field here: which values they may hold, and where they go.

A file written for AReaL loads when such a key has an equivalent here, or requires nothing that this version lacks.
Any other value is refused, because an option that nothing reads must not look as if it worked.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from areal.api.allocation import AllocationError, AllocationMode
from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.fields import choice, number
from areal.api.config.schema import fields_of, sections_in
from areal.api.config.validate import shown, validated
from areal.api.errors import ConfigProblem


@dataclass(frozen=True, slots=True)
class LegacyRule:
    """What happens to the value of one key."""

    action: Literal["accept", "ignore", "copy", "move", "switched_off", "rejection_sampling", "backend", "lora"]
    """accept: only `values`, without effect. ignore: any value, without effect. copy: null, empty or equal to `path`.
    move: the value of the option `path`. switched_off: a section whose `enabled` is false. rejection_sampling, backend:
    keys of AReaL 1.0 that belong to `rollout_correction` and `allocation_mode`. lora: keys that make a `lora` section.
    """
    path: str = ""
    """copy: the other key. move: the other option, dotted below the section of the key."""
    values: tuple[Any, ...] = ()
    hint: str = ""
    """accept: what to use in place of the key, if there is something."""
    is_silent: bool = False
    """ignore: the user is not notified."""
    switches_to: str = ""
    """move, not empty: the key is a switch; true means this value at `path`, false any other."""


def _accept(*values: Any, hint: str = "") -> LegacyRule:
    return LegacyRule("accept", values=values, hint=hint)


def _copy(path: str) -> LegacyRule:
    return LegacyRule("copy", path)


_FALSE, _NULL, _ANY_FLAG = _accept(False), _accept(None), _accept(False, True)
_IGNORED, _SILENT, _BACKEND = LegacyRule("ignore"), LegacyRule("ignore", is_silent=True), LegacyRule("backend")
_NAMES: dict[str, LegacyRule] = {"experiment_name": _copy("experiment_name"), "trial_name": _copy("trial_name")}
_PLACE: dict[str, LegacyRule] = {**_NAMES, "fileroot": _copy("cluster.fileroot")}
_SCHEDULING: dict[str, LegacyRule] = {"scheduling_spec": _IGNORED, "scheduling_strategy": _IGNORED}
_ACTOR = "the actor of type: ray is named after the run"

_LEGACY: dict[str, dict[str, LegacyRule]] = {
    "BaseExperimentConfig": {
        "enable_offload": _FALSE,
        "async_training": _accept(True, hint="rollout.max_head_offpolicyness=0 makes training synchronous"),
        "sglang": _IGNORED,
        "vllm": _IGNORED,
        "scheduler": _IGNORED,
    },
    # Only the single-controller mode of AReaL reads the scheduling keys; the local launcher has none.
    "TrainEngineConfig": {
        **_NAMES,
        **_SCHEDULING,
        "backend": _BACKEND,
        "pad_to_maximum": _FALSE,
        **dict.fromkeys(("use_lora", "lora_rank", "lora_alpha", "target_modules"), LegacyRule("lora")),
        "peft_type": _accept("lora", hint="lora is the only kind of adapter"),
        "is_critic": _FALSE,
        "weight_update_mode": _SILENT,  # only the actor's weights are published
    },
    "MegatronEngineConfig": {
        "wrap_with_ddp": _accept(True, hint="Megatron's data parallelism reduces the gradients"),
        "use_torch_fsdp2": _accept(False, hint="fsdp in allocation_mode does it"),
        "use_custom_fsdp": _accept(False, hint="fsdp in allocation_mode does it"),
        "async_save": _FALSE,
        "use_checkpoint_opt_param_scheduler": _accept(
            True, hint="the learning rate is a function of the options and of the steps done, which checkpoints contain"
        ),
    },
    "ScoreModelConfig": {"is_critic": _ANY_FLAG},
    "PPOCriticConfig": {"is_critic": _ANY_FLAG, "mask_no_eos_with_zero": _SILENT},
    "PPOActorConfig": {
        "max_new_tokens": _copy("gconfig.max_new_tokens"),
        "log_agent_stats": _FALSE,
        "log_agent_stats_keys": _SILENT,
        "use_sapo_loss": LegacyRule("move", "policy_loss", switches_to="sapo"),
        "sapo_tau_pos": LegacyRule("move", "sapo.tau_pos"),
        "sapo_tau_neg": LegacyRule("move", "sapo.tau_neg"),
        "rejection_sampling": LegacyRule("rejection_sampling"),
    },
    "OptimizerConfig": {
        "offload": _accept(False, hint="fsdp.offload_params does it"),
        "initial_loss_scale": _accept(2**32),
        "min_loss_scale": _accept(1.0),
        "loss_scale_window": _accept(5),
        "hysteresis": _accept(2),
    },
    "GenerationHyperparameters": {"lora_name": _IGNORED},  # requests name the adapter of their policy version
    "InferenceEngineConfig": {
        **_PLACE,
        **_SCHEDULING,
        "backend": _BACKEND,
        "queue_size": _accept(None, hint="rollout.max_concurrent_rollouts bounds the episodes in flight"),
        "use_lora": LegacyRule("lora"),
        "tokenizer_path": _copy("tokenizer_path"),
        "dump_to_file": _SILENT,  # the ledger keeps every trajectory
    },
    # How AReaL's data loader works, not what it yields.
    "DatasetConfig": {"pin_memory": _SILENT, "num_workers": _SILENT},
    "ValidDatasetConfig": {
        "batch_size": _SILENT,  # rollout.max_concurrent_rollouts bounds an evaluation too
        "shuffle": _SILENT,  # a mean does not depend on the order
        "drop_last": _accept(False, hint="max_rows leaves rows out"),
    },
    "ClusterSpecConfig": {"cluster_name": _SILENT},
    "NameResolveConfig": {
        "ray_actor_name": _accept("ray_kv_store", hint=_ACTOR),
    },
    "EvaluatorConfig": _PLACE,
    "RecoverConfig": _PLACE,
    "SaverConfig": _PLACE,
    "StatsLoggerConfig": _PLACE,
    "SwanlabConfig": {"config": _NULL, "logdir": _NULL},
    "WandBConfig": {"config": _NULL},
    "PerfTracerConfig": {**_PLACE, "session_tracer": LegacyRule("switched_off")},
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
    _lora: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The keys about adapters by section."""

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
        self._set_lora()

    def _apply(self, rule: LegacyRule, value: Any, tree: dict[str, Any], given: Any, path: str) -> None:
        other = rule.path
        match rule.action:
            case "ignore":
                self.ignored += [] if rule.is_silent else [path]
            case "accept":
                if value not in rule.values:
                    self._unsupported(path, f"{shown(value)} is not supported: remove it; {rule.hint}".rstrip("; "))
            case "switched_off":
                if _below(value, "enabled", default=False):
                    self._unsupported(path, "is not supported: set enabled: false or remove it")
            case "copy":
                if value not in (None, "", copied := _below(self.tree, other)):
                    self._differs(path, value, other, copied)
            case "move":
                found = _below(tree, other)
                if not rule.switches_to or value is True:
                    self._move(value, rule.switches_to or value, tree, given, path, other)
                elif value is not False or found == rule.switches_to:
                    self._differs(path, value, other, found)
            case "rejection_sampling":
                self._rejection_sampling(value, tree, given, path)
            case "lora":
                section, _, key = path.rpartition(".")
                self._lora.setdefault(section, {})[key] = value
            case "backend":
                if value not in (None, "", "fsdp"):  # "fsdp" without sizes is in files older than v0.5
                    self._backends[path] = str(value)

    def _move(self, value: Any, new: Any, tree: dict[str, Any], given: Any, path: str, other: str) -> None:
        """Set `other` to `new`, the equivalent of `value`, unless the user gave it another one."""
        section, _, name = other.rpartition(".")
        place, found = _below(tree, section) if section else tree, _below(tree, other)
        parts = cast("dict[str, Any]", new if isinstance(new, dict) else {})
        agrees = found == new or (bool(parts) and all(_below(found, key) == parts[key] for key in parts))
        if not isinstance(place, dict) or (_below(given, other) is not None and not agrees):
            self._differs(path, value, other, found)
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
                self._unsupported(path, f"{shown(values)} has no equivalent: write actor.rollout_correction.rules")
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

    def _set_lora(self) -> None:
        """The section `lora` of each model, from the keys that AReaL has for it, if use_lora is true."""
        wanted = bool(self._lora.pop("rollout", {}).get("use_lora"))
        for section, keys in self._lora.items():
            tree = _below(self.tree, section)
            if keys.get("use_lora") is True and isinstance(tree, dict):
                targets = keys.get("target_modules") or "all-linear"  # AReaL: an empty list = all
                new = {
                    "rank": keys.get("lora_rank", 32),
                    "alpha": keys.get("lora_alpha", 16),
                    "target_modules": targets,
                }
                self._move(
                    True, new, cast("dict[str, Any]", tree), _below(self.given, section), f"{section}.use_lora", "lora"
                )
            elif keys.get("use_lora") not in (None, False):
                self._unsupported(f"{section}.use_lora", f"{shown(keys['use_lora'])} is no switch: use true or false")
        if wanted and not _below(self.tree, "actor.lora"):
            self._differs("rollout.use_lora", True, "actor.lora", None)

    def _unsupported(self, path: str, message: str) -> None:
        self.problems.append(ConfigProblem(path, message, "config.unsupported"))

    def _differs(self, path: str, value: Any, other: str, found: Any, why: str = "") -> None:
        why = why or f"this version reads only {other}"
        message = f"{shown(value)} differs from {other}={shown(found)}: remove it, {why}"
        self.problems.append(ConfigProblem(path, message))


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
