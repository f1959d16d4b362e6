"""Configurations of ROLL's RLVR pipeline."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod
from typing import Any

from areal.api.allocation import ParallelDims
from areal.api.config.train import ALL_LINEAR
from areal.api.errors import ConfigError
from areal.importers.draft import TENSORBOARD, Draft, Note, Trainer, halves, megatron_trainer, set_devices

# Defaults of ROLL that differ from ours, by its keys: of its BaseConfig, PPOConfig and arguments of the roles.

_TRAINING = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
}
_GENERATING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "output_dir": "./output",
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "track_with": "tensorboard",
    "resume_from_checkpoint": False,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "lambd": 0.95,
    "loss_agg_mode": "seq-mean-token-mean",
    "reward_clip": 1e9,
    **{f"{role}.training_args.{key}": value for role in ("actor_train", "critic") for key, value in _TRAINING.items()},
    **{f"{role}.generating_args.{key}": value for role in ("actor_infer", "validation")
       for key, value in _GENERATING.items()},
}  # fmt: skip
"""reward_clip: ROLL has no limit without it."""


def is_agentic(values: Mapping[str, Any]) -> bool:
    return any(key.startswith("train_env_manager.") for key in values)


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    unread = {"prompt_length"} if is_agentic(values) else set[str]()  # an environment writes the prompts
    return {**values, **{key: DEFAULTS[key] for key in DEFAULTS.keys() - unread if values.get(key) is None}}


def name_defaults(draft: Draft, values: Mapping[str, Any]) -> None:
    """Name the defaults in the origins of options, and leave only the keys of `values`, the file, in the report."""
    for key in DEFAULTS:
        if values.get(key) is not None or key not in draft.values:
            continue
        for path, option in draft.options.items():
            if option.origin == f"{draft.system}: {key}":
                draft.options[path] = replace(option, origin=f"{draft.system}: its default of {key}")
            elif key in option.keys:
                draft.options[path] = replace(option, origin=f"{option.origin}; {key} has its default")
        if key in values:
            draft.values[key], draft.notes[key] = None, Note("dropped", "null: the default is used")
        else:
            del draft.values[key], draft.notes[key]


# Losses, KL terms and advantages of ROLL.

_OF_CRITIC = {"lambd": "actor.gae_lambda", "value_clip": "critic.eps_clip", "critic_warmup": "critic.warmup_steps"}
_OF_ROLES = (
    "name", "data_args.template", "infer_batch_size", "training_args.num_train_epochs", "training_args.warmup_*",
    "training_args.per_device_train_batch_size", "training_args.gradient_accumulation_steps",
)  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
_VARIANTS = {"vanilla": "ppo", "ppo": "ppo", "topr": "topr", "cispo": "cispo", "kimi15": "kimi15"}
_KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
_LEVELS = ("batch", "group")
_GROUPINGS = {"batch": "batch", "traj_group_id": "group"}


def take_loss(draft: Draft) -> None:
    for role, option in (("actor_train", "actor.dtype"), ("reference", "ref.dtype")):
        key = f"{role}.model_args.dtype"
        if (dtype := str(draft.get(key))) in _DTYPES and (role == "actor_train" or _has_reference(draft)):
            draft.set(option, _DTYPES[dtype], f"ROLL: {key}", key)
    key = "actor_train.model_args.disable_gradient_checkpointing"
    draft.set("actor.gradient_checkpointing", not draft.get(key, False), f"ROLL: not {key}", key)
    if draft.get("use_kl_loss", False):
        draft.keep("kl_loss_coef", "actor.kl_loss_coef")
        draft.drop("actor.kl_loss_coef above 0 does it", "use_kl_loss")
    coefficient = draft.get("init_kl_coef", 0.2) if draft.get("add_token_level_kl", False) else 0.0
    draft.set(
        "actor.kl_ctl", coefficient, "ROLL: init_kl_coef, if add_token_level_kl", "init_kl_coef", "add_token_level_kl"
    )
    if _has_reference(draft):
        draft.set("ref.path", draft.get("pretrain"), "ROLL: the reference is the initial policy")
    else:
        draft.drop("there is no reference", "reference.*")
    if draft.get("add_token_level_kl", False) and draft.get("kl_penalty", "kl") in _KL:
        draft.keep("kl_penalty", "actor.kl_estimator", convert=_KL.__getitem__)
    elif draft.get("add_token_level_kl", False):
        draft.lack("give actor.kl_estimator", "kl_penalty")
    if draft.get("add_token_level_kl", False) and draft.get("target_kl"):
        draft.set("actor.kl_control.type", "adaptive", "ROLL: target_kl is set")
        draft.keep("target_kl", "actor.kl_control.target")
        draft.keep("kl_horizon", "actor.kl_control.horizon")
    draft.drop(
        "this KL term is off, or its coefficient is fixed",
        "use_kl_loss",
        "kl_loss_coef",
        "target_kl",
        "kl_horizon",
        "kl_penalty",
    )
    draft.drop("the reference has the options of the actor", *(f"reference.{name}" for name in _OF_ROLES))
    if draft.get("dual_clip_loss", False):
        bound = 1 + 2 * draft.number("pg_clip", 0.2)
        draft.set("actor.c_clip", bound, "ROLL: dual_clip_loss, 1 + 2 x pg_clip", "dual_clip_loss")
    draft.drop("no limit of negative advantages", "dual_clip_loss")
    draft.set("actor.recompute_logprob", True, "ROLL recomputes the log-probabilities of the old policy")


def take_variant(draft: Draft) -> None:
    """The policy loss, and weights against the difference between servers and trainer."""
    keys = ("actor_train.pg_variant", "pg_variant")
    name = str(draft.get(keys[0], draft.get(keys[1], "vanilla")))
    if name in _VARIANTS:
        draft.set("actor.policy_loss", _VARIANTS[name], "ROLL: pg_variant", *keys)
    draft.lack("choose actor.policy_loss (docs/algorithms.md)", *keys)
    if name in ("topr", "kimi15"):
        draft.set("actor.policy_loss.ratio", "token", f"ROLL's form of {name}")
    for side in ("positive", "negative"):
        if name == "topr":
            draft.keep(f"topr_{side}_weight", f"actor.policy_loss.{side}_weight")
        draft.drop("an option of another loss", f"topr_{side}_weight")
    key, limit = "use_rollout_importance_sampling_ratio", "rollout_importance_sampling_ratio_upper_bound"
    if draft.get(key, False):
        draft.set("actor.rollout_correction.upper", draft.number(limit, 1.2), f"ROLL: {limit}", key, limit)
    draft.drop("it is switched off", key, limit)


def take_advantages(draft: Draft) -> None:
    name, agentic = str(draft.get("adv_estimator", "gae")), is_agentic(draft.values)
    if name == "gae" or (name == "grpo" and not agentic):
        draft.set("actor.adv_estimator", name, "ROLL: adv_estimator", "adv_estimator")
    if has_critic(draft):
        path = draft.get("reward_pretrain", draft.get("pretrain"))
        draft.set("critic.path", path, "ROLL: reward_pretrain, else pretrain", "reward_pretrain")
        for name, option in _OF_CRITIC.items():
            draft.keep(name, option)
        draft.defaults({"critic.eps_clip": None})
        draft.drop("the critic has the options of the actor", *(f"critic.{name}" for name in _OF_ROLES))
    elif name in ("reinforce", "step_reinforce") or (agentic and _sums_rewards(draft, name)):
        why = f"ROLL: {name}, whose normalised rewards are written with reward_norm"
        draft.set("actor.adv_estimator", "gae", why, "adv_estimator")
    if "actor.adv_estimator" not in draft.options:
        group = draft.options["gconfig.n_samples"].value if "gconfig.n_samples" in draft.options else 1
        draft.set("actor.adv_estimator", "grpo" if group != 1 else "gae", f"ROLL: {name} has no counterpart")
    if draft.options["actor.adv_estimator"].value == "gae" and "critic.path" not in draft.options:
        draft.set("actor.gae_lambda", 1.0, "ROLL: no critic")
    draft.lack("choose actor.adv_estimator (docs/algorithms.md)", "adv_estimator")
    if draft.options["actor.adv_estimator"].value == "grpo" and draft.get("reward_shift", False):
        draft.set("actor.adv_estimator", "dr_grpo", "ROLL: grpo with reward_shift", "adv_estimator", "reward_shift")
    if draft.options["actor.adv_estimator"].value == "gae":
        (_take_agentic_norm if agentic else _take_norm)(draft)
        white = {"mean_level": "batch", "std_level": "batch"} if draft.get("whiten_advantages", False) else None
        draft.set("actor.adv_norm", white, "ROLL: whiten_advantages", "whiten_advantages")
    draft.lack("grpo does not whiten its advantages again: use gae with reward_norm and adv_norm", "whiten_advantages")
    draft.drop("the advantage estimator fixes the normalisation", "norm_*_type", "reward_norm", "reward_s*")
    draft.keep("max_len_mask", "actor.mask_truncated")
    draft.lack("answers have no weights or masks by difficulty or length", "difficulty_mask", "error_max_len_clip",
               "difficulty_loss_weight", "length_loss_weight")  # fmt: skip
    group = draft.whole("num_return_sequences_in_group", 1)
    clip = draft.number("advantage_clip", 0)
    if name == "grpo" and not agentic and clip**2 * group >= (group - 1) ** 2:
        draft.drop("no advantage of a group of this size is beyond it", "advantage_clip")
    draft.lack("advantages are not clipped", "advantage_clip", off=(None,))
    if not draft.get("difficulty_mask", False):
        draft.drop("it is switched off", "difficulty_*_threshold")
    draft.lack("answers have no masks by difficulty", "difficulty_*_threshold", off=(None,))
    if "critic.path" not in draft.options:
        draft.drop("there is no critic", "critic.*", "value_clip", "critic_warmup", "critic_epochs",
                   "reward_pretrain", "lambd")  # fmt: skip


def _sums_rewards(draft: Draft, name: str) -> bool:
    """Whether the advantage of a token of an agentic file is the sum of the normalised rewards after it.

    agentic_reinforce discounts from turn to turn, actor.discount from token to token.
    """
    return name == "grpo" or (name == "agentic_reinforce" and draft.number("gamma", 1) == 1)


def _take_agentic_norm(draft: Draft) -> None:
    """Agentic files normalise by reward_normalization, for grpo too."""
    keys = [f"reward_normalization.{key}" for key in ("grouping", "method")]
    level = _GROUPINGS.get(str(draft.get(keys[0], "state")))
    method = str(draft.get(keys[1], "identity"))
    if method == "identity" or (level is not None and method in ("mean", "mean_std")):
        mean, std = (level if method in names else None for names in (("mean", "mean_std"), ("mean_std",)))
        norm = {"mean_level": mean, "std_level": std} if mean else None
        draft.set("actor.reward_norm", norm, "ROLL: reward_normalization", *keys)
    draft.lack("give actor.reward_norm: levels are batch and group", *keys, off=())


def _take_norm(draft: Draft) -> None:
    """How rewards are normalised: by reward_norm in older files, by norm_mean_type and norm_std_type in newer ones."""
    whole, is_shift = draft.get("reward_norm"), bool(draft.get("reward_shift", False))
    levels = {"norm_mean_type": whole, "norm_std_type": None if is_shift else whole}
    mean, std = (level if (level := draft.get(key, other)) in _LEVELS else None for key, other in levels.items())
    norm = {"mean_level": mean, "std_level": std} if mean or std else None
    keys = [key for key in (*levels, "reward_norm") if draft.get(key) in (None, *_LEVELS)]
    keys += ["reward_shift"] if is_shift and whole in _LEVELS else []
    draft.set("actor.reward_norm", norm, "ROLL: reward_norm, reward_shift, norm_mean_type, norm_std_type", *keys)
    draft.lack("levels are batch and group", "norm_*_type", "reward_norm", off=())
    if whole == "running":
        draft.lack("there are no running means: give actor.reward_norm", "reward_s*")
    draft.drop("ROLL reads reward_shift with reward_norm, and reward_scale with running means only", "reward_s*")


def has_critic(draft: Draft) -> bool:
    return draft.get("adv_estimator", "gae") == "gae"


def _has_reference(draft: Draft) -> bool:
    return bool(draft.get("use_kl_loss", False) or draft.get("add_token_level_kl", False))


# Optimisers, schedules and numbers of optimiser updates of ROLL. `role`: actor_train or critic.

_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_KEPT = {"learning_rate": "lr", "weight_decay": "weight_decay", "adam_beta1": "beta1", "adam_beta2": "beta2"}


def take_minibatches(draft: Draft, role: str, section: str, *, answers: int, ranks: int) -> int:
    """The number of mini-batches of a batch of `answers` over the data ranks, also set as an option."""
    sizes = [f"{role}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    size = draft.whole(sizes[0], 8) * draft.whole(sizes[1], 1) * ranks
    count = max(1, answers // size)
    why = f"ROLL: {answers} answers / global batch of {size}"
    draft.set(f"{section}.ppo_n_minibatches", count, why, *sizes)
    return count


def take_optimizer(draft: Draft, role: str, section: str, *, updates: int) -> None:
    """`updates`: optimiser updates of the run, over which ROLL's schedules extend; 0 = not known."""
    args, optimizer = f"{role}.training_args", f"{section}.optimizer"
    for name, option in _KEPT.items():
        draft.keep(f"{args}.{name}", f"{optimizer}.{option}")
    key = f"{args}.lr_scheduler_type"
    name = str(draft.get(key))
    if name in _SCHEDULES:
        draft.keep(key, f"{optimizer}.lr_scheduler_type", convert=lambda _: _SCHEDULES[name])
    draft.lack("schedules are constant, linear and cosine", key)
    is_megatron = draft.get(f"{role}.strategy_args.strategy_name") == "megatron_train"
    _take_warmup(
        draft, args, f"{optimizer}.warmup_steps_proportion", updates, is_off=name == "constant" and not is_megatron
    )


