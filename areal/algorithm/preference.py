"""Losses of pairs of sequences: Bradley-Terry, DPO and IPO.

Per-sequence numbers are [S], per-pair numbers [P] float, chosen and rejected separate. Losses are per pair: the caller
sums them and divides by one global number of pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape


@dataclass(frozen=True, slots=True)
class PairPlaces:
    """The places of the two sequences of each of P pairs among S sequences."""

    chosen: Tensor  # [P] int64
    rejected: Tensor  # [P] int64


def pair_places(source_index: Sequence[int]) -> PairPlaces:
    """The pairs among sequences of a batch of alternating chosen and rejected sequences, in any order.

    `source_index`: position of each sequence in that batch; the pair is position // 2, chosen sequences are even.
    ValueError when a sequence of a pair is missing.
    """
    places = {source: here for here, source in enumerate(source_index)}
    firsts = sorted(source for source in places if source % 2 == 0)
    if len(places) != len(source_index) or set(places) != {f + side for f in firsts for side in (0, 1)}:
        raise ValueError(f"a batch of pairs lacks one sequence of a pair: {sorted(source_index)}")
    return PairPlaces(
        chosen=torch.tensor([places[f] for f in firsts], dtype=torch.int64),
        rejected=torch.tensor([places[f + 1] for f in firsts], dtype=torch.int64),
    )


def last_of_each(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The value at the last token of each sequence: values [T], cu_seqlens [S + 1] -> [S]."""
    return values[cu_seqlens[1:].long() - 1]


def bradley_terry_losses(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) of scores [P] (Bradley and Terry 1952; margins: Llama 2, 2307.09288)."""
    require_same_shape(chosen=chosen, rejected=rejected, margins=margins)
    return -F.logsigmoid(chosen - rejected - margins)


def centering_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(chosen + rejected)^2 of scores [P] (Eisenstein et al. 2023, 2312.09244): a loss that fixes the free constant."""
    require_same_shape(chosen=chosen, rejected=rejected)
    return (chosen + rejected).square()


def dpo_losses(log_ratios: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (Rafailov et al. 2023, 2305.18290, equation 7) with smoothed labels (conservative DPO, Mitchell 2023).

    With h = beta * log_ratio: -(1 - e) log sigmoid(h) - e log sigmoid(-h).
    log_ratios [P]: see `preference_log_ratios`. -> [P]
    """
    logits = beta * log_ratios
    losses = -(1.0 - label_smoothing) * F.logsigmoid(logits)
    # with label_smoothing = 0 the second term could be 0 * inf
    return losses - label_smoothing * F.logsigmoid(-logits) if label_smoothing else losses


def ipo_losses(log_ratios: Tensor, *, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, 2310.12036, equation 17, its tau being beta): (log_ratio - 1 / (2 beta))^2, [P] -> [P].

    The paper's log-probabilities are sums over the answer; AReaL and TRL use means over its tokens.
    """
    return (log_ratios - 1.0 / (2.0 * beta)).square()


def preference_log_ratios(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """(log pi - log ref)(chosen) - (log pi - log ref)(rejected): [P] log-probabilities of answers -> [P]."""
    require_same_shape(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def preference_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[P] float: 1 where chosen is above rejected, 1/2 where they are equal, as for a policy that is its reference."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
