"""The coefficient of the KL penalty during training: fixed, or adapted to a target divergence."""

import torch
from torch import Tensor

from areal.algorithm.aggregate import Reduce, require_same_shape, trained_counts
from areal.api.config import KLControlConfig

ERROR_LIMIT = 0.2
"""The relative distance from the target counts as at most this."""


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, num_sequences: int, horizon: float
) -> float:
    """The coefficient after a batch of divergence `measured` (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    e = clip(measured / target - 1, -0.2, 0.2);  beta' = beta (1 + e n / horizon), n sequences in the batch, at most
    `horizon`, so that beta remains positive. NaN does not change beta.
    """
    error = min(max(measured / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    if error != error:
        return coefficient
    return coefficient * (1.0 + error * min(num_sequences / horizon, 1.0))


def sequence_kl(kl: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, measure: str) -> Tensor:
    """Divergence of each sequence from its tokens' estimates. kl [T] float, mask [T] bool -> [S] float64.

    sequence-sum: of the whole answer, what Ziegler et al. measure. token-mean: of a mean token, what verl measures.
    NaN for a sequence without a token under the mask. Errors: ValueError on unequal shapes or another measure.
    """
    require_same_shape(kl=kl, mask=mask, sequence_index=sequence_index)
    counts = trained_counts(mask, sequence_index, num_sequences).double()
    sums = torch.zeros_like(counts).index_add(0, sequence_index, torch.where(mask, kl, 0.0).double())
    if measure == "token-mean":
        return sums / counts
    if measure == "sequence-sum":
        return torch.where(counts > 0, sums, float("nan"))
    raise ValueError(f"unknown measure {measure!r} of a sequence's divergence: choose token-mean or sequence-sum")


class KLController:
    """The coefficient of the KL penalty in the reward. Adaptive ones change after every batch, so they are state."""

    def __init__(self, coefficient: float, config: KLControlConfig) -> None:
        """`coefficient` is the one of the first batch."""
        self.coefficient = coefficient
        self._config = config

    @property
    def is_adaptive(self) -> bool:
        return self._config.type == "adaptive"

    def observe(self, kl: Tensor, mask: Tensor, sequence_index: Tensor, num_sequences: int, *, reduce: Reduce) -> None:
        """Set the coefficient of the next batch from the divergence of this one; a collective if it is adaptive.

        kl, mask [T] of this rank. The divergence is the mean over the sequences of all ranks with a masked token.
        """
        target = self._config.target
        if not self.is_adaptive or target is None:
            return
        each = sequence_kl(kl, mask, sequence_index, num_sequences, self._config.measure)
        counted = trained_counts(mask, sequence_index, num_sequences) > 0
        facts = torch.stack([torch.where(counted, each, 0.0).sum(), counted.sum().double()])
        share = torch.tensor([float(num_sequences)], dtype=torch.float64)
        sums = reduce(torch.cat([facts.cpu(), share]))
        total, count, size = (float(value) for value in sums.unbind())
        self.coefficient = adapted_coefficient(
            self.coefficient,
            total / count if count else float("nan"),
            target=target,
            num_sequences=int(size),
            horizon=self._config.horizon,
        )
