"""Decoding by torch's kernel for paged caches (torch 2.12, CUDA, half precision), where a trial shows that it works.

Without it, the keys and values of all running sequences are copied in every layer and step.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal.observe.log import get_logger

PagedKernel = Callable[..., Tensor]
"""The signature of `torch.nn.attention.varlen.varlen_attn`."""


@dataclass(slots=True, kw_only=True)
class PagedRows:
    """The decode rows 0..rows-1 of a step, one token each."""

    kernel: PagedKernel
    block_table: Tensor  # [rows, width] int32, padded with any valid block
    lengths: Tensor  # [rows] int32: tokens to attend to, including its own
    bounds: Tensor  # [rows + 1] int32: 0, 1, 2, ...
    max_length: int

    def attend(
        self, queries: Tensor, blocks: Tensor, key_size: int, scaling: float | None, window: int | None
    ) -> Tensor:
        """queries [rows, heads, key size], blocks [num_blocks, block_size, kv heads, key size + value size] -> [rows,
        heads, value size]."""
        return self.kernel(
            queries,
            blocks[..., :key_size],
            blocks[..., key_size:],
            self.bounds,
            None,
            1,
            self.max_length,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=queries.shape[1] != blocks.shape[2],
            seqused_k=self.lengths,
            block_table=self.block_table,
        )


def paged_rows(kernel: PagedKernel, blocks: Tensor, lengths: Tensor, max_length: int) -> PagedRows:
    """Decode rows of sequences whose caches are in blocks [rows, width]; `max_length`: at least that of the longest."""
    return PagedRows(
        kernel=kernel,
        block_table=blocks,
        lengths=lengths.to(torch.int32),
        bounds=torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device),
        max_length=max_length,
    )


def find_kernel(
    device: torch.device, dtype: torch.dtype, *, block_size: int, heads: int, kv_heads: int, size: int
) -> PagedKernel | None:
    """torch's kernel, if it exists and is right for these sizes; None otherwise, with the reason in the log."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    try:
        error = trial_error(varlen_attn, device, dtype, block_size, heads, kv_heads, size)  # pyright: ignore[reportArgumentType]
    except (RuntimeError, TypeError, ValueError) as refused:
        get_logger(__name__).info(
            "decoding copies the cache: the paged kernel refuses: %s", str(refused).splitlines()[0]
        )
        return None
    if not error < 0.05:
        get_logger(__name__).warning("decoding copies the cache: the paged kernel is wrong by %g", error)
        return None
    return varlen_attn  # pyright: ignore[reportReturnType]


def trial_error(
    kernel: PagedKernel,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    heads: int,
    kv_heads: int,
    size: int,
) -> float:
    """Largest error of three short sequences in mixed blocks against attention in float32."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(8, block_size, kv_heads, 2 * size, generator=generator).to(device, dtype)
    queries = torch.randn(3, heads, size, generator=generator).to(device, dtype)
    held, lengths = [[5, 2], [7], [1, 6, 0]], [block_size + 3, 1, 3 * block_size]
    table = torch.tensor([[5, 2, 5], [7, 7, 7], [1, 6, 0]], dtype=torch.int32, device=device)
    paged = paged_rows(kernel, table, torch.tensor(lengths, dtype=torch.int32, device=device), max(lengths))
    attended = paged.attend(queries, blocks, size, None, None)
    errors: list[float] = []
    for row, (mine, length) in enumerate(zip(held, lengths, strict=True)):
        states = blocks[mine].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1)
        exact = scaled_dot_product_attention(queries[row][:, None].float(), states[..., :size], states[..., size:])
        errors.append((attended[row].float() - exact[:, 0]).abs().max().item())
    return max(errors)
