"""Pinned memory on a machine without an accelerator: a request for it returns ordinary memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MAKERS = ("tensor", "empty", "zeros", "ones", "full", "arange")


def switch_off_pinned_memory() -> None:
    """Let torch overlook pin_memory=True and Tensor.pin_memory() where there is no accelerator."""
    if torch.accelerator.is_available():
        return
    for name in _MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