def _take_warmup(draft: Draft, args: str, option: str, updates: int, *, is_off: bool) -> None:
    steps, ratio = f"{args}.warmup_steps", f"{args}.warmup_ratio"
    num_steps = draft.number(steps, 0, least=-1)
    if is_off:
        draft.set(option, 0.0, "ROLL: only Megatron has a warm-up before a constant rate", steps, ratio)
    elif num_steps > 0 and updates:
        why = f"ROLL: warmup_steps {num_steps:g} / {updates} optimiser updates"
        draft.set(option, min(1.0, num_steps / updates), why, steps)
        draft.drop("warmup_steps replaces it", ratio)
    elif num_steps > 0:
        draft.set(option, 0.0, f"give {option}: the length of the run is not known")
        draft.lack(f"give {option}: the length of the run is not known", steps)
        draft.drop("warmup_steps replaces it", ratio)
    else:
        draft.set(option, draft.number(ratio, 0), "ROLL: warmup_ratio, 0 by default", ratio)
        draft.drop("it is switched off", steps)


# Sampling, limits of tokens and evaluation of ROLL.


def take_sampling(draft: Draft) -> None:
    prompt, longest = _lengths(draft)
    if draft.whole("actor_infer.generating_args.top_k", -1, least=-1) > 0:
        draft.keep("actor_infer.generating_args.top_k", "gconfig.top_k")
    draft.drop("set by num_return_sequences_in_group", "actor_infer.generating_args.num_return_sequences")
    _evaluation(draft, prompt, longest)
    roles = ("actor_infer", "validation")
    draft.drop("all tokens, or one beam, as here", *(f"{role}.generating_args.top_k" for role in roles))
    beams = [f"{role}.generating_args.num_beams" for role in roles]
    draft.lack("there is no beam search", *beams, off=(1,))
    stops = "actor_infer.generating_args.stop_strings"
    if draft.get(stops):
        draft.set("gconfig.stop", draft.listed(stops), "ROLL: stop_strings", stops)


