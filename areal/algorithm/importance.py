"""Log-ratios between two policies, and the estimates of their KL divergence that sampled tokens give."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp: e^20 = 4.9e8 is far outside every clip range and safe in float32."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_base) of each token, clamped to +-LOG_RATIO_LIMIT, 0 where the mask is off.

    All [T]; float32 or float64, mask bool. Masked positions (NaN and infinity too) affect neither value nor gradient.
    Elsewhere NaN stays NaN, and an infinite log-probability is clamped.
    Raises ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, base_logprobs=base_logprobs, mask=mask)
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_of_samples(d: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(p || q) at tokens sampled from p, from d = log q - log p (Schulman 2020, "Approximating KL").

    k1 = -d (unbiased, of either sign);  k2 = d^2 / 2 (biased, low variance);
    k3 = exp(d) - 1 - d (unbiased, never negative);  abs = |d|.
    Raises ValueError for any other name.
    """
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return torch.expm1(d) - d
        case "abs":
            return d.abs()
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2, k3 or abs")
