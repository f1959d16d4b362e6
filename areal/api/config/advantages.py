"""Options of rewards and advantages: shaping, baselines, normalisation, GAE."""

from dataclasses import dataclass

from areal.api.config.custom import CustomFunctionOptions
from areal.api.config.fields import Problem, Problems, choice, number, option, section
from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.relevance import Condition, given, satisfies, unless, when
from areal.api.functions import ADVANTAGE_CALL


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """How a quantity is centred and scaled."""

    mean_level: str | None = choice("batch", "batch", "group")
    """Scope of the mean that is subtracted; null = no mean is subtracted."""
    mean_leave1out: bool = False
    """Exclude an element from its own mean (RLOO baseline)."""
    std_level: str | None = choice("batch", "batch", "group")
    """Scope of the standard deviation that divides; null = no division."""
    std_unbiased: bool = option(True, relevant=given("std_level"))
    """Divide the sum of squared deviations by n - 1; false = by n."""
    std_about: str | None = choice(None, "own", "subtracted", relevant=given("std_level"))
    """Centre of the deviations: own = mean of std_level, subtracted = mean of mean_level; null = by group_size."""
    eps: float = number(1e-5, low=0, relevant=given("std_level"))
    """Added to the standard deviation."""
    group_size: int = number(1, low=1)
    """For AReaL files: 1 or gconfig.n_samples; above 1, std_about=null means subtracted (as in AReaL), else own."""

    @property
    def is_of_areal(self) -> bool:
        """Whether the section was written for AReaL, the only system that needs a group_size here."""
        return self.group_size > 1

    def problems(self) -> Problems:
        if self.mean_leave1out and self.mean_level is None:
            yield "mean_leave1out", "has no mean to leave an element out of: set mean_level or remove it"


ADV_ESTIMATORS = (
    "gae",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "grpo",
    "dr_grpo",
    "rloo",
    "lite_ppo",
    "gpg",
    "opo",
    "gdpo",
    "grpo_passk",
    "otb",
    "otb_tir",
    "remax",
    "custom",
)
"""`areal.algorithm.estimators` defines each."""
_WITH_WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "custom")
_WITHOUT_GROUPS = ("gae", "reinforce", "reinforce_plus_plus", "remax", "custom")
"""A custom estimator may do either, so nothing is refused because of it."""

