"""On-policy distillation: log-ratios of a teacher and the policy as advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape
from areal.algorithm.importance import log_ratio


def distilled_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, rl_weight: float, coef: float
) -> Tensor:
    """A' = rl_weight A + coef log(pi_teacher / pi) of each token, both policies without gradient.

    The score-function form of the reverse KL: over tokens drawn from pi the mean of -log(pi_teacher / pi) grad log pi
    is grad KL(pi || pi_teacher) (MiniLLM, arXiv 2306.08543, eq. 2, of one token at a time; GKD, arXiv 2306.13649). A
    token answers for its own divergence only, not for that of the tokens behind it.
    All [T], mask bool; log-ratios are cut to +-20; 0 where the mask is off. Errors: ValueError on unequal shapes.
    """
    require_same_shape(advantages=advantages, logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    gap = log_ratio(teacher_logprobs.detach(), logprobs.detach(), mask)
    return torch.where(mask, rl_weight * advantages + coef * gap, 0.0)
