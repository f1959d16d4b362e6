"""Terms added to the policy-gradient loss: the entropy bonus and its coefficient, likelihood of good answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.api.config import AdaptiveEntropyConfig


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """-H of each trained token, to be weighed by the coefficient of the bonus (Williams and Peng 1991).

    entropy [T] with gradient, mask [T] bool -> [T], 0 where the mask is off. ValueError when the entropy carries no
    gradient although one is being recorded: the bonus would be a number without effect.
    """
    require_same_shape(entropy=entropy, mask=mask)
    if torch.is_grad_enabled() and entropy.numel() and not entropy.requires_grad:
        raise ValueError("the entropy bonus needs an entropy with gradient: build the engine with OutputSpec for it")
    return torch.where(mask, -entropy, 0.0)


def adapted_entropy_coef(coef: float, entropy: float, options: AdaptiveEntropyConfig) -> float:
    """The coefficient of the entropy bonus after a step with this mean entropy in nats (AEnt, arXiv 2509.03493).

    coef - coef_lr (min(0, H - entropy_low) + max(0, H - entropy_high)), cut to [coef_low, coef_high]: it rises while
    the entropy is below the band, falls while it is above, stays inside. NaN and infinities change nothing.
    """
    if not math.isfinite(entropy):
        return coef
    outside = min(0.0, entropy - options.entropy_low) + max(0.0, entropy - options.entropy_high)
    return min(max(coef - options.coef_lr * outside, options.coef_low), options.coef_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveNLL:
    """Negative log-likelihoods of the tokens of good answers."""

    losses: Tensor  # [T] with gradient, 0 elsewhere
    mask: Tensor  # [T] bool: trained tokens of answers with a positive reward


def positive_mask(rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Trained tokens of sequences whose reward is above 0. rewards [S], mask [T] bool, sequence_index [T] -> [T]."""
    require_same_shape(mask=mask, sequence_index=sequence_index)
    return mask & (rewards > 0)[sequence_index]


def positive_nll(logprobs: Tensor, rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> PositiveNLL:
    """-log pi of the trained tokens of answers with a reward above 0 (VAPO, arXiv 2504.05118, section 4.3).

    logprobs [T] with gradient, rewards [S], mask [T] bool, sequence_index [T] int64. Its denominator is the number of
    tokens in `PositiveNLL.mask` of the mini-batch on all ranks. Errors: ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, mask=mask)
    chosen = positive_mask(rewards, mask, sequence_index)
    return PositiveNLL(losses=torch.where(chosen, -logprobs, 0.0), mask=chosen)