def _lengths(draft: Draft) -> tuple[int, int]:
    """Set the limits of tokens; returns those of a prompt, and of a prompt with its answer.

    An agentic file limits each turn by max_new_tokens, the RLVR pipeline ignores that key.
    """
    prompt, limit = draft.whole("prompt_length", 1024), "actor_infer.generating_args.max_new_tokens"
    answer = draft.whole("response_length" if draft.get("response_length") is not None else limit, 1024)
    longest = draft.whole("sequence_length", prompt + answer)
    why = "ROLL: sequence_length, else prompt_length + response_length"
    draft.set("gconfig.max_tokens", longest, why, "sequence_length")
    if is_agentic(draft.values):
        draft.set("gconfig.max_new_tokens", min(draft.whole(limit, 8192), longest), "ROLL: max_new_tokens", limit)
    elif draft.get("response_length") == longest - prompt:
        draft.keep("response_length", "gconfig.max_new_tokens")
    else:
        draft.set("gconfig.max_new_tokens", max(1, longest - prompt), "ROLL: sequence_length - prompt_length")
    draft.drop("the other limits of tokens decide", "response_length", limit)
    return prompt, longest


def _evaluation(draft: Draft, prompt: int, longest: int) -> None:
    has_rows, is_on = "validation.data_args.file_name" in draft.values, draft.whole("eval_steps", 10, least=-1) > 0
    if not (has_rows and is_on):
        draft.drop("there is no evaluation" if has_rows else "there is no held-out set",
                   "validation.*", "eval_steps", "val_prompt_length", "val_sequence_length")  # fmt: skip
        return
    draft.keep("eval_steps", "evaluator.freq_steps")
    draft.set("evaluator.eval_before_train", True, "ROLL evaluates before the first step")
    for name in ("temperature", "top_p"):
        draft.keep(f"validation.generating_args.{name}", f"eval_gconfig.{name}")
    if draft.whole("validation.generating_args.top_k", -1, least=-1) > 0:
        draft.keep("validation.generating_args.top_k", "eval_gconfig.top_k")
    keys = ("val_sequence_length", "val_prompt_length")
    if draft.get(keys[0]) is not None:
        longest, before = draft.whole(keys[0], longest), draft.whole(keys[1], prompt)
    else:
        before = prompt
    why = "ROLL: val_sequence_length, else as in training"
    draft.set("eval_gconfig.max_new_tokens", max(1, longest - before), why, *keys)
    draft.set("eval_gconfig.max_tokens", longest, why, keys[0])
    draft.set("valid_dataset.max_length", prompt, "ROLL: prompt_length")
    draft.drop("the other limits of tokens decide", "validation.generating_args.max_new_tokens")


