"""Pinned memory on a machine without an accelerator: a request for it returns ordinary memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

_MAKERS = ("tensor", "empty", "zeros", "ones", "full", "arange")


def switch_off_pinned_memory() -> None:
    """Let torch overlook pin_memory=True, Tensor.pin_memory() and the registration of host memory with CUDA (SGLang
    registers its record of routed experts) where there is no accelerator."""
    if torch.accelerator.is_available():
        return
    for name in _MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    runtime = SimpleNamespace(cudaHostRegister=_succeeds, cudaHostUnregister=_succeeds)
    torch.cuda.cudart = lambda: runtime  # type: ignore[assignment]


def _succeeds(*args: object) -> int:
    """The status of a CUDA call without an error."""
    return 0


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
