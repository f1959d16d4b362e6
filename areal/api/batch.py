"""The tensor records of training. Batches are packed: sequences are concatenated without padding.

Alignment: every per-token tensor here is *predicted-token aligned*: position t refers to token t+1 of the same
sequence, and the last position of each sequence is 0 / False. T is the number of tokens, S the number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

from areal.api.columns import ColumnSpec
from areal.api.errors import StageError
from areal.api.images import ImageRef
from areal.api.metrics import Metrics
from areal.api.table import TokenTable

if TYPE_CHECKING:
    from torch import Tensor


def required(value: Tensor | None, field: str) -> Tensor:
    """`value`. Raises StageError, which names `field`, when it is None."""
    if value is None:
        raise StageError(field)
    return value


PER_TOKEN = MappingProxyType({"per": "token"})
PER_SEQUENCE = MappingProxyType({"per": "sequence"})


CANDIDATE_IDS = ColumnSpec("candidate_ids", "i8", show="", made_by="with_prox_logprobs")
"""[T, k] int64, see `OutputSpec.candidates`."""
IMAGE_INDEX = ColumnSpec("image_index", "i8", per="sequence", show="", made_by="to_train_batch")
"""[S, m] int64, the places in `TrainBatch.images` of those of each sequence in order, then -1; absent = no images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of a batch: the columns that every stage may read, and those of single stages.

    Every tensor except the two that locate sequences is declared PER_TOKEN or PER_SEQUENCE (its rows). All code that
    splits or moves a batch uses `mapped`, so that it covers every column.
    """

    cu_seqlens: Tensor  # [S + 1] int32, starts with 0, ends with T
    sequence_index: Tensor  # [T] int64: which of the S sequences position t belongs to
    input_ids: Tensor = field(metadata=PER_TOKEN)  # [T] int64
    loss_mask: Tensor = field(metadata=PER_TOKEN)  # [T] bool: token t+1 is trained
    rollout_logprobs: Tensor = field(metadata=PER_TOKEN)  # [T] float32
    output_versions: Tensor = field(metadata=PER_TOKEN)  # [T] int64: policy version of token t+1, -1 if not generated
    rewards: Tensor = field(metadata=PER_SEQUENCE)  # [S] float32
    group_ids: Tensor = field(metadata=PER_SEQUENCE)  # [S] int64, unique over all ranks
    finished: Tensor = field(metadata=PER_SEQUENCE)  # [S] bool
    columns: Mapping[ColumnSpec, Tensor] = field(default_factory=lambda: {})
    """Columns of the workflow and of single stages, by the declaration of the module that makes them."""
    prox_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, policy before the update
    ref_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, frozen reference policy
    advantages: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32
    policy_mask: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] bool, see `trained`
    ratio_mask: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] bool, see `in_ratio`
    version: int = 0
    """Policy version at the start of the update with this batch."""
    update_progress: float = 0.0
    """Fraction of that update's optimiser steps before this mini-batch, below 1."""
    images: tuple[ImageRef, ...] = ()
    """The images of the whole share; a part of a batch has all of them too."""

    def mapped(
        self,
        *,
        token: Callable[[Tensor], Tensor],
        sequence: Callable[[Tensor], Tensor],
        cu_seqlens: Tensor,
        sequence_index: Tensor,
    ) -> TrainBatch:
        """The batch with `token` applied to every PER_TOKEN tensor and `sequence` to every PER_SEQUENCE tensor."""
        apply = {"token": token, "sequence": sequence}
        changed: dict[str, Tensor] = {}
        for entry in fields(self):
            # iterates over the declared fields, so that a new field is included
            value: Tensor | None = getattr(self, entry.name)
            if value is not None and "per" in entry.metadata:
                changed[entry.name] = apply[entry.metadata["per"]](value)
        columns = {spec: apply[spec.per](values) for spec, values in self.columns.items()}
        return replace(self, cu_seqlens=cu_seqlens, sequence_index=sequence_index, columns=columns, **changed)

    def column(self, spec: ColumnSpec) -> Tensor:
        """A further column. Raises StageError, which names it and the stage that adds it, when it is absent."""
        if spec not in self.columns:
            raise StageError(spec.name, spec.made_by)
        return self.columns[spec]

    def with_column(self, spec: ColumnSpec, values: Tensor) -> TrainBatch:
        return replace(self, columns={**self.columns, spec: values})

    def without(self, *specs: ColumnSpec) -> TrainBatch:
        return replace(self, columns={spec: values for spec, values in self.columns.items() if spec not in specs})

    @property
    def trained(self) -> Tensor:
        """[T] bool: the tokens in the policy loss and its denominator: loss_mask minus the tokens that filters exclude.

        Rewards, advantages and the critic use loss_mask.
        """
        return self.loss_mask if self.policy_mask is None else self.policy_mask

    @property
    def in_ratio(self) -> Tensor:
        """[T] bool: the tokens over which the policy loss takes the ratio of a sequence; a correction may change it."""
        return self.trained if self.ratio_mask is None else self.ratio_mask

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens.numel()) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    @property
    def sequence_lengths(self) -> list[int]:
        bounds = cast("list[int]", self.cu_seqlens.tolist())  # pyright: ignore[reportUnknownMemberType]
        return [b - a for a, b in pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The sequences of one forward pass, on the model's device."""

    batch: TrainBatch
    position_ids: Tensor  # [T] int64, restarts at 0 in every sequence
    max_seqlen: int
    source_index: list[int]
    """For each sequence its index in the batch that was split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Outputs of a policy in addition to log-probabilities and a detached entropy; the defaults add none.

    Every field applies to `TrainEngine.forward` (values on the CPU) and `forward_backward` (with gradients).
    """

    entropy_grad: bool = False
    """`TokenOutputs.entropy` carries a gradient."""
    entropy_clamp: float = 0.0
    """Above 0: also `clamped_entropy`, the entropy of the distribution renormalised without the int(V * entropy_clamp)
    least likely tokens of each position (AEnt, arXiv 2509.03493); below 1."""
    squared_sums: bool = False
    """Also `TokenOutputs.squared_sums`."""
    candidates: int | None = None
    """k > 0: log-probabilities of k tokens at every position: those of `TrainBatch.candidate_ids` if present, of any
    width, else the k most likely. Only `forward` selects them; `forward_backward` requires the ids.
    0: of the whole vocabulary in the order of ids, unless the batch has candidate_ids. The result is float32 [T, V]:
    with V = 152k 0.6 GB per 1000 tokens, of a micro-batch (twice in its backward pass) or the whole batch (`forward`).
    """

    def __post_init__(self) -> None:
        if not 0.0 <= self.entropy_clamp < 1.0:
            raise ValueError(f"entropy_clamp is a fraction from 0 to below 1, got {self.entropy_clamp}")
        if self.candidates is not None and self.candidates < 0:
            raise ValueError(f"candidates is a number of tokens, 0 for all or None for none, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Outputs of a model for a packed batch: float32, predicted-token aligned, 0 at the end of each sequence.

    Only `scores` are token aligned: the value at the last token is the score of the whole sequence.
    """

    logprobs: Tensor | None = None  # [T] log_softmax(logits / T)[token t+1]; None for a critic
    entropy: Tensor | None = None  # [T] of the same distribution, detached by default; None for a critic
    values: Tensor | None = None  # [T] critic only
    scores: Tensor | None = None  # [T] reward model only: score of the text up to and including token t
    clamped_entropy: Tensor | None = None  # [T] OutputSpec.entropy_clamp
    squared_sums: Tensor | None = None  # [T] sum of p^2 over the vocabulary, no gradient; OutputSpec.squared_sums
    candidate_ids: Tensor | None = None  # [T, k] int64, OutputSpec.candidates; most likely first if `forward` selects
    candidate_logprobs: Tensor | None = None  # [T, k]; k = V for the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss *sum* over the tokens of a micro-batch and its metrics. The engine divides by one global denominator."""

    loss: Tensor  # scalar, with gradient
    metrics: Metrics


LossFn = Callable[[TokenOutputs, MicroBatch], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """One data-parallel rank's share of train batch `step`, as the rollout controller composed it."""

    step: int
    version: int
    """Policy version of the trainer when it consumes this batch."""
    table: TokenTable
    """The columns are those of the whole batch, equal on all ranks."""
    group_index: np.ndarray  # [S] int32, equal within a group, unique over the whole batch (all ranks)
    stats: dict[str, float] = field(default_factory=dict[str, float])
    """Statistics of the whole batch (queue, staleness, episodes), equal on every rank."""
