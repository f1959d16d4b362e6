"""Owns the options of rewards and advantages: shaping, baselines, normalisation, GAE."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number, option
from areal.api.config.inference import GenerationHyperparameters
from areal.api.config.relevance import when


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """How a quantity is centred and scaled."""

    mean_level: str | None = choice("batch", "batch", "group")
    """Scope of the mean that is subtracted; null = no centring."""
    mean_leave1out: bool = False
    """Leave an element out of its own mean (RLOO baseline)."""
    std_level: str | None = choice("batch", "batch", "group")
    """Scope of the standard deviation that divides; null = no scaling."""
    std_unbiased: bool = True
    """Divide squared deviations by n-1 instead of n."""
    std_about: str | None = choice(None, "own", "subtracted")
    """Squares are about: own = the mean of std_level, subtracted = that of mean_level; null = by group_size."""
    eps: float = number(1e-5, low=0)
    """Added to the standard deviation."""
    group_size: int = number(1, low=1)
    """1 or gconfig.n_samples, for files of AReaL: above 1, std_about null = subtracted (AReaL), else own."""

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
    "grpo_passk",
    "otb",
    "otb_tir",
    "remax",
)
"""`areal.algorithm.estimators` says what each stands for."""
_WITH_WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
_WITHOUT_GROUPS = ("gae", "reinforce", "reinforce_plus_plus", "remax")


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From the reward of a sequence to the advantage of a token."""

    adv_estimator: str = choice("gae", *ADV_ESTIMATORS)
    """Advantages by name; gae = composed of the critic, reward_norm, gae_lambda and adv_norm, the others set these."""
    overlong_reward_penalty: bool = False
    """Take from the reward of answers that come near gconfig.max_new_tokens (DAPO)."""
    overlong_tokens: int | None = number(None, low=1)
    """Trained tokens before gconfig.max_new_tokens over which the penalty grows from 0 to its full size."""
    overlong_penalty_factor: float | None = number(None, above=0)
    """The full penalty, as a reward before bias and scale."""
    passk_std: bool = option(False, relevant=when("adv_estimator", "grpo_passk"), also="verl norm_adv_by_std_in_grpo")
    """grpo_passk: divide the lead of the best answer by the std of its group (verl's default)."""
    reward_norm: NormConfig | None = None
    """Normalisation of sequence rewards, after bias, scale and clip; null = none."""
    reward_scaling: float = number(1.0)
    """Rewards are multiplied by this after the bias."""
    reward_bias: float = number(0.0)
    """Added to every reward first."""
    reward_clip: float = number(20.0, above=0)
    """Scaled rewards are cut to [-this, this]."""
    mask_no_eos_with_zero: bool = False
    """Answers cut by a length limit get no task reward."""
    discount: float = number(1.0, low=0, high=1)
    """Discount per token of generalised advantage estimation."""
    gae_lambda: float = number(1.0, low=0, high=1)
    """Lambda of generalised advantage estimation."""
    gae_length_alpha: float | None = number(None, above=0)
    """Lambda of an answer of n tokens is 1 - 1 / (this n), at least 0, in place of gae_lambda (VAPO); null = off."""
    adv_norm: NormConfig | None = None
    """Normalisation of token advantages; null = none."""

    def advantage_problems(self) -> Problems:
        """What is wrong with these options together."""
        if self.adv_estimator != "gae":
            fixed = {
                "reward_norm": self.reward_norm is not None,
                "adv_norm": self.adv_norm is not None,
                "gae_lambda": self.gae_lambda != 1.0,
                "gae_length_alpha": self.gae_length_alpha is not None,
            }
            yield from (
                (name, f"is set by adv_estimator={self.adv_estimator}: remove it, or compose with adv_estimator=gae")
                for name, is_given in fixed.items()
                if is_given
            )
        if self.gae_length_alpha is not None and self.gae_lambda != 1.0:
            yield "gae_lambda", "has no effect with gae_length_alpha, which takes its place: remove one of them"
        for name, value in (
            ("overlong_tokens", self.overlong_tokens),
            ("overlong_penalty_factor", self.overlong_penalty_factor),
        ):
            if self.overlong_reward_penalty and value is None:
                yield name, "is needed with overlong_reward_penalty=true: give it"
            elif not self.overlong_reward_penalty and value is not None:
                yield name, "has an effect only with overlong_reward_penalty=true: set that or remove it"

    @property
    def has_token_baseline(self) -> bool:
        """Whether the baseline needs the score norms of tokens from a forward pass before the update."""
        return self.adv_estimator in ("otb", "otb_tir")

    @property
    def scales_advantages(self) -> bool:
        """Whether an answer's reward changes the advantages of others as they are normalised."""
        return self.adv_norm is not None or self.adv_estimator in _WITH_WHITENING

    @property
    def compares_groups(self) -> bool:
        """Whether an answer's advantage depends on the other answers of its group."""
        norm = self.reward_norm
        in_norm = norm is not None and "group" in (norm.mean_level, norm.std_level)
        return in_norm or self.adv_estimator not in _WITHOUT_GROUPS


def baseline_problems(options: AdvantageOptions, sampling: GenerationHyperparameters, *, has_critic: bool) -> Problems:
    """Penalties and baselines that the sampling leaves without sense; paths below the actor."""
    if (options.overlong_tokens or 0) > sampling.max_new_tokens:
        yield (
            "overlong_tokens",
            f"{options.overlong_tokens} is more than an answer can have (gconfig.max_new_tokens="
            f"{sampling.max_new_tokens}), so that every answer would be punished: lower it",
        )
    if sampling.n_samples > 1:
        return
    one = "compares the answers of a group, but gconfig.n_samples=1 makes groups of one: raise gconfig.n_samples"
    if options.compares_groups:
        yield ("adv_estimator" if options.reward_norm is None else "reward_norm"), one
    elif options.adv_norm is not None and options.adv_norm.mean_level == "group" and not has_critic:
        yield "adv_norm", f"{one}, or give a critic"  # all tokens of an answer share one number: 0 would be left of it