REWARDS = Condition("/teacher.rl_weight", lambda weight: weight != 0, "is not 0 (or teacher is null)")
"""The advantages from rewards are used."""
_COMPOSED = REWARDS & when("adv_estimator", "gae")
_SUMMED = REWARDS & unless("adv_estimator", "gdpo")
_OVERLONG = REWARDS & when("overlong_reward_penalty", True)
_TRUNCATED_COUNT = (
    when("mask_truncated", False)
    | given("/critic")
    | satisfies(".", lambda options: options.scales_advantages, "advantages are normalised")
)


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From the reward of a sequence to the advantage of a token."""

    adv_estimator: str = choice(
        "gae", *ADV_ESTIMATORS, relevant=REWARDS, also="verl: algorithm.adv_estimator; ROLL: adv_estimator"
    )
    """Advantage estimator; gae = composed from critic, reward_norm, gae_lambda and adv_norm, the others fix these."""
    overlong_reward_penalty: bool = option(False, relevant=REWARDS, also="verl: reward_model.overlong_buffer.enable")
    """Subtract a penalty from the reward of answers whose length is close to gconfig.max_new_tokens (DAPO)."""
    overlong_tokens: int | None = number(None, low=1, relevant=_OVERLONG, also="verl: reward_model.overlong_buffer.len")
    """Tokens before gconfig.max_new_tokens over which the penalty grows from 0 to overlong_penalty_factor."""
    overlong_penalty_factor: float | None = number(
        None, above=0, relevant=_OVERLONG, also="verl: reward_model.overlong_buffer.penalty_factor"
    )
    """Largest overlong penalty, in reward units before reward_bias and reward_scaling."""
    gdpo_weights: dict[str, float] = section(
        dict[str, float],
        relevant=REWARDS & when("adv_estimator", "gdpo"),
        also="verl: algorithm.gdpo_reward_keys, gdpo_reward_weights",
    )
    """Weights of the normalised scores by the function's name in metrics; others count 0; {} = all count 1."""
    custom_advantage: CustomFunctionOptions = section(
        CustomFunctionOptions, relevant=REWARDS & when("adv_estimator", "custom")
    )
    """The estimator of adv_estimator=custom, called as estimator(answers, options)."""
    passk_std: bool = option(
        False, relevant=REWARDS & when("adv_estimator", "grpo_passk"), also="verl: algorithm.norm_adv_by_std_in_grpo"
    )
    """Divide the advantage of the best answer by the standard deviation of its group (verl's default)."""
    reward_norm: NormConfig | None = option(None, relevant=_COMPOSED)
    """Normalisation of sequence rewards after bias, scaling and clipping; null = none."""
    reward_scaling: float = number(1.0, relevant=_SUMMED)
    """Factor of every reward, applied after reward_bias."""
    reward_bias: float = number(0.0, relevant=_SUMMED)
    """Added to every reward before reward_scaling."""
    reward_clip: float = number(20.0, above=0, relevant=_SUMMED)
    """Scaled rewards are clipped to [-reward_clip, reward_clip]."""
    mask_no_eos_with_zero: bool = option(False, relevant=REWARDS & _TRUNCATED_COUNT)
    """Give answers that were cut by a length limit no task reward."""
    discount: float = number(1.0, low=0, high=1, relevant=REWARDS, also="verl: algorithm.gamma")
    """Discount factor per token (gamma of generalised advantage estimation)."""
    gae_lambda: float = number(
        1.0, low=0, high=1, relevant=_COMPOSED & when("gae_length_alpha", None), also="verl: algorithm.lam"
    )
    """Lambda of generalised advantage estimation."""
    gae_length_alpha: float | None = number(None, above=0, relevant=_COMPOSED)
    """Length-adaptive lambda max(0, 1 - 1 / (gae_length_alpha n)) for an answer of n tokens (VAPO); null = off."""
    adv_norm: NormConfig | None = option(None, relevant=_COMPOSED)
    """Normalisation of token advantages; null = none."""

    def advantage_problems(self) -> Problems:
        """Requirements of these options that are not met."""
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            if self.overlong_reward_penalty and vars(self)[name] is None:
                yield Problem(name, "is required by overlong_reward_penalty=true: set it", "config.missing_requirement")
        if self.adv_estimator == "gdpo" and self.overlong_reward_penalty:
            text = "cannot be combined with adv_estimator=gdpo: write the penalty as a reward function"
            yield "overlong_reward_penalty", text
        if self.adv_estimator == "custom":
            yield from self.custom_advantage.problems_as("custom_advantage", "adv_estimator=custom", ADVANTAGE_CALL)

    @property
    def has_token_baseline(self) -> bool:
        """Whether the baseline needs the score norms of tokens from a forward pass before the update."""
        return self.adv_estimator in ("otb", "otb_tir")

    @property
    def scales_advantages(self) -> bool:
        """Whether the reward of one answer changes the advantages of other answers through their normalisation."""
        return self.adv_norm is not None or self.adv_estimator in _WITH_WHITENING

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage of an answer depends on the other answers of its group."""
        if self.adv_estimator != "gae":
            return self.adv_estimator not in _WITHOUT_GROUPS
        return self.reward_norm is not None and "group" in (self.reward_norm.mean_level, self.reward_norm.std_level)


def baseline_problems(options: AdvantageOptions, sampling: GenerationHyperparameters, *, has_critic: bool) -> Problems:
    """Penalties and baselines that are wrong with the sampling options; paths below the actor."""
    if options.overlong_reward_penalty and (options.overlong_tokens or 0) > sampling.max_new_tokens:
        text = f"{options.overlong_tokens} is above gconfig.max_new_tokens={sampling.max_new_tokens}: lower it"
        yield "overlong_tokens", text
    if sampling.n_samples > 1:
        return
    one = "compares the answers of a group, but gconfig.n_samples=1 makes groups of one: raise gconfig.n_samples"
    if options.compares_groups:
        yield ("adv_estimator" if options.adv_estimator != "gae" else "reward_norm"), one
    norm = None if options.adv_estimator != "gae" or has_critic else options.adv_norm
    if norm is not None and norm.mean_level == "group":
        yield "adv_norm", f"{one}, or give a critic"  # all tokens of an answer have one advantage: the result is 0
