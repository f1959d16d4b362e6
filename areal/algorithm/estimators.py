"""The advantage estimators by name: the baseline, normalisation and recursion of each."""

from dataclasses import dataclass
from typing import Literal

from areal.api.config import AdvantageOptions, NormConfig

Baseline = Literal["none", "greedy", "length_weighted", "best_of_group", "decoupled"]
TokenBaseline = Literal["none", "token", "trained_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRecipe:
    """From the shaped reward r of a sequence to the advantages of its tokens, in this order."""

    baseline: Baseline = "none"
    """Subtracted from r first: nothing, the reward of the prompt's greedy answer, or one of `baselines`."""
    reward_norm: NormConfig | None = None
    """Then r is centred and scaled."""
    rescale_valid: bool = False
    """Then r is multiplied by `valid_sample_scale` (GPG)."""
    gae_lambda: float = 1.0
    """Then GAE runs over the token rewards; 1 without a critic = the discounted sum of the rewards that follow."""
    token_baseline: TokenBaseline = "none"
    """Then `optimal_token_baseline` is subtracted, with positions by token or by trained token."""
    adv_norm: NormConfig | None = None
    """Last, the advantages of the tokens are centred and scaled."""
    is_custom: bool = False
    """All of the above is replaced by `custom_advantages`."""


_GROUP_MEAN = NormConfig(mean_level="group", std_level=None)
_WHITENED = NormConfig(mean_level="batch", std_level="batch")
_RECIPES = {
    "reinforce": AdvantageRecipe(),
    "reinforce_plus_plus": AdvantageRecipe(adv_norm=_WHITENED),
    "reinforce_plus_plus_baseline": AdvantageRecipe(reward_norm=_GROUP_MEAN, adv_norm=_WHITENED),
    "grpo": AdvantageRecipe(reward_norm=NormConfig(mean_level="group", std_level="group")),
    "dr_grpo": AdvantageRecipe(reward_norm=_GROUP_MEAN),
    "rloo": AdvantageRecipe(reward_norm=NormConfig(mean_level="group", mean_leave1out=True, std_level=None)),
    "lite_ppo": AdvantageRecipe(reward_norm=NormConfig(mean_level="group", std_level="batch")),
    "gpg": AdvantageRecipe(reward_norm=_GROUP_MEAN, rescale_valid=True),
    "opo": AdvantageRecipe(baseline="length_weighted"),
    "gdpo": AdvantageRecipe(baseline="decoupled", adv_norm=_WHITENED),
    "grpo_passk": AdvantageRecipe(baseline="best_of_group"),
    "otb": AdvantageRecipe(token_baseline="token"),
    "otb_tir": AdvantageRecipe(token_baseline="trained_token"),
    "remax": AdvantageRecipe(baseline="greedy"),
    "custom": AdvantageRecipe(is_custom=True),
}


def recipe_of(options: AdvantageOptions) -> AdvantageRecipe:
    """The recipe of `options.adv_estimator`; "gae" is composed of reward_norm, gae_lambda and adv_norm."""
    if options.adv_estimator == "gae":
        return AdvantageRecipe(
            reward_norm=options.reward_norm, gae_lambda=options.gae_lambda, adv_norm=options.adv_norm
        )
    return _RECIPES[options.adv_estimator]