_SAME = {
    "exp_name": "trial_name", "seed": "seed", "output_dir": "cluster.fileroot",
    "num_gpus_per_node": "cluster.n_gpus_per_node", "prompt_length": "train_dataset.max_length",
    "pretrain": "actor.path", "ppo_epochs": "actor.ppo_epochs", "pg_clip": "actor.eps_clip",
    "pg_clip_low": "actor.eps_clip", "pg_clip_high": "actor.eps_clip_higher", "reward_clip": "actor.reward_clip",
    "entropy_loss_coef": "actor.entropy_coef", "loss_agg_mode": "actor.loss_aggregation", "gamma": "actor.discount",
    "max_grad_norm": "actor.optimizer.gradient_clipping", "actor_train.data_args.file_name": "train_dataset.path",
    "validation.data_args.file_name": "valid_dataset.path",
    "validation.generating_args.num_return_sequences": "evaluator.n_samples",
    "actor_infer.generating_args.temperature": "gconfig.temperature",
    "actor_infer.generating_args.top_p": "gconfig.top_p",
    "actor_infer.generating_args.repetition_penalty": "gconfig.repetition_penalty",
}  # fmt: skip
_OF_REWARDS = (
    "worker_cls", "tag_included", "world_size", "reward_type", "use_local", "name", "infer_batch_size",
    "data_args.template", "model_args.*", "strategy_args.*",
)  # fmt: skip
_COLUMNS = {"prompt": "prompt", "messages": "messages", "response": "answer"}
_REWARDS = {"math_rule": "math", "code_sandbox": "code"}
_WORKERS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}
"""Class of a reward worker -> reward function: a domain may have any name."""
_OTHERS = {
    "sft_train.": "supervised training",
    "chosen_key.": "DPO",
    "ipo.": "DPO",
    "student.": "distillation",
    "student_train.": "on-policy distillation",
}
"""Start of a key -> the pipeline that has it."""
_TRAIN = "actor_train.strategy_args.strategy_config"
_MAX_GPUS = 100_000  # Entries of one range that are counted.
_SERVERS = {"vllm": "vllm", "sglang": "sglang"}

