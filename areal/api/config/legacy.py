"""Applies the rules for keys of AReaL files to the values of a file."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from areal.api.allocation import AllocationError, AllocationMode
from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.schema import MISSING, choice, fields_of, find_field, number, sections_in
from areal.api.config.validate import converted, shown
from areal.api.errors import ConfigProblem

# ----------------------------------------------------------------------------------------------------------------------
# Options of `launcher` that are equal to AReaL's `scheduling_spec`, and its `scheduling_strategy`. Pure rules.

SLURM = ("partition", "time_limit", "srun_additional_args", "additional_bash_cmds", "container_type", "mount")
NODES = ("nodelist", "exclude")
SBATCH = ("begin", "deadline")
ROLES = ("actor", "critic", "ref", "teacher", "model", "rollout")
"""Targets of a strategy."""
SCHEDULER = (
    "type", "endpoint", "deploy_mode", "functioncall_service_domain", "reward_functioncall_config", "reward_model_path",
    "reward_model_service_url",
)  # fmt: skip
"""Keys of `scheduler`."""
WITHOUT_OPTION = {
    "gpu": "`allocation_mode` decides the GPUs of a process",
    "port_count": "processes choose free ports",
    "task_type": "an engine runs in the process of its rank",
    "cmd": "areal starts its own processes",
    "ray_placement_strategy": "each process has an actor with its own resources",
}
"""Keys of a spec that have no effect -> why."""


def launcher_options(spec: Mapping[str, Any], *, is_server: bool) -> dict[str, Any]:
    """The options of `launcher` by dotted path, of one spec; unset values are left out."""
    role = "inference_server" if is_server else "trainer"
    variables = cast("dict[str, Any]", spec.get("env_vars") or {})
    options: dict[str, Any] = {
        f"{role}_cpus_per_gpu": spec.get("cpu"),
        f"{role}_mem_per_gpu": int(spec.get("mem") or 0) * 1024,
        f"{role}_env_vars": ",".join(
            f"{name}={str(value).replace(',', chr(92) + ',')}" for name, value in variables.items()
        ),
        f"slurm.{role}_image": spec.get("image"),
        **{name: spec.get(name) for name in NODES},
        "slurm.sbatch_additional_args": shlex.join(f"--{name}={spec[name]}" for name in SBATCH if spec.get(name)),
        **{f"slurm.{name}": spec.get(name) for name in SLURM},
    }
    return {path: value for path, value in options.items() if value not in (None, "", 0, [])}


def spec_problems(path: str, value: Any) -> Iterator[ConfigProblem]:
    """What is wrong with a `scheduling_spec`: a list of one or two mappings with known keys."""
    specs = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(specs) <= 2 or not all(isinstance(spec, dict) for spec in specs):
        yield ConfigProblem(path, "is not a list of one or two mappings", "config.wrong_type")
        return
    known = {"cpu", "mem", "env_vars", "image", *NODES, *SLURM, *SBATCH, *WITHOUT_OPTION}
    for key in {str(key) for spec in specs for key in spec} - known:
        yield ConfigProblem(f"{path}.{key}", "unknown key", "config.unknown_key")
    for spec in cast("list[dict[str, Any]]", specs):
        for key in ("cpu", "mem"):
            number = spec.get(key)
            if number is not None and (type(number) is not int or number < 0):
                yield ConfigProblem(f"{path}.{key}", f"{number!r} is no integer of at least 0", "config.wrong_type")
        if not isinstance(spec.get("env_vars") or {}, dict):
            yield ConfigProblem(f"{path}.env_vars", "is not a mapping", "config.wrong_type")


def strategy_problems(path: str, value: Any) -> list[ConfigProblem]:
    """What is wrong with a `scheduling_strategy`, or why it cannot be followed."""
    if value is None:
        return []
    if problems := unknown_keys(path, value, ("type", "target", "fork")):
        return problems
    fields = cast("dict[str, Any]", value)
    kind, target = fields.get("type"), fields.get("target")
    if kind not in (None, "separation", "colocation"):
        return [ConfigProblem(path, f"has the type {kind!r}: use separation or colocation", "config.unsupported")]
    if target not in (None, "", *ROLES):
        return [ConfigProblem(f"{path}.target", f"{target!r} is none of {', '.join(ROLES)}", "config.not_a_choice")]
    if kind == "colocation" and (path.startswith("rollout.") or target == "rollout"):
        text = "shares GPUs between servers and trainers: allocation_mode gives each its own; use type: separation"
        return [ConfigProblem(path, text, "config.unsupported")]
    return []


def unknown_keys(path: str, value: Any, known: Collection[str]) -> list[ConfigProblem]:
    """The keys of a section that are not `known`, or that `value` is no section."""
    if not isinstance(value, dict):
        return [ConfigProblem(path, "is not a section", "config.wrong_type")]
    keys = sorted(str(key) for key in cast("dict[Any, Any]", value))
    return [ConfigProblem(f"{path}.{key}", "unknown key", "config.unknown_key") for key in keys if key not in known]


# ----------------------------------------------------------------------------------------------------------------------
# Keys of AReaL files (v0.5 and 1.0) that have no field here: which values they may hold, and where they go.
#
# A file written for AReaL loads when such a key has an equivalent here, or requires nothing that this version lacks.
# Any other value is refused, because an option that nothing reads must not look as if it worked.


@dataclass(frozen=True, slots=True)
class LegacyRule:
    """What happens to the value of one key."""

    action: Literal[
        "accept", "ignore", "copy", "move", "turn_on", "rejection_sampling", "backend", "lora", "scheduling",
        "strategy", "scheduler", "memory_profiler", "loader", "sapo",
    ]  # fmt: skip
    """accept: only `values`, without effect. ignore: any value, without effect. copy: null, empty or equal to `path`.
    move: the value of the option `path`. turn_on: true means true at `path`, false means nothing. rejection_sampling,
    backend, lora: keys that belong to `rollout_correction`, `allocation_mode` and `lora`. scheduling, strategy,
    sapo: an option of the loss `sapo`.
    scheduler: keys of AReaL's launchers, see legacy_scheduling. memory_profiler: a section, whose steps are counted
    from 0. loader: an option of AReaL's data loader, of the right type, without effect.
    """
    path: str = ""
    """copy: the other key. move: the other option, dotted below the section of the key; `../` = the section above."""
    values: tuple[Any, ...] = ()
    why: str = ""
    """Why there is no option of this name, for errors and the page of options."""
    is_silent: bool = False
    """ignore: the user is not notified."""
    only_with: str = ""
    """copy, not empty: the switch of the same section without which the value does not matter."""
    with_megatron: str = ""
    """turn_on: the same as `path` for a Megatron trainer; empty = there is none."""


def _accept(*values: Any, why: str) -> LegacyRule:
    return LegacyRule("accept", values=values, why=why)


def _ignore(why: str, *, is_silent: bool = True) -> LegacyRule:
    return LegacyRule("ignore", why=why, is_silent=is_silent)


def _copy(path: str) -> LegacyRule:
    return LegacyRule("copy", path, why=f"a copy of `{path}`")


def _turn_on(path: str, *, with_megatron: str = "") -> LegacyRule:
    other = f"`{with_megatron.removeprefix('../')}`=true" if with_megatron else "refused"
    why = f"true is `{path.removeprefix('../')}`=true; with a Megatron trainer {other}"
    return LegacyRule("turn_on", path, with_megatron=with_megatron, why=why)


def _move(path: str) -> LegacyRule:
    return LegacyRule("move", path, why=f"becomes `{path}`")


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
        "memory_profiler": LegacyRule(
            "memory_profiler",
            why="`profile_steps`, counted from 0, become `perf_tracer.profile_steps`; a snapshot has 100,000 events",
        ),
    },
    "PPOConfig": {"dynamic_bs": _move("rollout.dynamic_bs")},
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
        "async_save": _accept(False, True, why="`recover.async_save` does it for every engine"),
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
        "log_agent_stats_keys": _ignore(
            "a workflow records more with `log_metric` (docs/workflows.md)", is_silent=False
        ),
        **dict.fromkeys(
            ("use_sapo_loss", "sapo_tau_pos", "sapo_tau_neg"),
            LegacyRule("sapo", why="becomes `policy_loss`: {name: sapo, tau_pos: 1.0, tau_neg: 1.05}"),
        ),
        "rejection_sampling": LegacyRule("rejection_sampling", why="becomes `rollout_correction`"),
    },
    "OptimizerConfig": {
        "offload": _turn_on("../fsdp.offload_optimizer", with_megatron="../megatron.offload_optimizer"),
        **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _NO_FLOAT16),
    },
    "GenerationHyperparameters": {
        "lora_name": _ignore("requests name the adapter of their policy version", is_silent=False)
    },
    "InferenceEngineConfig": {
        **_PLACE,
        **_SCHEDULING,
        "backend": _BACKEND,
        "use_lora": LegacyRule("lora", why="must agree with `actor.lora`"),
        "tokenizer_path": _copy("tokenizer_path"),
        "dump_to_file": _ignore("the ledger keeps every trajectory"),
    },
    "DatasetConfig": {
        "pin_memory": LegacyRule("loader", why=_IN_MEMORY),
        "num_workers": LegacyRule("loader", why=_LOADER),
    },
    "ClusterSpecConfig": {"cluster_name": _ignore("AReaL does not use it either")},
    "NameResolveConfig": {
        "ray_actor_name": _accept("ray_kv_store", why="the actor of `type: ray` is named after the run")
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


def moved_to(path: str, other: str) -> str:
    """The dotted path of the option `other` of a rule for the key at `path`."""
    sections = path.split(".")[:-1]
    while other.startswith("../"):
        sections, other = sections[:-1], other.removeprefix("../")
    return ".".join([*sections, other])


@dataclass
class LegacyKeys:
    """Applies the rules to the values of a file; `apply` removes every key that has a rule from `tree`."""

    cls: type[Any]
    tree: dict[str, Any]
    """The values that the user wrote, interpolations resolved; the rules add others."""
    written: dict[str, Any]
    """The same before interpolations are resolved."""
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    ignored: list[str] = field(default_factory=list[str])
    """Accepted keys without effect that the user should know of."""
    _backends: dict[str, str] = field(default_factory=dict[str, str])
    _lora: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The keys about adapters by section."""
    _sapo: dict[str, Any] = field(default_factory=dict[str, Any])
    """The keys of the actor about the loss `sapo`."""
    _switches: dict[str, LegacyRule] = field(default_factory=dict[str, LegacyRule])
    """The keys of rules `turn_on` that are true."""
    _specs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The first scheduling spec by section."""

    def apply(self) -> None:
        for section_class, values, path in list(sections_in(self.cls, self.tree)):
            for key in values.keys() - fields_of(section_class).keys():
                if (rule := legacy_rule(section_class, str(key), path)) is not None:
                    self._apply(rule, values.pop(key), values, f"{path}.{key}" if path else str(key))
        for keys, finish in (
            (self._backends, self._set_allocation),
            (self._switches, self._set_switches),
            (self._specs, self._set_schedule),
            (self._lora, self._set_lora),
            (self._sapo, self._set_sapo),
        ):
            if keys:
                finish()

    def _value(self, path: str) -> Any:
        """The value of the option at `path`: that of the file, else its default."""
        value = _below(self.tree, path, MISSING)
        spec = find_field(self.cls, path) if value == MISSING else None
        return value if spec is None else spec.default

    def _set(self, path: str, value: Any) -> bool:
        """Set the option at `path`; False when its section has no values."""
        *sections, name = path.split(".")
        tree = self.tree
        for section in sections:
            if tree.get(section) is None:
                tree[section] = {}
            if not isinstance(tree[section], dict):
                return False
            tree = tree[section]
        tree[name] = value
        return True

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
                if matters and value not in (None, "", copied := self._value(other)):
                    self._differs(path, value, other, copied)
            case "move":
                other = moved_to(path, other)
                self._move(path, value, other, value)
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
                _, wrong = converted(LoaderOptions, {key: value})
                self.problems += [problem._replace(path=f"{section}.{problem.path}") for problem in wrong]
            case "sapo":
                self._sapo[path.rpartition(".")[2]] = value
            case "lora":
                section, _, key = path.rpartition(".")
                self._lora.setdefault(section, {})[key] = value
            case "backend":
                if value not in (None, "", "fsdp"):  # "fsdp" without sizes is in files older than v0.5
                    self._backends[path] = str(value)

    def _move(self, path: str, value: Any, other: str, new: Any) -> None:
        """Set `other` to `new`, the equivalent of `value` at `path`, unless the user gave it another one."""
        present = self._value(other)
        parts = cast("dict[str, Any]", new if isinstance(new, dict) else {})
        agrees = present == new or (bool(parts) and all(_below(present, key) == parts[key] for key in parts))
        if (_below(self.written, other) is not None and not agrees) or not self._set(other, new):
            self._differs(path, value, other, present)

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
                other, old = origins.setdefault(name, (path, new))
                if _below(self.written, f"launcher.{name}") is not None:
                    is_equal = _below(self.tree, f"launcher.{name}") == new
                    self.ignored += [] if is_equal or path in self.ignored else [path]
                elif old != new:
                    message = f"{shown(new)} in launcher.{name} differs from {shown(old)} of {other}: use one value"
                    self.problems.append(ConfigProblem(path, message))
                else:
                    self._set(f"launcher.{name}", new)

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
            self._set(moved_to(path, rule.with_megatron if is_megatron else rule.path), True)

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
        options, wrong = converted(_RejectionSamplingOptions, values)
        self.problems += [problem._replace(path=f"{path}.{problem.path}") for problem in wrong]
        if options is not None and not wrong:
            correction = options.as_rollout_correction()
            if correction is None:
                self._unsupported(path, f"{shown(values)} has no equivalent: write actor.rollout_correction.rules")
            else:
                self._move(path, values, f"{path.rpartition('.')[0]}.rollout_correction", correction)

    def _set_sapo(self) -> None:
        """`actor.policy_loss` from AReaL's keys of SAPO. Without the loss its temperatures have no effect."""
        written = _below(self.tree, "actor.policy_loss")
        options = cast("dict[str, Any]", written) if isinstance(written, dict) else {"name": written} if written else {}
        is_on = self._sapo.pop("use_sapo_loss", options.get("name") == "sapo")
        if not isinstance(is_on, bool):
            text = f"{shown(is_on)} is no switch: use true or false"
            self.problems.append(ConfigProblem("actor.use_sapo_loss", text, "config.wrong_type"))
        elif options and (options.get("name") == "sapo") != is_on:
            self._differs("actor.use_sapo_loss", is_on, "actor.policy_loss", options.get("name"))
        elif is_on:
            new = {"name": "sapo"} | options
            for key, value in self._sapo.items():
                option = key.removeprefix("sapo_")
                if new.setdefault(option, value) != value:
                    self._differs(f"actor.{key}", value, f"actor.policy_loss.{option}", new[option])
            self._set("actor.policy_loss", new)

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

    def _differs(self, path: str, value: Any, other: str, present: Any, why: str = "") -> None:
        why = why or f"this version reads only {other}"
        message = f"{shown(value)} differs from {other}={shown(present)}: remove it, {why}"
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


def _same_allocation(text: str, other: str) -> bool:
    try:
        return AllocationMode.parse(text) == AllocationMode.parse(other)
    except AllocationError:
        return text == other
