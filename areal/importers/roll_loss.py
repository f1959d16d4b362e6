"""Losses, KL terms and advantages of ROLL."""

from areal.importers.draft import Draft
from areal.importers.roll_defaults import is_agentic

_OF_CRITIC = {
    "lambd": "actor.gae_lambda",
    "value_clip": "critic.eps_clip",
    "critic_warmup": "critic.warmup_steps",
}
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
        draft.set(f"actor.{name}.ratio", "token", f"ROLL's form of {name}")
    for side in ("positive", "negative"):
        if name == "topr":
            draft.keep(f"topr_{side}_weight", f"actor.topr.{side}_weight")
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
    given = {"norm_mean_type": whole, "norm_std_type": None if is_shift else whole}
    mean, std = (level if (level := draft.get(key, other)) in _LEVELS else None for key, other in given.items())
    norm = {"mean_level": mean, "std_level": std} if mean or std else None
    keys = [key for key in (*given, "reward_norm") if draft.get(key) in (None, *_LEVELS)]
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
