"""Owns the ratios between policies: log-ratios of tokens, safe to take exp of."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to +-this before exp: e^20 = 4.9e8 is far outside every clip range and safe in float32."""


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_base) of each token, cut to +-LOG_RATIO_LIMIT, 0 where the mask is off.

    All [T]; float32 or float64, mask bool. Whatever stands outside the mask (NaN and infinity too) reaches neither
    the value nor the gradient. Inside it NaN stays NaN and an infinite log-probability is cut like a large one.
    Errors: ValueError on unequal shapes.
    """
    require_same_shape(logprobs=logprobs, base_logprobs=base_logprobs, mask=mask)
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, base_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
