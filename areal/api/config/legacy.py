"""Keys of AReaL files (v0.5 and 1.0) that have no field here: which values they may hold, and where they go.

A file written for AReaL loads when such a key has an equivalent here, or requires nothing that this version lacks.
Any other value is refused, because an option that nothing reads must not look as if it worked.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from areal.api.allocation import AllocationError, AllocationMode
from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.fields import choice, number
from areal.api.config.legacy_scheduling import launcher_options, spec_problems, strategy_problem
from areal.api.config.schema import fields_of, sections_in
from areal.api.config.validate import shown, validated
from areal.api.errors import ConfigProblem


@dataclass(frozen=True, slots=True)
class LegacyRule:
    """What happens to the value of one key."""

    action: Literal[
        "accept", "ignore", "copy", "move", "turn_on", "rejection_sampling", "backend", "lora", "scheduling",
        "strategy", "scheduler",
    ]  # fmt: skip
    """accept: only `values`, without effect. ignore: any value, without effect. copy: null, empty or equal to `path`.
    move: the value of the option `path`. turn_on: true means true at `path`, false means nothing. rejection_sampling,
    backend, lora: keys that belong to `rollout_correction`, `allocation_mode` and `lora`. scheduling, strategy,
    scheduler: keys of AReaL's launchers, see legacy_scheduling.
    """
    path: str = ""
    """copy: the other key. move: the other option, dotted below the section of the key; `../` = the section above."""
    values: tuple[Any, ...] = ()
    why: str = ""
    """Why there is no option of this name, for docs/config.md and for errors."""
    is_silent: bool = False
    """ignore: the user is not notified."""
    only_with: str = ""
    """copy, not empty: the switch of the same section without which the value does not matter."""
    switches_to: str = ""
    """move, not empty: the key is a switch; true means this value at `path`, false any other."""


def _accept(*values: Any, why: str) -> LegacyRule:
    return LegacyRule("accept", values=values, why=why)


def _ignore(why: str, *, is_silent: bool = True) -> LegacyRule:
    return LegacyRule("ignore", why=why, is_silent=is_silent)


def _copy(path: str) -> LegacyRule:
    return LegacyRule("copy", path, why=f"a copy of `{path}`")


def _turn_on(path: str) -> LegacyRule:
    return LegacyRule("turn_on", path, why=f"true is `{path.removeprefix('../')}`=true")


def _move(path: str, *, switches_to: str = "") -> LegacyRule:
    why = f"becomes `{path}`" + (f"={shown(switches_to)}" if switches_to else "")
    return LegacyRule("move", path, switches_to=switches_to, why=why)


_NAMES: dict[str, LegacyRule] = {"experiment_name": _copy("experiment_name"), "trial_name": _copy("trial_name")}
_PLACE: dict[str, LegacyRule] = {**_NAMES, "fileroot": _copy("cluster.fileroot")}
_ADAPTERS = dict.fromkeys(
    ("use_lora", "lora_rank", "lora_alpha", "target_modules"), LegacyRule("lora", why="becomes the section `lora`")
)
_BACKEND = LegacyRule("backend", why="becomes a part of `allocation_mode`")
_SCHEDULING: dict[str, LegacyRule] = {
    "scheduling_spec": LegacyRule("scheduling", why="becomes options of `launcher`, see below"),
    "scheduling_strategy": LegacyRule("strategy", why="models share the ranks of the trainer, servers have their own"),
}
_NO_FLOAT16 = _ignore("there is no training in float16, which needs loss scales; AReaL does not read it")
_NO_KIND = "this kind of training has no servers"
_SERVICES = "AReaL does not read it either"
_LOADER = "rows are read once, before the first step; there is no loader process"
_IN_MEMORY = "AReaL does not read it either; batches are copied to the device while it computes"

_OF_ACTOR = _ignore("an option of the actor, which a frozen model does not read")

LEGACY: dict[str, dict[str, LegacyRule]] = {
    "BaseExperimentConfig": {
        "enable_offload": _ignore(
            "servers and trainers have separate GPUs, so nothing has to leave them; `fsdp.offload_params` keeps a "
            "model on the host",
            is_silent=False,
        ),
        "async_training": _accept(True, why="`rollout.max_head_offpolicyness=0` makes training synchronous"),
        "sglang": _ignore(_NO_KIND, is_silent=False),
        "vllm": _ignore(_NO_KIND, is_silent=False),
        "scheduler": LegacyRule("scheduler", why="`type` becomes `launcher.type`; AReaL v0.5 reads none of the others"),
    },
    "TrainEngineConfig": {
        **_NAMES,
        **_SCHEDULING,
        **_ADAPTERS,
        "backend": _BACKEND,
        "offload": _turn_on("fsdp.offload_params"),
        "pad_to_maximum": _ignore(
            "sequences are packed without padding, and `mb_spec` limits the tokens; results do not depend on it",
            is_silent=False,
        ),
        "peft_type": _accept("lora", why="lora is the only kind of adapter"),
        "is_critic": _accept(False, why="the section decides the kind of model"),
        "weight_update_mode": _ignore("only the weights of the actor are published"),
    },
    "MegatronEngineConfig": {
        "wrap_with_ddp": _accept(True, why="Megatron's data parallelism reduces the gradients"),
        "use_torch_fsdp2": _accept(False, why="`fsdp` in `allocation_mode` does it"),
        "use_custom_fsdp": _accept(False, why="`fsdp` in `allocation_mode` does it"),
        "async_save": _accept(False, why="`recover.async_save` does it for every engine"),
        "use_checkpoint_opt_param_scheduler": _accept(
            True, why="the learning rate is a function of the options and of the steps done, which checkpoints contain"
        ),
    },
    "ScoreModelConfig": {"is_critic": _accept(False, True, why="the section decides the kind of model")},
    "PPOCriticConfig": {
        "is_critic": _accept(False, True, why="the section decides the kind of model"),
        "mask_no_eos_with_zero": _ignore("the critic of AReaL only logs it"),
    },
    "PPOActorConfig": {
        "max_new_tokens": LegacyRule(
            "copy",
            "gconfig.max_new_tokens",
            only_with="overlong_reward_penalty",
            why="a copy of `gconfig.max_new_tokens`",
        ),
        "log_agent_stats": _ignore("statistics of sessions are always recorded: `rollout/episode/...`"),
        "log_agent_stats_keys": _ignore("a workflow records more with `log_metric` (docs/workflows.md)"),
        "use_sapo_loss": _move("policy_loss", switches_to="sapo"),
        "sapo_tau_pos": _move("sapo.tau_pos"),
        "sapo_tau_neg": _move("sapo.tau_neg"),
        "rejection_sampling": LegacyRule("rejection_sampling", why="becomes `rollout_correction`"),
    },
    "OptimizerConfig": {
        "offload": _turn_on("../fsdp.offload_optimizer"),
        **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _NO_FLOAT16),
    },
    "GenerationHyperparameters": {
        "lora_name": _ignore("requests name the adapter of their policy version", is_silent=False),
    },
    "InferenceEngineConfig": {
        **_PLACE,
        **_SCHEDULING,
        "backend": _BACKEND,
        "use_lora": LegacyRule("lora", why="must agree with `actor.lora`"),
        "tokenizer_path": _copy("tokenizer_path"),
        "dump_to_file": _ignore("the ledger keeps every trajectory"),
    },
    "DatasetConfig": {"pin_memory": _ignore(_IN_MEMORY), "num_workers": _ignore(_LOADER)},
    "ClusterSpecConfig": {"cluster_name": _ignore("AReaL does not use it either")},
    "NameResolveConfig": {
        "ray_actor_name": _accept("ray_kv_store", why="the actor of `type: ray` is named after the run"),
    },
    "EvaluatorConfig": _PLACE,
    "RecoverConfig": _PLACE,
    "SaverConfig": _PLACE,
    "StatsLoggerConfig": _PLACE,
    "PerfTracerConfig": _PLACE,
}


def legacy_rule(cls: type[Any], key: str, path: str) -> LegacyRule | None:
    """The rule for `key`, for which section class `cls` (at dotted `path`) has no field; None = an unknown key."""
    for base in cls.__mro__:
        rule = LEGACY.get(base.__name__, {}).get(key)
        if rule is not None:
            return rule
    if path == "ref" and (key in PPOActorConfig.__dataclass_fields__ or key in LEGACY["PPOActorConfig"]):
        return _OF_ACTOR  # AReaL's ref has the fields of an actor, which a model without a loss never reads
    return None


def moved_to(path: str, rule: LegacyRule) -> str:
    """The dotted path of the option that a key at `path` with a rule `move` becomes."""
    sections, other = path.split(".")[:-1], rule.path
    while other.startswith("../"):
        sections, other = sections[:-1], other.removeprefix("../")
    return ".".join([*sections, other])


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
                    self._apply(rule, value, values, f"{path}.{key}" if path else str(key))
        self._set_allocation()
        self._set_lora()

    def _apply(self, rule: LegacyRule, value: Any, tree: dict[str, Any], path: str) -> None:
        other = rule.path
        match rule.action:
            case "ignore":
                self.ignored += [] if rule.is_silent or value in (None, False, "") else [path]
            case "accept":
                if value not in rule.values:
                    why = rule.why.replace("`", "")
                    self._unsupported(path, f"{shown(value)} is not supported, because {why}: remove it")
            case "copy":
                matters = not rule.only_with or tree.get(rule.only_with) is True
                if matters and value not in (None, "", copied := _below(self.tree, other)):
                    self._differs(path, value, other, copied)
            case "move":
                other = moved_to(path, rule)
                found = _below(self.tree, other)
                if not rule.switches_to or value is True:
                    self._move(path, value, other, rule.switches_to or value)
                elif value is not False or found == rule.switches_to:
                    self._differs(path, value, other, found)
            case "turn_on":
                section, _, name = moved_to(path, rule).rpartition(".")
                if value not in (None, False, True):
                    self._unsupported(path, f"{shown(value)} is no switch: use true or false")
                elif value and isinstance(place := _below(self.tree, section), dict):
                    place[name] = True
            case "rejection_sampling":
                self._rejection_sampling(value, tree, path)
            case "scheduling":
                self._schedule(value, path)
            case "strategy":
                if problem := strategy_problem(path.rpartition(".")[0], value):
                    self._unsupported(path, problem)
            case "scheduler":
                scheduler = cast("dict[str, Any]", value if isinstance(value, dict) else {})
                if launcher := scheduler.get("type"):
                    self._move(f"{path}.type", launcher, "launcher.type", launcher)
                self.ignored += [path] if scheduler.keys() - {"type"} else []
            case "lora":
                section, _, key = path.rpartition(".")
                self._lora.setdefault(section, {})[key] = value
            case "backend":
                if value not in (None, "", "fsdp"):  # "fsdp" without sizes is in files older than v0.5
                    self._backends[path] = str(value)

    def _move(self, path: str, value: Any, other: str, new: Any) -> None:
        """Set `other` to `new`, the equivalent of `value` at `path`, unless the user gave it another one."""
        section, _, name = other.rpartition(".")
        place, found = _below(self.tree, section) if section else self.tree, _below(self.tree, other)
        parts = cast("dict[str, Any]", new if isinstance(new, dict) else {})
        agrees = found == new or (bool(parts) and all(_below(found, key) == parts[key] for key in parts))
        if not isinstance(place, dict) or (_below(self.given, other) is not None and not agrees):
            self._differs(path, value, other, found)
        else:
            cast("dict[str, Any]", place)[name] = new

    def _schedule(self, value: Any, path: str) -> None:
        """The options of `launcher` that are equal to the first spec of a role, unless the user gave them.

        Models other than the actor share its ranks.
        """
        section = path.rpartition(".")[0]
        if value in (None, [], {}):
            return
        problems = list(spec_problems(path, value))
        self.problems += problems
        if problems or section not in ("actor", "model", "rollout"):
            return
        spec = cast("list[dict[str, Any]]", value)[0] if isinstance(value, list) else cast("dict[str, Any]", value)
        for name, new in launcher_options(spec, is_server=section == "rollout").items():
            place, _, key = f"launcher.{name}".rpartition(".")
            if _below(self.given, f"{place}.{key}") is None and isinstance(found := _below(self.tree, place), dict):
                cast("dict[str, Any]", found)[key] = new

    def _rejection_sampling(self, value: Any, tree: dict[str, Any], path: str) -> None:
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
                self._move(path, values, f"{path.rpartition('.')[0]}.rollout_correction", correction)

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
                self._move(f"{section}.use_lora", True, f"{section}.lora", new)
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
