"""Owns Liger's fused linear cross-entropy as another source of log-probabilities: on CUDA, and nothing beside them."""

from __future__ import annotations

import re
from importlib import metadata

import torch
from torch import Tensor

from areal.api.batch import OutputSpec
from areal.api.errors import ConfigError

MIN_VERSION = (0, 8, 2)
"""Before this one every token's gradient was multiplied by that of the first token, without an error (its PR 1298)."""
NO_LABEL = -100  # of no token: what is not valid is left out afterwards


def require_liger(device: torch.device, outputs: OutputSpec) -> None:
    """ConfigError when logprob_kernel=liger cannot give what is wanted here."""
    if outputs != OutputSpec():
        raise ConfigError(
            "logprob_kernel=liger gives log-probabilities only, and entropy bonuses and full KL divergences need more: "
            "use logprob_kernel=torch"
        )
    if device.type != "cuda":
        raise ConfigError(f"logprob_kernel=liger needs CUDA, and this is {device.type}: use logprob_kernel=torch")
    wanted = ".".join(map(str, MIN_VERSION))
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"logprob_kernel=liger needs the package liger-kernel: pip install 'liger-kernel>={wanted}', "
            "or use logprob_kernel=torch"
        ) from error
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < MIN_VERSION:
        raise ConfigError(
            f"logprob_kernel=liger needs liger-kernel {wanted} or newer, this is {found}, which weighs every token's "
            "gradient by the first one's: upgrade it"
        )


def liger_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, valid: Tensor) -> Tensor:
    """log_softmax(hidden @ weight.T + bias) at the labels, [T] float32 with gradients; 0 where not valid.

    hidden [T, h], weight [V, h], bias [V] or None, labels [T] int64, valid [T] bool. The gradients of weight and bias
    are summed in float32.
    """
    from liger_kernel.ops import fused_linear_cross_entropy as liger  # pyright: ignore[reportMissingImports]

    # class weights, ignored label, z-loss, smoothing, reduction, soft cap, whether z-loss is wanted, type of the sums
    losses = liger.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, bias, None, NO_LABEL, 0.0, 0.0, "none", None, False, torch.float32
    )  # fmt: skip
    return torch.where(valid, -losses[0], 0.0)