_TRACKERS = {
    "wandb": ("wandb.mode", "online"),
    "swanlab": ("swanlab.mode", "cloud"),
    "tensorboard": ("tensorboard.path", TENSORBOARD),
}
"""Value of track_with -> option of stats_logger, and its value."""


def from_roll(values: Mapping[str, Any]) -> Draft:
    """The draft of a ROLL file, with ROLL's defaults where they differ from ours."""
    _refuse_others(values)
    draft = Draft("ROLL", with_defaults(values))
    project = draft.get("logger_project", draft.get("tracker_kwargs.project", "roll"))
    draft.set("experiment_name", project, "ROLL: the name of its project", "tracker_kwargs.project")
    take_sampling(draft)
    if draft.get("use_pg_clip_range", False):
        draft.drop("pg_clip_low and pg_clip_high are used", "use_pg_clip_range", "pg_clip")
    else:
        draft.drop("pg_clip is used", "use_pg_clip_range", "pg_clip_low", "pg_clip_high")
    draft.keep_all(_SAME)
    _length(draft)
    _batches(draft)
    take_loss(draft)
    take_variant(draft)
    take_advantages(draft)
    _devices(draft)
    _rewards(draft)
    _agents(draft)
    _dropped(draft)
    draft.finish()
    name_defaults(draft, values)
    return draft


def _refuse_others(values: Mapping[str, Any]) -> None:
    for start, kind in _OTHERS.items():
        key = next((key for key in values if f"{key}.".startswith(start)), None)
        if key is not None:
            message = f"ROLL files of {kind} ({key}) are not imported: write one (docs/algorithms.md)"
            raise ConfigError(message, code="config.unsupported")
    strategy = "actor_train.strategy_args.strategy_name"
    if str(values.get(strategy)).startswith("diffusion"):
        raise ConfigError(f"ROLL files of diffusion models ({strategy}) are not imported", code="config.unsupported")


def _length(draft: Draft) -> None:
    epochs = "actor_train.training_args.num_train_epochs"
    if draft.whole("max_steps", 500, least=-1) > 0:
        draft.keep("max_steps", "total_train_steps")
        draft.drop("epochs follow from max_steps", epochs)
    else:
        why = "ROLL: num_train_epochs, as max_steps sets no number of steps"
        draft.set("total_train_epochs", max(1, ceil(draft.number(epochs, 1))), why, "max_steps", epochs)


