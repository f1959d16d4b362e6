"""Options of the divergence from the reference policy, in the reward and in the loss."""

from dataclasses import dataclass

from areal.api.config.advantages import REWARDS
from areal.api.config.fields import Problem, Problems, choice, number, section
from areal.api.config.relevance import above, given, unless, when

_ADAPTIVE = when("type", "adaptive")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """How the coefficient of the KL penalty in the reward changes during training."""

    type: str = choice("fixed", "fixed", "adaptive", also="verl: algorithm.kl_ctrl.type")
    """fixed = always actor.kl_ctl; adaptive = start at actor.kl_ctl and adjust after each batch towards `target`."""
    target: float | None = number(None, above=0, relevant=_ADAPTIVE, also="verl: algorithm.kl_ctrl.target_kl")
    """Target divergence in nats, as `measure` defines it; null = not set, which adaptive does not accept."""
    horizon: float = number(10000.0, above=0, relevant=_ADAPTIVE, also="verl: algorithm.kl_ctrl.horizon")
    """Sequences over which a divergence 20% or more off the target changes the coefficient by 20%."""
    measure: str = choice("token-mean", "token-mean", "sequence-sum", relevant=_ADAPTIVE)
    """Divergence of an answer: mean over its tokens (verl) or their sum (Ziegler et al. 2019)."""


_IN_REWARD = given("/ref") & above("kl_ctl", 0) & REWARDS
_IN_LOSS = given("/ref") & above("kl_loss_coef", 0)


@dataclass(frozen=True, kw_only=True)
class KLOptions:
    """Penalties on the divergence from the reference."""

    kl_ctl: float = number(
        0.1,
        low=0,
        relevant=when("kl_ctl", 0) | (given("/ref") & REWARDS),
        also="verl: algorithm.kl_ctrl.kl_coef; ROLL: init_kl_coef",
    )
    """Coefficient of the per-token KL penalty in the reward; 0 = no penalty."""
    kl_estimator: str = choice(
        "k1", "k1", "k2", "k3", "abs", "full", relevant=_IN_REWARD, also="verl: algorithm.kl_penalty"
    )
    """KL estimator of the reward penalty; full = KL of the distributions over kl_top_k tokens."""
    kl_control: KLControlConfig = section(KLControlConfig, relevant=given("/ref") & REWARDS)
    """Whether kl_ctl is fixed or adaptive."""
    kl_loss_coef: float = number(0.0, low=0, also="verl: actor_rollout_ref.actor.kl_loss_coef; ROLL: kl_loss_coef")
    """Coefficient of the KL to the reference as a term of the policy loss; 0 = no term."""
    kl_loss_estimator: str = choice(
        "k3",
        *("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "full"),
        relevant=_IN_LOSS,
        also="verl: actor_rollout_ref.actor.kl_loss_type",
    )
    """KL estimator of the loss term; + = its value with the gradient of k2, full = KL over kl_top_k tokens."""
    kl_loss_correction: str = choice(
        "none", "none", "old", "rollout", relevant=_IN_LOSS & unless("kl_loss_estimator", "full")
    )
    """Importance ratio that multiplies the KL loss: policy / old policy, policy / rollout policy, or none."""
    kl_top_k: int | None = number(
        None,
        low=0,
        relevant=(_IN_REWARD & when("kl_estimator", "full")) | (_IN_LOSS & when("kl_loss_estimator", "full")),
    )
    """Most likely tokens that a full KL compares, the rest as one; 0 = all V tokens, [tokens, V] floats per rank."""

    def kl_problems(self) -> Problems:
        """Combinations of these options that cannot work."""
        if self.kl_control.type == "adaptive":
            if self.kl_control.target is None:
                text = "is null, but kl_control.type=adaptive needs a target divergence, for example 0.1"
                yield Problem("kl_control.target", text, "config.missing_requirement")
            if self.kl_ctl == 0:
                yield "kl_ctl", "is 0, and kl_control.type=adaptive only multiplies it: use a value above 0"
        estimator = self.kl_loss_estimator
        if self.kl_loss_coef > 0 and self.kl_loss_correction != "none" and estimator.endswith("+"):
            text = f"cannot be combined with the replaced gradient of kl_loss_estimator={estimator}: use "
            yield "kl_loss_correction", f"{text}{estimator.removesuffix('+')}, or remove it"
        if self.wants_distributions and self.kl_top_k is None:
            text = "is null, but a full KL needs it: set a number of tokens, for example 64, or 0 for the vocabulary"
            yield Problem("kl_top_k", text, "config.missing_requirement")

    @property
    def wants_distributions(self) -> bool:
        """Whether a divergence of whole distributions is used, which needs more than log-probabilities of tokens."""
        in_reward = self.kl_ctl > 0 and self.kl_estimator == "full"
        return in_reward or (self.kl_loss_coef > 0 and self.kl_loss_estimator == "full")
