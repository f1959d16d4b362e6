"""Log-probabilities by Liger's fused linear cross-entropy. CUDA only; no entropies and no candidates."""

import re
from importlib import metadata

import torch
from torch import Tensor

from areal.api.batch import OutputSpec
from areal.api.errors import ConfigError

MIN_VERSION = (0, 8, 2)
"""Older versions multiply every token's gradient by that of the first token, without an error (Liger PR 1298)."""
NO_LABEL = -100  # no token has it: positions that are not valid are masked afterwards


def require_liger(device: torch.device, outputs: OutputSpec, tensor_ranks: int = 1) -> None:
    """Raise ConfigError unless logprob_kernel=liger can compute `outputs` on `device`."""
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        found = ""
    wanted = ".".join(map(str, MIN_VERSION))
    if outputs != OutputSpec():
        problem = "computes log-probabilities only, but entropy bonuses and full KL divergences need more"
    elif tensor_ranks > 1:
        problem = f"needs the whole vocabulary on each rank, but {tensor_ranks} tensor ranks split it"
    elif device.type != "cuda":
        problem = f"needs CUDA, but the device is {device.type}"
    elif not found:
        problem = f"needs the package liger-kernel: pip install 'liger-kernel>={wanted}'"
    elif tuple(map(int, re.findall(r"\d+", found)[:3])) < MIN_VERSION:
        problem = f"needs liger-kernel {wanted} or newer, but {found} is installed, which computes wrong gradients"
    else:
        return
    raise ConfigError(f"logprob_kernel=liger {problem}; or use logprob_kernel=torch", code="model.liger_unavailable")


def liger_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, valid: Tensor) -> Tensor:
    """Compute log_softmax(hidden @ weight.T + bias) at the labels: [T] float32 with gradients, 0 where not valid.

    hidden [T, h], weight [V, h], bias [V] or None, labels [T] int64, valid [T] bool. The gradients of weight and bias
    are summed in float32.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as liger  # pyright: ignore[reportMissingImports]

    # class weights, ignored label, z-loss, smoothing, reduction, soft cap, whether to return z-loss, type of the sums
    losses = liger.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, bias, None, NO_LABEL, 0.0, 0.0, "none", None, False, torch.float32
    )  # fmt: skip
    return torch.where(valid, -losses[0], 0.0)
