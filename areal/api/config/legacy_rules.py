"""Keys of AReaL files (v0.5 and 1.0) that have no field here: which values they may hold, and where they go.

A file written for AReaL loads when such a key has an equivalent here, or requires nothing that this version lacks.
Any other value is refused, because an option that nothing reads must not look as if it worked.
"""

from dataclasses import dataclass
from typing import Any, Literal

from areal.api.config.algorithm import PPOActorConfig
from areal.api.config.validate import shown


@dataclass(frozen=True, slots=True)
class LegacyRule:
    """What happens to the value of one key."""

    action: Literal[
        "accept", "ignore", "copy", "move", "turn_on", "rejection_sampling", "backend", "lora", "scheduling",
        "strategy", "scheduler", "memory_profiler", "loader",
    ]  # fmt: skip
    """accept: only `values`, without effect. ignore: any value, without effect. copy: null, empty or equal to `path`.
    move: the value of the option `path`. turn_on: true means true at `path`, false means nothing. rejection_sampling,
    backend, lora: keys that belong to `rollout_correction`, `allocation_mode` and `lora`. scheduling, strategy,
    scheduler: keys of AReaL's launchers, see legacy_scheduling. memory_profiler: a section, whose steps are counted
    from 0. loader: an option of AReaL's data loader, of the right type, without effect.
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
    with_megatron: str = ""
    """turn_on: the same as `path` for a Megatron trainer; empty = there is none."""
    switches_to: str = ""
    """move, not empty: the key is a switch; true means this value at `path`, false any other."""


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
        "memory_profiler": LegacyRule(
            "memory_profiler",
            why="`profile_steps`, counted from 0, become `perf_tracer.profile_steps`; a snapshot has 100,000 events",
        ),
    },
    "PPOConfig": {
        "dynamic_bs": _move("rollout.dynamic_bs"),
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
        "use_sapo_loss": _move("policy_loss", switches_to="sapo"),
        "sapo_tau_pos": _move("sapo.tau_pos"),
        "sapo_tau_neg": _move("sapo.tau_neg"),
        "rejection_sampling": LegacyRule("rejection_sampling", why="becomes `rollout_correction`"),
    },
    "OptimizerConfig": {
        "offload": _turn_on("../fsdp.offload_optimizer", with_megatron="../megatron.offload_optimizer"),
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
    "DatasetConfig": {
        "pin_memory": LegacyRule("loader", why=_IN_MEMORY),
        "num_workers": LegacyRule("loader", why=_LOADER),
    },
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


def moved_to(path: str, other: str) -> str:
    """The dotted path of the option `other` of a rule for the key at `path`."""
    sections = path.split(".")[:-1]
    while other.startswith("../"):
        sections, other = sections[:-1], other.removeprefix("../")
    return ".".join([*sections, other])