def _batches(draft: Draft) -> None:
    ratio, option = draft.number("async_generation_ratio", 0), "rollout.max_head_offpolicyness"
    draft.set(option, ceil(ratio), "ROLL: async_generation_ratio, rounded up", "async_generation_ratio")
    if is_agentic(draft.values):  # rollout_batch_size counts trajectories
        group = draft.whole("train_env_manager.group_size", 1)
        prompts = max(1, draft.whole("rollout_batch_size", 128) // group)
        draft.set("train_dataset.batch_size", prompts, "ROLL: trajectories / group_size", "rollout_batch_size")
        draft.keep("train_env_manager.group_size", "gconfig.n_samples")
    else:
        prompts, group = draft.whole("rollout_batch_size", 128), draft.whole("num_return_sequences_in_group", 1)
        draft.keep("rollout_batch_size", "train_dataset.batch_size")
        draft.keep("num_return_sequences_in_group", "gconfig.n_samples")
    answers, steps = prompts * group, max(0, draft.whole("max_steps", 500, least=-1))
    ranks = _ranks(draft, "actor_train")
    count = take_minibatches(draft, "actor_train", "actor", answers=answers, ranks=ranks)
    trained = max(1, steps - draft.whole("critic_warmup", 0, least=0)) if steps and has_critic(draft) else steps
    updates = trained * count * draft.whole("ppo_epochs", 1)
    take_optimizer(draft, "actor_train", "actor", updates=updates)
    if has_critic(draft):
        of_critic = _ranks(draft, "critic") if draft.get("critic.device_mapping") is not None else ranks
        count = take_minibatches(draft, "critic", "critic", answers=answers, ranks=of_critic)
        draft.keep("critic_epochs", "critic.ppo_epochs")
        take_optimizer(draft, "critic", "critic", updates=steps * count * draft.whole("critic_epochs", 1))
    key, longest = "actor_train.max_tokens_per_microbatch_in_train", draft.options["gconfig.max_tokens"].value
    if draft.get("actor_train.use_dynamic_batching_in_train", False) and draft.get(key):
        draft.keep(key, "actor.mb_spec.max_tokens_per_mb")
    else:
        key = "actor_train.training_args.per_device_train_batch_size"
        why = f"ROLL: {(micro := draft.whole(key, 8))} sequences of {longest} tokens"
        draft.set("actor.mb_spec.max_tokens_per_mb", micro * longest, why, key)
    packing = ("use_sequence_packing", "use_remove_padding", "sequence_packing_args.*", "use_dynamic_batching_in_*",
               "max_tokens_per_microbatch_in_*", "sequence_length_round_in_*")  # fmt: skip
    draft.drop("micro-batches are filled by tokens, without padding", *(f"*.{name}" for name in packing))
    draft.drop("micro-batches are filled by tokens", "*.infer_batch_size", "*per_device_train_batch_size")
    draft.drop("gradients are accumulated over a mini-batch", "*.gradient_accumulation_steps")


def _devices_of(draft: Draft, role: str) -> set[int]:
    mapping = draft.get(f"{role}.device_mapping", [0])
    if isinstance(mapping, list):
        return {int(place) for place in mapping if isinstance(place, int)} or {0}
    ranges = [(int(first or 0), int(end)) for first, end in re.findall(r"range\((?:(\d+),)?\s*(\d+)\)", str(mapping))]
    places = {place for first, end in ranges for place in range(first, min(end, first + _MAX_GPUS))}
    if re.fullmatch(r"\[[\d,\s]+\]", str(mapping)):
        places = set(map(int, re.findall(r"\d+", str(mapping))))
    if not places:
        key = f"{role}.device_mapping"
        message = f"{key}: {mapping!r} is no list of GPUs: give {key}=[0,1,...] after the file"
        raise ConfigError(message, code="config.wrong_type")
    return places


def _ranks(draft: Draft, role: str) -> int:
    prefix = f"{role}.strategy_args.strategy_config."
    if draft.get(f"{role}.strategy_args.strategy_name") == "megatron_train":
        sizes = [
            f"{prefix}{name}_size" for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        ]
    else:
        sizes = [f"{role}.model_args.ulysses_size"]
    return max(1, len(_devices_of(draft, role)) // prod(draft.whole(size, 1) for size in sizes))


def _trainer(draft: Draft) -> Trainer:
    if draft.get("actor_train.strategy_args.strategy_name") == "megatron_train" and not _has_adapters(draft):
        return megatron_trainer(draft, f"{_TRAIN}.")
    ulysses = max(1, draft.whole("actor_train.model_args.ulysses_size", 1))
    return Trainer(sizes=ParallelDims(cp=ulysses))


def _has_adapters(draft: Draft) -> bool:
    """ROLL trains adapters if they have modules; a rank alone has no effect."""
    return bool(draft.get("actor_train.model_args.lora_target"))


def _devices(draft: Draft) -> None:
    strategy = str(draft.get("actor_infer.strategy_args.strategy_name", "vllm"))
    server, config = _SERVERS.get(strategy, "native"), "actor_infer.strategy_args.strategy_config"
    size = draft.whole(f"{config}.tensor_parallel_size", draft.whole("actor_infer.num_gpus_per_worker", 1))
    trained, served = _devices_of(draft, "actor_train"), _devices_of(draft, "actor_infer")
    trainer, is_shared = _trainer(draft), bool(trained & served)
    parts = max(1, len(served) // size), size, len(trained)
    if is_shared:
        parts = halves(len(trained | served), size, trainer)
    shared = "shared by both roles, here about half for each" if is_shared else "as in the file"
    keys = [f"{role}.device_mapping" for role in ("actor_train", "actor_infer")]
    keys += ["actor_infer.num_gpus_per_worker", "actor_infer.strategy_args.strategy_name"]
    keys += ["actor_train.strategy_args.strategy_name"]
    keys += [f"{config}.tensor_parallel_size", "actor_train.model_args.ulysses_size"]
    if trainer.backend == "megatron":
        keys += [key for key in draft.values if key.startswith(f"{_TRAIN}.") and key.endswith("parallel_size")]
    per_node = draft.whole("num_gpus_per_node", 8)
    set_devices(draft, server, parts, trainer, f"ROLL: device_mapping, {shared}", keys, per_node=per_node)
    draft.drop("one machine has the GPUs of device_mapping, from which ROLL computes it too", "num_nodes")
    draft.drop("the servers load the policy, then get its weights", f"{config}.load_format")
    if server != "native":
        draft.server(f"{config}.", server)
    draft.drop("all models of a trainer are divided like the actor", "*.ulysses_size")
    draft.keep(f"{_TRAIN}.offload_policy", "actor.fsdp.offload_params")
    draft.keep(f"{_TRAIN}.reshard_after_forward", "actor.fsdp.reshard_after_forward")
    draft.drop("FSDP2 shards each block", f"{_TRAIN}.fsdp_size", f"{_TRAIN}.*_dtype")
    sizes = [f"{_TRAIN}.{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert", "virtual_pipeline")]
    draft.lack(
        "choose sizes for megatron: or fsdp: in allocation_mode (docs/train_engines.md)",
        *sizes,
        f"{_TRAIN}.context_parallel_size",
        off=(1,),
    )
    draft.drop("it follows from the tensor size", f"{_TRAIN}.sequence_parallel")
    draft.drop("the data type is that of model_args", f"{_TRAIN}.bf16")
    draft.lack("choose options of actor.megatron, or leave them out", f"{_TRAIN}.*")
    draft.drop(
        "placement of other roles",
        *("*.device_mapping", "*.num_gpus_per_worker", "*.strategy_args.strategy_name", "*.world_size"),
        *("reference.strategy_args.*", "critic.strategy_args.*", "rewards.*.strategy_args.*"),
    )


def _rewards(draft: Draft) -> None:
    """ROLL chooses the reward function of a row by its column `tag`."""
    names = sorted({key.split(".")[1] for key in draft.values if key.startswith("rewards.")})
    workers = {name: str(draft.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2] for name in names}
    functions = {name: _WORKERS.get(workers[name]) or _REWARDS.get(name) for name in names}
    known = {name: function for name, function in functions.items() if function is not None}
    tags = {name: [str(tag) for tag in draft.listed(f"rewards.{name}.tag_included")] for name in known}
    if len(names) == 1 and known:
        draft.set("reward_fn", known[names[0]], f"ROLL: rewards.{names[0]}")
    elif any(tags.values()):
        for name, function in known.items():
            for tag in tags[name]:
                draft.set(f"reward.by_source.{tag}", {function: 1.0}, f"ROLL: rewards.{name}.tag_included")
        draft.set("reward.source_key", "tag", "ROLL: its column of sources")
    elif names or not is_agentic(draft.values):  # the environments of an agentic file reward
        function = next(iter(known.values()), "math")
        draft.set("reward_fn", function, f"ROLL: rewards {', '.join(names)}: check it (docs/rewards.md)")
    for name in names:
        if name in known and (tags[name] or "reward.source_key" not in draft.options):
            keys = [f"rewards.{name}.{key}" for key in _OF_REWARDS]
            draft.drop(f"the reward function {known[name]}", *keys)
        draft.lack("write a reward function (docs/rewards.md)", f"rewards.{name}.*", off=(None,))


def _columns(draft: Draft, role: str, section: str) -> None:
    """Names of columns. A row of the rule for mathematics has its answer in `ground_truth`."""
    keys = [f"{role}.data_args.{name}" for name in _COLUMNS]
    names = {key: draft.get(key) for key in keys if isinstance(draft.get(key), str)}
    columns = {str(name): _COLUMNS[key.rpartition(".")[2]] for key, name in names.items()}
    columns = {name: ours for name, ours in columns.items() if name not in ("", ours)}
    if any(key.startswith("rewards.math_rule.") for key in draft.values) and "answer" not in columns.values():
        columns["ground_truth"] = "answer"
    if columns:
        used = (key for key in keys if names.get(key) in columns)
        draft.set(f"{section}.columns", columns, f"ROLL: {role}.data_args", *used)
    draft.drop("a column that is read as it is", *keys)


def _adapters(draft: Draft) -> None:
    args = "actor_train.model_args"
    for name in ("rank", "alpha", "dropout"):
        draft.keep(f"{args}.lora_{name}", f"actor.lora.{name}")
    draft.keep(f"{args}.lora_target", "actor.lora.target_modules", convert=_modules)
    rank = draft.whole(f"{args}.lora_rank", 8)
    draft.defaults({"actor.lora.rank": rank, "actor.lora.alpha": 2 * rank})


def _modules(value: Any) -> Any:
    """Modules of adapters: all, names with commas, or a regular expression."""
    if not isinstance(value, str) or any(sign in value for sign in "*$|("):
        return value
    return ALL_LINEAR if value == "all" else [name.strip() for name in value.split(",")]


def _agents(draft: Draft) -> None:
    draft.lack("write workflow: agent, or a workflow, and a dataset of its tasks (docs/agents.md)",
               "train_env_manager.*", "val_env_manager.*", "custom_envs.*", "env_manager_cls", "max_actions_per_traj",
               "agent_config*", "max_tokens_per_step", "parse_tool_call_*", "skip_mock_*", "reward_normalization.*",
               "batch_adjust_mode", "step_reward_gamma",
               off=(None,))  # fmt: skip
    draft.lack("add a section teacher (docs/algorithms.md)", "use_opd", "opd_*", "teacher.*", off=(None, False))


def _dropped(draft: Draft) -> None:
    template = draft.get("global_template", draft.get("actor_train.data_args.template", "native"))
    if template in ("native", "qwen2_5", "qwen3", "qwen2-vl"):
        draft.drop("the chat template of the tokenizer", "*.data_args.template", "global_template")
    draft.lack("the chat template of the tokenizer is used", "*.data_args.template", "global_template")
    if draft.whole("save_steps", 0, least=-1) > 0:
        draft.keep("save_steps", "saver.freq_steps")
    draft.drop("no interval: only the last step is exported", "save_steps")
    if draft.whole("max_ckpt_to_keep", 0, least=0) > 0:
        draft.keep("max_ckpt_to_keep", "saver.keep_last")
    draft.drop("all exports are kept", "max_ckpt_to_keep")
    _columns(draft, "actor_train", "train_dataset")
    if "valid_dataset.path" in draft.options:
        _columns(draft, "validation", "valid_dataset")
    draft.drop("the columns of actor_train and validation count", *(f"*.data_args.{name}" for name in _COLUMNS))
    if sum(".domain_interleave_probs." in key for key in draft.values) == 1:
        draft.drop("all rows are of this domain", "*.domain_interleave_probs.*", "*.interleave_probs")
    weights = ("*.domain_interleave_probs.*", "*.interleave_probs")
    draft.lack("weights: one path and one weight for each dataset", *weights, off=(None,))
    draft.lack("write actor.freeze, names of weights (needs fsdp)", "actor_train.model_args.freeze_module_prefix")
    draft.drop("a frozen model, or one with the weights of the actor", "*.model_args.freeze_module_prefix")
    draft.drop("an answer has all of its tokens, those of a stop string too", "*.include_stop_str_in_output")
    draft.drop("answers are written to samples/, calls have the limits of launcher", "rollout_dump_dir", "rpc_timeout")
    draft.drop("answers are evaluated as servers have room", "val_batch_size")
    if str(draft.get("actor_train.worker_cls")).rpartition(".")[2] in ("ActorWorker", "ActorPGWorker"):
        draft.drop("the loss is that of pg_variant", "actor_train.worker_cls")
    draft.lack("choose actor.policy_loss (docs/algorithms.md)", "actor_train.worker_cls")
    draft.keep("actor_train.data_args.cache_dir", "train_dataset.cache_dir")
    draft.drop("how ROLL's loader works", "*.data_args.preprocessing_num_workers", "*.data_args.dataset_dir",
               "*.data_args.overwrite_cache")  # fmt: skip
    tracker = str(draft.get("track_with", "none"))
    if tracker in _TRACKERS:
        option, value = _TRACKERS[tracker]
        draft.set(f"stats_logger.{option}", value, "ROLL: track_with", "track_with")
    elif tracker not in ("none", "None", "stdout"):
        draft.lack("there is no such tracker here (docs/debugging.md)", "track_with")
    draft.drop("names and keys of a tracker are in its own variables", "tracker_kwargs.*", "track_with", "logging_*")
    if isinstance(resume := draft.get("resume_from_checkpoint"), bool):
        why = "ROLL: resume_from_checkpoint"
        draft.set("recover.mode", "auto" if resume else "disabled", why, "resume_from_checkpoint")
    draft.lack("actor.path: the folder of exported weights", "resume_from_checkpoint")
    draft.drop("checkpoints are in the run's folder, exports in Hugging Face format", "checkpoint_config.*")
    draft.drop("options of Hydra itself", "hydra.*")
    if _has_adapters(draft):
        _adapters(draft)
    draft.drop("there are no adapters, or those of actor_train", "*.model_args.lora_*", "lora_*")
    names = ("device_map", "attn_implementation", "dtype", "model_type", "disable_gradient_checkpointing", "flash_attn")
    draft.drop("models have the attention and dtype of their role", *(f"*.model_args.{name}" for name in names))
    draft.drop("the environment of processes is in launcher", "model_name", "*system_envs.*")
    draft.drop("rejected groups are replaced while the run lasts", "is_use_additional_prompts", "max_running_requests")
    draft.drop("the sizes of a queue follow from the staleness", "is_num_return_sequences_expand", "generate_opt_level")
    draft.drop("eval_steps decides", "validation.eval_steps")
    draft.drop("the data type is that of model_args", "*.training_args.bf16")
    draft.drop("max_steps of the run counts", "*.training_args.max_steps")
    draft.drop("servers get the weights over their own channel", "model_update_buffer_size_mb", "transfer_backend.*")
    draft.drop("the loss needs them or not", "enable_reference", "*enable_old_logprobs_recompute")
