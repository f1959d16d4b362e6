"""Applies the rules for keys of AReaL files to the values of a file."""

from dataclasses import dataclass, field
from typing import Any, cast

from areal.api.allocation import AllocationError, AllocationMode
from areal.api.config.fields import choice, number
from areal.api.config.legacy_rules import LegacyRule, legacy_rule, moved_to
from areal.api.config.legacy_scheduling import (
    SCHEDULER,
    launcher_options,
    spec_problems,
    strategy_problems,
    unknown_keys,
)
from areal.api.config.observe import PerfTracerConfig
from areal.api.config.schema import fields_of, sections_in, with_defaults
from areal.api.config.validate import shown, validated
from areal.api.errors import ConfigProblem


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
    _switches: dict[str, LegacyRule] = field(default_factory=dict[str, LegacyRule])
    """The keys of rules `turn_on` that are true."""
    _specs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The first scheduling spec by section."""

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
        self._set_switches()
        self._set_schedule()
        self._set_lora()

    def _apply(self, rule: LegacyRule, value: Any, tree: dict[str, Any], path: str) -> None:
        other = rule.path
        match rule.action:
            case "ignore":
                self.ignored += [] if rule.is_silent or value in (None, False, "", []) else [path]
            case "accept":
                if value not in rule.values:
                    why = rule.why.replace("`", "")
                    self._unsupported(path, f"{shown(value)} is not supported, because {why}: remove it")
            case "copy":
                matters = not rule.only_with or tree.get(rule.only_with) is True
                if matters and value not in (None, "", copied := _below(self.tree, other)):
                    self._differs(path, value, other, copied)
            case "move":
                other = moved_to(path, other)
                found = _below(self.tree, other)
                if not rule.switches_to or value is True:
                    self._move(path, value, other, rule.switches_to or value)
                elif value is not False or found == rule.switches_to:
                    self._differs(path, value, other, found)
            case "turn_on":
                if value not in (None, False, True):
                    self._unsupported(path, f"{shown(value)} is no switch: use true or false")
                elif value:
                    self._switches[path] = rule
            case "rejection_sampling":
                self._rejection_sampling(value, tree, path)
            case "scheduling":
                self._schedule(value, path)
            case "strategy":
                self.problems += strategy_problems(path, value)
            case "memory_profiler":
                self._profile(value, path)
            case "scheduler":
                self.problems += unknown_keys(path, value, SCHEDULER)
                scheduler = cast("dict[str, Any]", value if isinstance(value, dict) else {})
                if launcher := scheduler.get("type"):
                    self._move(f"{path}.type", launcher, "launcher.type", launcher)
                self.ignored += [path] if scheduler.keys() - {"type"} else []
            case "loader":
                section, _, key = path.rpartition(".")
                _, wrong = validated(LoaderOptions, {key: value})
                self.problems += [problem._replace(path=f"{section}.{problem.path}") for problem in wrong]
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
        if value in (None, [], {}):
            return
        problems = list(spec_problems(path, value))
        self.problems += problems
        if not problems:
            specs = cast("list[dict[str, Any]]", value if isinstance(value, list) else [value])
            self._specs[path.rpartition(".")[0]] = specs[0]

    def _set_schedule(self) -> None:
        """The options of `launcher` that are equal to the first spec of a role, unless the user gave them.

        Specs that differ in an option of all roles are a problem, a difference from what the user gave is ignored.
        Models other than the actor share its ranks.
        """
        origins: dict[str, tuple[str, Any]] = {}
        of_trainer = launcher_options(self._specs.get("actor", self._specs.get("model", {})), is_server=False)
        for section, spec in sorted(self._specs.items(), key=lambda item: item[0] == "rollout"):
            path = f"{section}.scheduling_spec"
            options = launcher_options(spec, is_server=section == "rollout")
            if section not in ("actor", "model", "rollout"):
                self.ignored += [path] if options != of_trainer else []
                continue
            for name, new in options.items():
                place, _, key = f"launcher.{name}".rpartition(".")
                other, old = origins.setdefault(name, (path, new))
                if _below(self.given, f"{place}.{key}") is not None:
                    is_equal = _below(self.tree, f"{place}.{key}") == new
                    self.ignored += [] if is_equal or path in self.ignored else [path]
                    continue
                if old != new:
                    message = f"{shown(new)} in launcher.{name} differs from {shown(old)} of {other}: use one value"
                    self.problems.append(ConfigProblem(path, message))
                elif isinstance(found := _below(self.tree, place), dict):
                    cast("dict[str, Any]", found)[key] = new

    def _set_switches(self) -> None:
        """Options of the engine that AReaL has for all engines. All models have the engine of the trainer."""
        try:
            trainers = AllocationMode.parse(str(self.tree.get("allocation_mode"))).train
            is_megatron = any(trainer.backend == "megatron" for trainer in trainers)
        except AllocationError:
            is_megatron = False
        for path, rule in self._switches.items():
            if is_megatron and not rule.with_megatron:
                self._unsupported(path, "true needs fsdp in allocation_mode: remove it")
                continue
            section, _, name = moved_to(path, rule.with_megatron if is_megatron else rule.path).rpartition(".")
            if isinstance(place := _below(self.tree, section), dict):
                cast("dict[str, Any]", place)[name] = True

    def _profile(self, value: Any, path: str) -> None:
        """`perf_tracer.profile_steps` from the section `memory_profiler`."""
        if value is None:
            return
        problems = unknown_keys(path, value, ("profile_steps", "max_entries"))
        self.problems += problems
        steps = None if problems else cast("dict[str, Any]", value).get("profile_steps")
        if not steps:
            return
        if not isinstance(steps, list) or not all(type(step) is int for step in cast("list[Any]", steps)):
            problem = ConfigProblem(f"{path}.profile_steps", "is not a list of integers", "config.wrong_type")
            self.problems.append(problem)
            return
        if self.tree.get("perf_tracer") is None:
            self.tree["perf_tracer"] = with_defaults(PerfTracerConfig, {})
        counted = [step + 1 for step in cast("list[int]", steps)]
        self._move(f"{path}.profile_steps", steps, "perf_tracer.profile_steps", counted)

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
            if keys.get("use_lora") is True and section != "actor" and _below(tree, "optimizer") is None:
                self.ignored.append(f"{section}.use_lora")  # new adapters, never trained: they change nothing
            elif keys.get("use_lora") is True and isinstance(tree, dict):
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
class LoaderOptions:
    """The types of the options of AReaL's data loader, which have no effect here."""

    pin_memory: bool | None = False
    num_workers: int | None = number(0, low=0)


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
