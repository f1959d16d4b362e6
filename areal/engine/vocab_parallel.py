"""The part of the vocabulary whose logits a rank computes, and the clamped entropy of a distribution over all parts."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.engine.mesh import RankGroup


@dataclass(frozen=True, slots=True)
class VocabPart:
    """`size` tokens from `first` of a vocabulary that `ranks` share; None = the whole vocabulary.

    The reductions are over the ranks, in place.
    """

    size: int
    ranks: RankGroup | None = None

    @property
    def first(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank * self.size

    @property
    def vocab_size(self) -> int:
        return self.size if self.ranks is None else self.ranks.size * self.size

    def ids(self, columns: slice) -> slice:
        """The token ids of some columns of this part."""
        return slice(self.first + columns.start, self.first + columns.stop)

    def places(self, wanted: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Positions of token ids [t, k] in some columns of this part, and which of the ids they contain."""
        ids = self.ids(columns)
        inside = (wanted >= ids.start) & (wanted < ids.stop)
        return (wanted - ids.start).masked_fill_(~inside, 0), inside

    def trained_rows(self, valid: Tensor, upstream: tuple[Tensor | None, ...]) -> Tensor | None:
        """Indices of the tokens with a gradient that is not 0 on any rank, NaN included; None = all tokens."""
        reached = torch.zeros_like(valid)
        for values in upstream:
            if values is not None:
                reached |= (values != 0) if values.ndim == 1 else (values != 0).any(1)
        if self.ranks is not None:
            reached = self.max(reached.to(torch.uint8)).bool()
        rows = (reached & valid).nonzero().squeeze(1)
        return None if rows.numel() == valid.numel() else rows

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def min(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MIN)

    def columns(self, values: Tensor) -> Tensor:
        """[T, n] -> [T, n x ranks], in the order of the ranks."""
        if self.ranks is None:
            return values
        parts = [torch.empty_like(values) for _ in range(self.ranks.size)]
        dist.all_gather(parts, values.contiguous(), group=self.ranks.group)
        return torch.cat(parts, dim=1)

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        if self.ranks is not None:
            dist.all_reduce(values, op, group=self.ranks.group)
        return values


def clamped_entropy(logits: Tensor, num_clamped: int, vocab: VocabPart) -> Tensor:
    """Entropy of whole rows [t, V] without the `num_clamped` least likely tokens. Returns [5, t]: lower and upper limit
    around the last kept logit, logsumexp of the kept tokens, the kept part of the last ones, the entropy.

    When the bound is among tokens of equal logits, each counts with the kept part of them: the value is that of any
    choice among them, and the gradient prefers none. The limits are half way to the next different logits, so that
    logits recomputed in other blocks, with other last bits, are on the same side.
    """
    if vocab.ranks is None:
        last = logits.kthvalue(num_clamped + 1, dim=-1, keepdim=True).values
    else:
        last = _kth_of_all(logits, num_clamped + 1, vocab)
    above, tied = logits > last, logits == last
    num_above, num_tied = vocab.sum(torch.stack([above.sum(-1), tied.sum(-1)]))
    part = (vocab.vocab_size - num_clamped - num_above) / num_tied
    lower = vocab.max(logits.masked_fill(logits >= last, float("-inf")).amax(-1))
    higher = vocab.min(logits.masked_fill(~above, float("inf")).amin(-1))
    highest = vocab.max(logits.amax(-1))
    shifted = logits - highest.unsqueeze(1)
    shares = shifted.exp().mul_(torch.where(above, 1.0, tied * part.unsqueeze(1)))
    total, product = vocab.sum(torch.stack([shares.sum(-1), shares.mul_(shifted).sum(-1)]))
    entropy = total.log() - product / total
    middle = last.squeeze(1)
    return torch.stack([(middle + lower) / 2, (middle + higher) / 2, highest + total.log(), part, entropy])


def _kth_of_all(logits: Tensor, k: int, vocab: VocabPart) -> Tensor:
    """The k-th smallest value of each row [t, 1], exactly, from the parts [t, n] of all ranks.

    A search over the integers that order floating-point numbers, with one count per row and step: the ranks exchange
    t numbers as often as a number has bits, and no logits.
    """
    kind = torch.int32 if logits.dtype == torch.float32 else torch.int64
    bits = torch.iinfo(kind).bits
    rest = torch.iinfo(kind).max  # all bits but the sign
    raw = (logits + 0.0).view(kind)  # without negative zeros
    keys = torch.where(raw < 0, raw ^ rest, raw).sort(-1).values
    low = torch.full((logits.shape[0], 1), torch.iinfo(kind).min, dtype=kind, device=logits.device)
    high = torch.full_like(low, rest)
    for _ in range(bits):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without overflow
        enough = vocab.sum(torch.searchsorted(keys, middle, right=True)) >= k
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle + 1)
    return torch.where(high < 0, high ^ rest, high).view(logits.dtype)
