"""The output head without rounding of the logits, as trainers and native servers compute it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unrounded_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [t, h] @ weight.T [h, v] + bias [v] as float32, or float64 for float64 inputs: [t, v].

    The products are those of the inputs' dtype, the sums are not rounded to it: bfloat16 rounds a logit of 20 by up to
    0.06. CUDA has a kernel for this; elsewhere the inputs are converted.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == exact or hidden.device.type != "cuda":
        return F.linear(hidden.to(exact), weight.to(exact), None if bias is None else bias.to(exact))
    logits = torch.mm(hidden, weight.T, out_dtype=exact)
    return logits if bias is None else logits.add_(bias)


def has_float32_head(option: str, device: torch.device, dtype: torch.dtype) -> bool:
    """What `head_dtype` means: auto = float32 on CUDA, where it costs almost nothing."""
    return dtype != torch.float32 and (option == "float32" or (option == "auto" and device.type == "cuda"))
