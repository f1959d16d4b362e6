"""The policy losses and the advantage estimators: their options, and what the checks before a start know of them."""

from dataclasses import dataclass, replace
from typing import Any

from areal.api.config.algorithm import OWN_FUNCTION, AdvantageRecipe, GdpoOptions, NormConfig
from areal.api.config.policy_losses import CustomFunctionOptions, LossFacts
from areal.api.config.schema import Named, Problems, choice, number, option
from areal.api.registry import ADVANTAGE_CALL, LOSS_CALL, register

# ----------------------------------------------------------------------------------------------------------------------
# Policy losses: loss(tokens, options) -> PolicyLoss. The options of its own are options.policy_loss.


@dataclass(frozen=True, kw_only=True)
class SapoOptions(Named):
    """SAPO: a soft gate replaces the clip."""

    tau_pos: float = number(1.0, above=0)
    """Temperature of the gate for positive advantages; a higher value closes the gate faster."""
    tau_neg: float = number(1.05, above=0)
    """Temperature of the gate for zero and negative advantages."""


@dataclass(frozen=True, kw_only=True)
class CispoOptions(Named):
    """CISPO: a clipped importance weight of the log-probability."""

    unified_mask: bool = False
    """Also exclude tokens whose ratio is outside the clip range in the direction of the advantage, as PPO does."""


@dataclass(frozen=True, kw_only=True)
class AipoOptions(Named):
    """AIPO: one-sided truncation of the ratio."""

    rho: float = number(2.0, above=0, also="cosmos-rl: aipo_rho")
    """Maximum ratio (LlamaRL suggests 2 to 10)."""
    truncation: str = choice("weight", "weight", "objective")
    """weight = constant weight min(ratio, rho) of A log pi (LlamaRL); objective = -A min(ratio, rho) (cosmos-rl)."""


@dataclass(frozen=True, kw_only=True)
class ClipCovOptions(Named):
    """Clip-Cov: tokens of high covariance get no gradient; they are drawn once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Fraction of the batch's trained tokens to exclude, at least one token."""
    low: float = number(1.0)
    """Minimum covariance of excluded tokens."""
    high: float = number(5.0)
    """Maximum covariance of excluded tokens."""

    def problems(self) -> Problems:
        if self.low >= self.high:
            yield "low", f"{self.low:g} is not below high={self.high:g}, so no token is excluded: lower it"


@dataclass(frozen=True, kw_only=True)
class KlCovOptions(Named):
    """KL-Cov: tokens of high covariance get a KL penalty; they are chosen once per batch."""

    ratio: float = number(0.0002, above=0, high=1)
    """Fraction of the batch's trained tokens to penalise, those of highest covariance, at least one token."""
    coef: float = number(1.0, above=0)
    """Coefficient of |log pi - log pi_old| at the chosen tokens."""


@dataclass(frozen=True, kw_only=True)
class ToprOptions(Named):
    """TOPR: REINFORCE with truncated weights of negative answers."""

    ratio: str = choice("trajectory", "trajectory", "token")
    """Weight of a negative token, at most 1: trajectory = product of the ratios (paper), token = its own (ROLL)."""
    positive_weight: float = number(1.0, low=0)
    """Factor of the loss of tokens with an advantage of at least 0."""
    negative_weight: float = number(1.0, low=0)
    """Factor of the loss of tokens with a negative advantage."""


@dataclass(frozen=True, kw_only=True)
class Kimi15Options(Named):
    """Kimi k1.5: policy gradient with a squared log-ratio as penalty."""

    tau: float = number(0.1, above=0)
    """Coefficient of the penalty tau / 2 x squared log-ratio."""
    ratio: str = choice("trajectory", "trajectory", "token")
    """Squared log-ratio: trajectory = sum over the sequence (paper), token = each token (ROLL)."""


@dataclass(frozen=True, kw_only=True)
class DppoOptions(Named):
    """DPPO: a bound on the divergence of the binary distribution (this token or any other) replaces the ratio clip."""

    divergence: str = choice("tv", "tv", "kl")
    """Divergence limited by eps_clip and eps_clip_higher: tv = difference of probabilities, kl = KL(old, new), nats."""
    max_ratio: float = number(20.0, low=1)
    """Maximum ratio that weights the log-probability."""


@dataclass(frozen=True, kw_only=True)
class CustomLossOptions(CustomFunctionOptions):
    """A loss of the user, called as loss(tokens, options)."""

    def problems(self) -> Problems:
        yield from self.problems_of_call(LOSS_CALL)


def _always(_: Any) -> bool:
    return True


def _of_trajectory(loss_options: Any) -> bool:
    return loss_options.ratio == "trajectory"


