"""Owns the tensor records of training. Packed: the sequences of a batch lie one after another, without padding.

Alignment: every per-token tensor here is *predicted-token aligned*: position t speaks about token t+1 of the same
sequence, and the last position of each sequence holds 0 / False. T tokens in all, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from areal.api.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of a batch. A stage that learns a new fact makes a new record by `dataclasses.replace`."""

    input_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S + 1] int32, starts with 0, ends with T
    loss_mask: Tensor  # [T] bool: token t+1 is trained on
    sequence_index: Tensor  # [T] int64: which of the S sequences position t belongs to
    rollout_logprobs: Tensor  # [T] float32
    output_versions: Tensor  # [T] int64: version that made token t+1, -1 if none did
    rewards: Tensor  # [S] float32
    group_ids: Tensor  # [S] int64, unique over all ranks
    finished: Tensor  # [S] bool
    prox_logprobs: Tensor | None = None  # [T] float32, policy at the start of the update
    ref_logprobs: Tensor | None = None  # [T] float32, frozen reference policy
    values: Tensor | None = None  # [T] float32, critic at the start of the update
    advantages: Tensor | None = None  # [T] float32
    returns: Tensor | None = None  # [T] float32, targets of the critic

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
    """For each sequence its place in the batch that was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What a model says about a packed batch; float32, predicted-token aligned, 0 at the end of each sequence."""

    logprobs: Tensor | None = None  # [T] log_softmax(logits / T)[token t+1]; None for a critic
    entropy: Tensor | None = None  # [T] of the same distribution, detached; None for a critic
    values: Tensor | None = None  # [T] critic only


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss *sum* over the tokens of a micro-batch and its metrics. The engine divides by one global denominator."""

    loss: Tensor  # scalar, with gradient
    metrics: Metrics


LossFn = Callable[[TokenOutputs, MicroBatch], LossOutput]
