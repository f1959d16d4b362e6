"""Owns the options of the algorithms: PPO actor and critic, normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number
from areal.api.config.train import TrainEngineConfig


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
class PPOActorConfig(TrainEngineConfig):
    """The policy and how it learns."""

    group_size: int = number(1, low=1)
    """Kept for files written for AReaL: must be 1 or gconfig.n_samples, which decides."""
    weight_update_mode: str = choice("xccl", "xccl", "disk")
    """How new weights reach the servers: xccl = a collective (NCCL or gloo), disk = the shared folder."""
    weight_chunked_mem_mb: int = number(1024, low=1)
    """Largest bucket of one weight broadcast, in MiB."""
    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per train batch."""
    eps_clip: float = number(0.2, above=0)
    """PPO clip of the ratio below 1, and above too unless eps_clip_higher is given."""
    eps_clip_higher: float | None = number(None, above=0)
    """Clip of the ratio above 1; null = eps_clip."""
    c_clip: float | None = number(None, above=1)
    """Dual clip: bound on the loss of negative advantages as a multiple of |advantage|; null = off."""
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
    kl_ctl: float = number(0.1, low=0)
    """Weight of the per-token KL penalty to the reference in the reward; used only when `ref` is configured."""
    kl_estimator: str = choice("k1", "k1", "k2", "k3")
    """Which KL approximation."""
    recompute_logprob: bool = False
    """Use log-probabilities recomputed by the trainer as the old policy instead of the servers' (not decoupled)."""
    use_decoupled_loss: bool = False
    """Decoupled PPO: clip around the policy at the start of the update, weight by its ratio to the behaviour policy."""
    behav_imp_weight_cap: float | None = number(None, above=1)
    """Decoupled loss: tokens whose proximal/behaviour ratio is above this are left out; null = no cap."""

    def problems(self) -> Problems:
        yield from TrainEngineConfig.problems(self)
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            yield (
                "behav_imp_weight_cap",
                "has an effect only with use_decoupled_loss=true: set that or remove the cap",
            )


@dataclass(frozen=True, kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The value model; the backbone of `path` with a new one-output head when it has none."""

    ppo_n_minibatches: int = number(4, low=1)
    """Optimiser steps per train batch."""
    eps_clip: float = number(0.5, above=0)
    """Clip range of a value around its old value."""