def _loss(name: str, place: str, options: type[Named] | None = None, *, facts: LossFacts | None = None) -> None:
    register("losses", name, f"areal.algorithm.losses.{place}", options=options, facts=facts)


_CLIPPED = LossFacts(clips=True, dual_clips=True, takes_sequence_ratio=True, splits_gradient=_always)
_loss("ppo", "ppo:loss", facts=_CLIPPED)
_loss("gspo", "ppo:gspo_loss", facts=replace(_CLIPPED, is_of_sequence=True))
_loss("sapo", "sapo:loss", SapoOptions, facts=LossFacts(takes_sequence_ratio=True, splits_gradient=_always))
_loss("cispo", "policy_gradient:cispo_loss", CispoOptions, facts=LossFacts(clips=True, takes_sequence_ratio=True))
_loss(
    "aipo",
    "policy_gradient:aipo_loss",
    AipoOptions,
    facts=LossFacts(takes_sequence_ratio=True, splits_gradient=lambda aipo: aipo.truncation == "objective"),
)
_loss("gpg", "policy_gradient:gpg_loss", facts=LossFacts(has_no_ratio=True))
_loss("gmpo", "gmpo:loss", facts=LossFacts(clips=True, is_of_sequence=True))
_loss("clip_cov", "ppo:clip_cov_loss", ClipCovOptions, facts=LossFacts(clips=True, chooses_tokens=True))
_loss("kl_cov", "ppo:kl_cov_loss", KlCovOptions, facts=LossFacts(chooses_tokens=True))
_loss("topr", "policy_gradient:topr_loss", ToprOptions, facts=LossFacts(sums_over_answer=_of_trajectory))
_loss("kimi15", "policy_gradient:kimi15_loss", Kimi15Options, facts=LossFacts(sums_over_answer=_of_trajectory))
_loss("dppo", "policy_gradient:dppo_loss", DppoOptions, facts=LossFacts(clips=True))
_loss("custom", "custom:loss", CustomLossOptions, facts=replace(_CLIPPED, has_no_ratio=True))

# ----------------------------------------------------------------------------------------------------------------------
# Advantage estimators: a recipe, or estimator(answers, options) -> advantages. Own options are options.adv_estimator.


@dataclass(frozen=True, kw_only=True)
class PasskOptions(Named):
    """pass@k: only the best answer of a group has an advantage."""

    std: bool = option(False, also="verl: algorithm.norm_adv_by_std_in_grpo")
    """Divide the advantage of the best answer by the standard deviation of its group (verl's default)."""


@dataclass(frozen=True, kw_only=True)
class CustomAdvantageOptions(CustomFunctionOptions):
    """An estimator of the user, called as estimator(answers, options)."""

    def problems(self) -> Problems:
        yield from self.problems_of_call(ADVANTAGE_CALL)


def _estimator(name: str, options: type[Named] | None = None, **parts: Any) -> None:
    facts = AdvantageRecipe(**parts)
    register("estimators", name, "areal.api.config.algorithm:AdvantageRecipe", options=options, facts=facts)


_GROUP_MEAN = NormConfig(mean_level="group", std_level=None)
_GROUP = NormConfig(mean_level="group", std_level="group")
_WHITENED = NormConfig(mean_level="batch", std_level="batch")
_estimator("gae", is_composed=True, takes_critic=True)
_estimator("reinforce")
_estimator("reinforce_plus_plus", adv_norm=_WHITENED)
_estimator("reinforce_plus_plus_baseline", reward_norm=_GROUP_MEAN, adv_norm=_WHITENED, compares_groups=True)
_estimator("grpo", reward_norm=_GROUP, compares_groups=True)
_estimator("dr_grpo", reward_norm=_GROUP_MEAN, compares_groups=True)
_estimator(
    "rloo", reward_norm=NormConfig(mean_level="group", mean_leave1out=True, std_level=None), compares_groups=True
)
_estimator("lite_ppo", reward_norm=NormConfig(mean_level="group", std_level="batch"), compares_groups=True)
_estimator("gpg", reward_norm=_GROUP_MEAN, rescale_valid=True, compares_groups=True)
_estimator("opo", baseline="length_weighted", compares_groups=True)
_estimator("gdpo", GdpoOptions, baseline="decoupled", adv_norm=_WHITENED, compares_groups=True)
_estimator("grpo_passk", PasskOptions, baseline="best_of_group", compares_groups=True)
_estimator("otb", token_baseline="token", compares_groups=True)
_estimator("otb_tir", token_baseline="trained_token", compares_groups=True)
_estimator("remax", baseline="greedy")
register(
    "estimators",
    "custom",
    "areal.algorithm.advantage:custom_advantages",
    options=CustomAdvantageOptions,
    facts=OWN_FUNCTION,
)
