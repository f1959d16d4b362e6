"""Products of float32 matrices by oneDNN on the CPUs where torch's own library, MKL, is slower."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Rows of a product are padded to a multiple of it: oneDNN compiles code for each new size, in up to 0.7 ms."""
MIN_WORK = 2**21
"""Multiplications from which oneDNN is used. MKL computes this many in 40 us, and a call of oneDNN costs 15 us more."""
EXACT_WORK = 2**27
"""Multiplications from which rows are not padded, because the product takes longer than the compilation."""
ZEN4_MIN_RIGHT = 2**17
"""Elements of the right operand from which oneDNN is used on CPUs that compute 512 bits in two halves: there it saves a
tenth of a product, and padding the left operand costs more than that if the right one is small."""
ZEN5 = 26
"""Family of the first CPUs of AMD that compute 512 bits at once."""


@contextlib.contextmanager
def fast_products(cpu_info: Path = Path("/proc/cpuinfo")) -> Iterator[None]:
    """Inside the block torch computes large products of float32 matrices on the CPU by oneDNN, if MKL is slower.

    Both are exact to float32, but they add in another order. `cpu_info`: Linux's description of the CPU.
    """
    if (min_right := smallest_right(cpu_info)) is None:
        yield
        return
    products = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has kernels for these operators
        for name, function in (("mm", _mm), ("addmm", _addmm)):
            slower = torch.library.get_kernel(f"aten::{name}", "CPU")
            products.impl(name, partial(function, slower, min_right), "CPU", with_keyset=True)
    try:
        yield
    finally:
        products._destroy()  # pyright: ignore[reportPrivateUsage]


def smallest_right(cpu_info: Path) -> int | None:
    """Elements of the right operand from which oneDNN is faster here than MKL, which uses AVX-512 on Intel's CPUs only.

    None = never. Not measured, so that a replay computes with the same library.
    """
    try:
        text = cpu_info.read_text()
    except OSError:
        return None
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if "AuthenticAMD" not in text or family is None or not (has_both and has_avx512):
        return None
    return 0 if int(family[1]) >= ZEN5 else ZEN4_MIN_RIGHT


def _mm(slower: Any, min_right: int, keys: Any, left: Tensor, right: Tensor) -> Tensor:
    found = product(left, right, None, min_right)
    return slower.call_boxed(keys, left, right) if found is None else found


def _addmm(
    slower: Any,
    min_right: int,
    keys: Any,
    bias: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    is_linear = bias.dim() == 1 and beta == 1 and alpha == 1
    found = product(left, right, bias, min_right) if is_linear else None
    return slower.call_boxed(keys, bias, left, right, beta=beta, alpha=alpha) if found is None else found


def product(left: Tensor, right: Tensor, bias: Tensor | None, min_right: int) -> Tensor | None:
    """left [m, k] @ right [k, n] + bias [n] by oneDNN; None for a product that MKL computes.

    `min_right`: the result of `smallest_right`.
    """
    (rows, inner), work = left.shape, left.shape[0] * right.numel()
    if left.dtype != torch.float32 or work < MIN_WORK or rows < BLOCK or right.numel() < min_right:
        return None
    linear = torch.ops.mkldnn._linear_pointwise
    if work >= EXACT_WORK or (rows % BLOCK == 0 and inner % BLOCK == 0):
        return linear(left, right.t(), bias, "none", [], "")
    if inner % BLOCK:
        return None
    padded = left.new_zeros(rows + -rows % BLOCK, inner)
    padded[:rows] = left
    return linear(padded, right.t(), bias, "none", [], "")[:rows]
