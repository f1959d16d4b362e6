"""Advantages, policy loss, KL terms and off-policy corrections of verl."""

from areal.importers.draft import Draft, minibatches
from areal.importers.verl_optimizer import take_optimizer
from areal.importers.verl_rollout import ACTOR, MODEL, is_megatron

_CRITIC = {
    "critic.model.path": "critic.path",
    "critic.grad_clip": "critic.optimizer.gradient_clipping",
    "critic.cliprange_value": "critic.eps_clip",
    "critic.ppo_epochs": "critic.ppo_epochs",
    "critic.loss_agg_mode": "critic.loss_aggregation",
    "critic.model.enable_gradient_checkpointing": "critic.gradient_checkpointing",
}
_FOLLOWS_ACTOR = ("ppo_epochs", "loss_aggregation")
"""Options of the critic that are those of the actor unless a key sets them."""
_ESTIMATORS = {
    "grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb_tir",
} | dict.fromkeys(
    ("gae", "grpo", "remax", "rloo", "opo", "gpg", "gdpo", "grpo_passk", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline")
)  # fmt: skip
"""Name in verl -> ours; None = the same."""
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES = {
    "vanilla": "ppo", "gspo": "gspo", "sapo": "sapo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
_MEAN_OF_SEQUENCES = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over sequences, whatever loss_agg_mode is."""
_OF_LOSSES = {
    "clip_cov": {"clip_cov_ratio": "ratio", "clip_cov_lb": "low", "clip_cov_ub": "high"},
    "kl_cov": {"kl_cov_ratio": "ratio", "ppo_kl_coef": "coef"},
}


def take_advantages(draft: Draft) -> None:
    key, by_std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name, divides = str(draft.get(key, "gae")), draft.get(by_std, True) is not False
    why = "verl: algorithm.adv_estimator, norm_adv_by_std_in_grpo"
    if name in _ESTIMATORS:
        ours = _ESTIMATORS[name] or name
        draft.set("actor.adv_estimator", "dr_grpo" if ours == "grpo" and not divides else ours, why, key, by_std)
        if ours == "grpo_passk":
            draft.set("actor.passk_std", divides, why, by_std)
    else:
        draft.set("actor.adv_estimator", "grpo", f"{name} of verl has no counterpart")
        draft.lack("another estimator, or actor.adv_estimator: custom (docs/algorithms.md)", key, off=())
    if name == "gae":
        _take_critic(draft)
    else:
        draft.drop("there is no critic", "critic.*", "trainer.critic_warmup")
    draft.lack("actor.gdpo_weights has names of reward functions", "algorithm.gdpo_*")
    if draft.get("algorithm.use_pf_ppo", False):
        draft.keep("algorithm.pf_ppo.reweight_method", "actor.pf_ppo.method")
        draft.keep("algorithm.pf_ppo.weight_pow", "actor.pf_ppo.power")
        draft.defaults({"actor.pf_ppo.method": "pow"})
        draft.drop("actor.pf_ppo does it", "algorithm.use_pf_ppo")
    draft.drop("answers are not resampled", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*")
    if draft.get("algorithm.filter_groups.enable", False):
        why = "verl: algorithm.filter_groups"
        draft.set("rollout.should_accept_fn", "mixed_rewards", why, "algorithm.filter_groups.enable")
    draft.drop("rejected groups are replaced while the run lasts", "algorithm.filter_groups.*", "data.gen_batch_size")


def _take_critic(draft: Draft) -> None:
    draft.set("critic.path", draft.get("critic.model.path", draft.get(f"{MODEL}.path")), "verl: critic.model.path")
    draft.keep_all(_CRITIC)
    take_optimizer(draft, "critic", "critic.optim.", is_megatron=is_megatron(draft))
    draft.drop("adv_estimator: gae has a critic", "critic.enable")
    size = draft.whole("critic.ppo_mini_batch_size", draft.whole(f"{ACTOR}.ppo_mini_batch_size", 256))
    count = minibatches(draft.options["train_dataset.batch_size"].value, size)
    draft.set("critic.ppo_n_minibatches", count, "verl: critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    for name in _FOLLOWS_ACTOR:
        if f"actor.{name}" in draft.options:
            draft.defaults({f"critic.{name}": draft.options[f"actor.{name}"].value})
    draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": "batch"}, "verl whitens the advantages of GAE")


def take_kl(draft: Draft) -> None:
    in_loss, in_reward = bool(draft.get(f"{ACTOR}.use_kl_loss")), bool(draft.get("algorithm.use_kl_in_reward"))
    if in_loss:
        draft.keep(f"{ACTOR}.kl_loss_coef", "actor.kl_loss_coef")
        draft.defaults({"actor.kl_loss_coef": 0.001})
        _take_estimator(draft, f"{ACTOR}.kl_loss_type", "low_var_kl", "actor.kl_loss_estimator")
    coefficient = draft.get("algorithm.kl_ctrl.kl_coef", 0.001) if in_reward else 0.0
    why = "verl: algorithm.kl_ctrl.kl_coef" if in_reward else "verl: use_kl_in_reward is false"
    draft.set("actor.kl_ctl", coefficient, why, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
    if in_reward:
        _take_estimator(draft, "algorithm.kl_penalty", "kl", "actor.kl_estimator")
        draft.keep("algorithm.kl_ctrl.type", "actor.kl_control.type")
        if draft.get("algorithm.kl_ctrl.type") == "adaptive":
            draft.keep("algorithm.kl_ctrl.target_kl", "actor.kl_control.target")
            draft.keep("algorithm.kl_ctrl.horizon", "actor.kl_control.horizon")
            draft.defaults({"actor.kl_control.target": 0.1})
    if in_loss or in_reward:
        why = "verl: the reference is the initial policy"
        draft.set("ref.path", draft.get(f"{MODEL}.path"), why, f"{ACTOR}.use_kl_loss")
    off = [*([] if in_loss else [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_*"])]
    draft.drop("this KL term is off", *off, *([] if in_reward else ["algorithm.kl_*"]))
    draft.drop("of an adaptive coefficient", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")


def _take_estimator(draft: Draft, key: str, default: str, option: str) -> None:
    given = str(draft.get(key, default))
    plain = given.removesuffix("+") if option == "actor.kl_loss_estimator" else given
    if plain in KL_ESTIMATORS:
        draft.set(option, KL_ESTIMATORS[plain] + given[len(plain) :], f"verl: {key.rpartition('.')[2]}", key)
    draft.lack(f"give {option}; full needs actor.kl_top_k", key, off=())


def take_loss(draft: Draft) -> None:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = str(draft.get(key, "vanilla")).replace("-", "_")
    draft.set("actor.policy_loss", _LOSSES.get(mode, "ppo"), "verl: policy_loss.loss_mode")
    if mode in _LOSSES:
        draft.set("actor.policy_loss", _LOSSES[mode], "verl: policy_loss.loss_mode", key)
    draft.lack("choose actor.policy_loss (docs/algorithms.md)", key)
    for name, option in _OF_LOSSES.get(mode, {}).items():
        draft.keep(f"{ACTOR}.policy_loss.{name}", f"actor.{mode}.{option}")
    for name in ("tau_pos", "tau_neg"):
        for section in (ACTOR, f"{ACTOR}.policy_loss"):
            if mode == "sapo":
                draft.keep(f"{section}.{name}", f"actor.sapo.{name}")
            draft.drop("options of other policy losses", f"{section}.{name}")
    names = {name for options in _OF_LOSSES.values() for name in options}
    draft.drop("options of other policy losses", *(f"{ACTOR}.policy_loss.{name}" for name in sorted(names)))
    if mode not in _LOSSES:
        draft.lack("an option of a loss that does not exist here", f"{ACTOR}.policy_loss.*", off=(None,))
    draft.drop("options of other policy losses", f"{ACTOR}.policy_loss.*")
    if mode == "gspo":
        for option, value in (("advantage", "token"), ("gradient", "own"), ("max_log_ratio", 10.0)):
            draft.set(f"actor.sequence_level.{option}", value, "verl's form of GSPO")
    if mode == "dppo_kl":
        draft.set("actor.dppo.divergence", "kl", "verl: policy_loss.loss_mode", key)
    if mode in _MEAN_OF_SEQUENCES:
        why = f"verl averages {mode} over sequences"
        draft.set("actor.loss_aggregation", "seq-mean-token-mean", why, f"{ACTOR}.loss_agg_mode")
    if draft.options["actor.policy_loss"].value == "ppo":
        draft.defaults({"actor.c_clip": 3.0})
    elif draft.options.pop("actor.c_clip", None) is not None:
        draft.notes.pop(f"{ACTOR}.clip_ratio_c")
        draft.drop(f"{mode} has no bound of negative advantages", f"{ACTOR}.clip_ratio_c")
    if draft.get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        length = draft.whole(f"{ACTOR}.loss_scale_factor", draft.whole("data.max_response_length", 512))
        why = "verl: loss_scale_factor, else data.max_response_length"
        draft.set("actor.loss_scale_tokens", length, why, f"{ACTOR}.loss_scale_factor")
    draft.drop("only seq-mean-token-sum-norm reads it", f"{ACTOR}.loss_scale_factor")
