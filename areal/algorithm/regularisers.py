"""Terms added to the policy-gradient loss: the entropy bonus and its coefficient, likelihood of good answers."""

import math

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.api.config import AdaptiveEntropyConfig
from areal.api.errors import StageError


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """-H of each trained token, without the coefficient of the bonus (Williams and Peng 1991).

    entropy [T] with gradient, mask [T] bool -> [T], 0 where the mask is off. StageError when gradients are recorded and
    the entropy has none: the bonus would have no effect.
    """
    require_same_shape(entropy=entropy, mask=mask)
    if torch.is_grad_enabled() and entropy.numel() and not entropy.requires_grad:
        raise StageError("entropy with gradient")
    return torch.where(mask, -entropy, 0.0)


def adapted_entropy_coef(coef: float, entropy: float, options: AdaptiveEntropyConfig) -> float:
    """The coefficient of the entropy bonus after a step with this mean entropy in nats (AEnt, arXiv 2509.03493).

    coef - coef_lr (min(0, H - entropy_low) + max(0, H - entropy_high)), clamped to [coef_low, coef_high]. A NaN or an
    infinite entropy changes nothing.
    """
    if not math.isfinite(entropy):
        return coef
    outside = min(0.0, entropy - options.entropy_low) + max(0.0, entropy - options.entropy_high)
    return min(max(coef - options.coef_lr * outside, options.coef_low), options.coef_high)


def positive_mask(rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Trained tokens of sequences whose reward is above 0. rewards [S], mask [T] bool, sequence_index [T] -> [T]."""
    require_same_shape(mask=mask, sequence_index=sequence_index)
    return mask & (rewards > 0)[sequence_index]


def positive_nll(logprobs: Tensor, good: Tensor) -> Tensor:
    """-log pi of the tokens `good` (`positive_mask`), 0 elsewhere; both [T] (VAPO, arXiv 2504.05118, section 4.3).

    Its denominator is the number of good tokens of the mini-batch on all ranks. Raises ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, good=good)
    return torch.where(good, -logprobs, 0.0)
