"""Decode steps as CUDA graphs: all kernels of a step start with one call, where a trial gives the same logits.

A graph has fixed sizes and addresses: rows and blocks per row are rounded up to powers of two, inputs are copied into
its own tensors, and each of the two copies of the weights that an update exchanges has its own graphs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from areal.inference.paged_kernel import PagedKernel, PagedRows
from areal.observe.log import get_logger

Compute = Callable[[Tensor, Tensor, PagedRows], Tensor]
"""Token ids and positions [2, rows], cache slots [rows] and decode rows -> logits [rows, vocabulary]."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Returns what repeats a computation with the present content of its inputs, and the tensor of its result."""
_COPIES = 2
_TRIAL_ERROR = 0.02
"""Relative to the largest logit."""


def capture_cuda(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries allocate their workspaces at their first calls
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread may receive weights meanwhile
        logits = compute()
    return graph.replay, logits


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One token of a sequence."""

    token: int
    position: int
    length: int
    """Tokens to attend to, including its own."""
    slot: int
    """Where its keys and values go."""
    blocks: Sequence[int]
    """The blocks of the cache up to its own."""


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: Tensor
    slots: Tensor
    paged: PagedRows
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model, captured when a size first occurs. Only the engine thread uses it."""

    def __init__(
        self,
        compute: Compute,
        kernel: PagedKernel,
        capture: Capture,
        *,
        weights: Iterable[Tensor],
        block_size: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        """`spare_block`: a block of the cache that no sequence uses, for the rows that fill up a graph."""
        self._compute, self._kernel, self._capture = compute, kernel, capture
        self._weights = list(weights)
        self._block_size = block_size
        self._filling = DecodeRow(token=0, position=0, length=1, slot=spare_block * block_size, blocks=[spare_block])
        self._device = device
        self._graphs: dict[tuple[int, ...], dict[tuple[int, int], _Graph]] = {}
        """By addresses of the weights, then by rows and blocks per row."""
        self.is_off = False

    def logits(self, rows: Sequence[DecodeRow]) -> Tensor | None:
        """[rows, vocabulary], valid until the next call. None when graphs cannot be used."""
        size = _rounded(len(rows)), _rounded(max(len(row.blocks) for row in rows))
        graphs = self._graphs.setdefault(tuple(weight.data_ptr() for weight in self._weights), {})
        while len(self._graphs) > _COPIES:
            del self._graphs[next(iter(self._graphs))]
        if self.is_off or (size not in graphs and not self._add(graphs, size)):
            return None
        graph = graphs[size]
        self._fill(graph.inputs, graph.slots, graph.paged, rows)
        graph.replay()
        return graph.logits[: len(rows)]

    def trial_error(self) -> float:
        """Difference of a graph's logits, for other inputs than those of its capture, relative to the largest logit."""
        self.logits([self._filling])
        row = DecodeRow(token=1, position=0, length=1, slot=self._filling.slot, blocks=self._filling.blocks)
        found = self.logits([row])
        if found is None:
            return float("inf")
        found = found.clone()
        inputs, slots, paged = self._inputs(1, 1)
        self._fill(inputs, slots, paged, [row])
        exact = self._compute(inputs, slots, paged)
        return ((found - exact).abs().max() / exact.abs().max()).item()

    def _add(self, graphs: dict[tuple[int, int], _Graph], size: tuple[int, int]) -> bool:
        inputs, slots, paged = self._inputs(*size)
        self._fill(inputs, slots, paged, [])
        try:
            replay, logits = self._capture(lambda: self._compute(inputs, slots, paged))
        except RuntimeError as refused:
            get_logger(__name__).warning("decoding uses no CUDA graphs: %s", str(refused).splitlines()[0])
            self.is_off = True
            return False
        graphs[size] = _Graph(inputs, slots, paged, replay, logits)
        return True

    def _inputs(self, rows: int, width: int) -> tuple[Tensor, Tensor, PagedRows]:
        paged = PagedRows(
            kernel=self._kernel,
            block_table=torch.zeros(rows, width, dtype=torch.int32, device=self._device),
            lengths=torch.ones(rows, dtype=torch.int32, device=self._device),
            bounds=torch.arange(rows + 1, dtype=torch.int32, device=self._device),
            max_length=width * self._block_size,
        )
        ids = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
        return ids, torch.zeros(rows, dtype=torch.int64, device=self._device), paged

    def _fill(self, inputs: Tensor, slots: Tensor, paged: PagedRows, rows: Sequence[DecodeRow]) -> None:
        size, width = paged.block_table.shape
        filled = [*rows, *[self._filling] * (size - len(rows))]
        numbers = chain.from_iterable((*row.blocks, *[row.blocks[0]] * (width - len(row.blocks))) for row in filled)
        inputs.copy_(torch.tensor([[row.token for row in filled], [row.position for row in filled]]))
        slots.copy_(torch.tensor([row.slot for row in filled]))
        paged.block_table.copy_(torch.tensor(list(numbers), dtype=torch.int32).view(size, width))
        paged.lengths.copy_(torch.tensor([row.length for row in filled], dtype=torch.int32))


def tried(graphs: DecodeGraphs) -> DecodeGraphs | None:
    """`graphs`, if a trial shows that they are right; None otherwise, with the reason in the log."""
    error = graphs.trial_error()
    if error < _TRIAL_ERROR:
        return graphs
    if not graphs.is_off:
        get_logger(__name__).warning("decoding uses no CUDA graphs: their logits differ by %g", error)
    return None


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()
