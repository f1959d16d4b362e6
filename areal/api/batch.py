"""Owns the tensor records of training. Packed: the sequences of a batch lie one after another, without padding.

Alignment: every per-token tensor here is *predicted-token aligned*: position t speaks about token t+1 of the same
sequence, and the last position of each sequence holds 0 / False. T tokens in all, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from areal.api.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


PER_TOKEN = MappingProxyType({"per": "token"})
PER_SEQUENCE = MappingProxyType({"per": "sequence"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One rank's share of a batch. A stage that learns a new fact makes a new record by `dataclasses.replace`.

    Every tensor but the two that say where sequences lie is declared PER_TOKEN or PER_SEQUENCE (its rows): whatever
    cuts or moves a batch goes through `mapped`, and so knows of a new field at once.
    """

    cu_seqlens: Tensor  # [S + 1] int32, starts with 0, ends with T
    sequence_index: Tensor  # [T] int64: which of the S sequences position t belongs to
    input_ids: Tensor = field(metadata=PER_TOKEN)  # [T] int64
    loss_mask: Tensor = field(metadata=PER_TOKEN)  # [T] bool: token t+1 is trained on
    rollout_logprobs: Tensor = field(metadata=PER_TOKEN)  # [T] float32
    output_versions: Tensor = field(metadata=PER_TOKEN)  # [T] int64: version that made token t+1, -1 if none did
    rewards: Tensor = field(metadata=PER_SEQUENCE)  # [S] float32
    group_ids: Tensor = field(metadata=PER_SEQUENCE)  # [S] int64, unique over all ranks
    finished: Tensor = field(metadata=PER_SEQUENCE)  # [S] bool
    baselines: Tensor | None = field(default=None, metadata=PER_SEQUENCE)
    """[S] float32, reward of the greedy answer to the same prompt (ReMax); NaN where none was drawn."""
    prox_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, policy before the update
    ref_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, frozen reference policy
    teacher_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, frozen teacher
    values: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, critic before the update
    score_norms: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, see optimal_token_baseline
    advantages: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32
    returns: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, targets of the critic
    policy_mask: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] bool, see `trained`
    behaviour_weights: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, factors of policy losses
    ratio_mask: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] bool, see `in_ratio`
    chosen_tokens: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] bool, a policy loss treats them apart
    version: int = 0
    """Policy version at the start of the update that this batch is for."""
    update_progress: float = 0.0
    """Part of that update's optimiser steps that come before this minibatch, below 1."""
    candidate_ids: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T, k] int64, see OutputSpec.candidates
    prox_candidate_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T, k] float32, the policy's
    ref_candidate_logprobs: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T, k] float32, the reference's
    ref_full_kl: Tensor | None = field(default=None, metadata=PER_TOKEN)  # [T] float32, KL of whole distributions

    def mapped(
        self,
        *,
        token: Callable[[Tensor], Tensor],
        sequence: Callable[[Tensor], Tensor],
        cu_seqlens: Tensor,
        sequence_index: Tensor,
    ) -> TrainBatch:
        """The batch with `token` applied to every tensor that has one row a token, `sequence` to the others."""
        apply = {"token": token, "sequence": sequence}
        changed: dict[str, Tensor] = {}
        for entry in fields(self):
            # over the declaration, not over names written down again: a new field cannot be forgotten here
            value: Tensor | None = getattr(self, entry.name)
            if value is not None and "per" in entry.metadata:
                changed[entry.name] = apply[entry.metadata["per"]](value)
        return replace(self, cu_seqlens=cu_seqlens, sequence_index=sequence_index, **changed)

    @property
    def trained(self) -> Tensor:
        """[T] bool: the answer tokens that the policy loss and its denominator count; filters take some of loss_mask.

        Rewards, advantages and the critic go by loss_mask: a token that the policy does not learn from still happened.
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
    """For each sequence its place in the batch that was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """What a policy's passes give besides log-probabilities and a detached entropy; the defaults ask for nothing more.

    Every entry changes `TrainEngine.forward` (values on the CPU) and `forward_backward` (with gradients) alike.
    """

    entropy_grad: bool = False
    """`TokenOutputs.entropy` carries a gradient."""
    entropy_clamp: float = 0.0
    """Above 0: also `clamped_entropy`, of the distribution renormalised without the int(V * entropy_clamp) least likely
    tokens of each position (AEnt, arXiv 2509.03493); below 1."""
    squared_sums: bool = False
    """`TokenOutputs.squared_sums` are given."""
    candidates: int | None = None
    """k > 0: log-probabilities of k tokens at every position: those of `TrainBatch.candidate_ids` when the batch has
    them, of any width, else the k most likely. The choice is made in `forward` only; `forward_backward` wants the ids.
    0: of the whole vocabulary in the order of ids, unless the batch has candidate_ids. That makes float32 [T, V]: at
    V = 152k 0.6 GB per 1000 tokens of a micro-batch, twice in its backward pass, and of the whole batch in `forward`.
    """

    def __post_init__(self) -> None:
        if not 0.0 <= self.entropy_clamp < 1.0:
            raise ValueError(f"entropy_clamp is a part of the vocabulary, from 0 to below 1, got {self.entropy_clamp}")
        if self.candidates is not None and self.candidates < 0:
            raise ValueError(f"candidates is a number of tokens, 0 for all or None for none, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What a model says about a packed batch; float32, predicted-token aligned, 0 at the end of each sequence.

    `scores` alone are aligned to the text itself: the one at the last token is the score of the whole sequence.
    """

    logprobs: Tensor | None = None  # [T] log_softmax(logits / T)[token t+1]; None for a critic
    entropy: Tensor | None = None  # [T] of the same distribution, detached by default; None for a critic
    values: Tensor | None = None  # [T] critic only
    scores: Tensor | None = None  # [T] reward model only: of the text up to and with token t
    clamped_entropy: Tensor | None = None  # [T] OutputSpec.entropy_clamp
    squared_sums: Tensor | None = None  # [T] sum of p^2 over the vocabulary, no gradient; OutputSpec.squared_sums
    candidate_ids: Tensor | None = None  # [T, k] int64, OutputSpec.candidates; most likely first where chosen here
    candidate_logprobs: Tensor | None = None  # [T, k]; k = V for the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss *sum* over the tokens of a micro-batch and its metrics. The engine divides by one global denominator."""

    loss: Tensor  # scalar, with gradient
    metrics: Metrics


LossFn = Callable[[TokenOutputs, MicroBatch], LossOutput]
