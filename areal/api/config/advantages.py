"""Owns the options of rewards and advantages: shaping, baselines, normalisation, GAE."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number


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
    eps: float = number(1e-5, low=0)
    """Added to the standard deviation."""
    group_size: int = number(1, low=1)
    """Kept for files written for AReaL; groups are told apart by id, and this must be 1 or gconfig.n_samples."""

    def problems(self) -> Problems:
        if self.mean_leave1out and self.mean_level is None:
            yield "mean_leave1out", "has no mean to leave an element out of: set mean_level or remove it"


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From the reward of a sequence to the advantage of a token."""

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
    adv_norm: NormConfig | None = None
    """Normalisation of token advantages; null = none."""

    def advantage_problems(self) -> Problems:
        """What is wrong with these options together."""
        yield from ()
