"""The output head without rounding of the logits, as trainers and native servers compute it."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


# ----------------------------------------------------------------------------------------------------------------------
# The routers of a transformers model with experts.

_LAYER = re.compile(r"\.(\d+)\.")


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Number of the layer -> its router. A router returns (logits [T, E], weights [T, k], chosen experts [T, k])."""
    routers: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        gate = children.get("gate", children.get("router"))
        layer = _LAYER.search(f".{path}.")
        if "experts" in children and gate is not None and layer is not None:
            routers[int(layer[1])] = gate
    return routers
