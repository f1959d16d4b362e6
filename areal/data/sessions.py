"""Sessions that are cut into several sequences: their trained tokens as one sequence, in order of time.

What is computed on this view does not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal.api.batch import TrainBatch
from areal.api.data import TURNS


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A batch with one sequence per session, and where its positions come from."""

    batch: TrainBatch
    """Its tokens are the trained ones, ordered by turn; before each turn is one position outside the masks, so that
    turns are separate segments. A session has the reward, group and other numbers of its first sequence."""
    positions: Tensor  # [V] int64: the position in the original batch
    rows: Tensor  # [number of sessions] int64: the first sequence of each session

    def scattered(self, values: Tensor, size: int) -> Tensor:
        """Per-token `values` [V, ...] of the view at their positions in the original batch, 0 elsewhere. -> [size, ...]

        bool values stay bool.
        """
        inside = self.batch.loss_mask
        found = values.new_zeros(size, *values.shape[1:])
        return found.index_copy(0, self.positions[inside], values[inside])


def session_view(batch: TrainBatch) -> SessionView | None:
    """The sessions of a batch; None when each sequence is one.

    Sequences of one session need not be neighbours. The order of tokens is (turn, position in their sequence), which
    is equal in every cut.
    """
    if batch.session_ids is None:
        return None
    sessions, of_row = torch.unique(batch.session_ids, return_inverse=True)
    size = int(sessions.numel())
    numbers = torch.arange(batch.num_sequences, device=of_row.device)
    rows = numbers.new_full((size,), batch.num_sequences).scatter_reduce(0, of_row, numbers, "amin")
    chosen = torch.nonzero(batch.loss_mask).flatten()
    row = batch.sequence_index[chosen]
    session, turn = of_row[row], row
    if TURNS in batch.columns:  # rows without turns follow each other
        turn = torch.where(batch.columns[TURNS][chosen] < 0, row, batch.columns[TURNS][chosen])
    place = chosen - batch.cu_seqlens.long()[batch.sequence_index[chosen]]
    order = torch.argsort(place, stable=True)
    for key in (turn, session):  # the last key is the first in the order
        order = order[torch.argsort(key[order], stable=True)]
    chosen, session, turn = chosen[order], session[order], turn[order]
    begins = torch.ones_like(chosen, dtype=torch.bool)
    begins[1:] = (session[1:] != session[:-1]) | (turn[1:] != turn[:-1])
    copies = 1 + begins.long()
    positions, owner = torch.repeat_interleave(chosen, copies), torch.repeat_interleave(session, copies)
    is_token = torch.ones_like(positions, dtype=torch.bool)
    is_token[(copies.cumsum(0) - copies)[begins]] = False
    bounds = torch.zeros(size + 1, dtype=torch.int64, device=owner.device)
    torch.cumsum(torch.bincount(owner, minlength=size), 0, out=bounds[1:])
    slim = replace(batch, candidate_ids=None, prox_candidate_logprobs=None, ref_candidate_logprobs=None)  # [T, k]
    view = slim.mapped(
        token=lambda values: values[positions],
        sequence=lambda values: values[rows],
        cu_seqlens=bounds.int(),
        sequence_index=owner,
    )
    masks = {
        name: mask & is_token
        for name, mask in (("policy_mask", view.policy_mask), ("ratio_mask", view.ratio_mask))
        if mask is not None
    }
    view = replace(view, loss_mask=view.loss_mask & is_token, session_ids=None, session_tokens=None, **masks)
    return SessionView(batch=view, positions=positions, rows=rows)


def by_session(batch: TrainBatch) -> TrainBatch:
    """The view of the sessions of a batch; the batch itself when each sequence is one."""
    view = session_view(batch)
    return batch if view is None else view.batch


def with_session_tokens(batch: TrainBatch, mask: Tensor) -> TrainBatch:
    """Add the number of tokens of the whole session in `mask` [T] bool; unchanged when each sequence is a session."""
    if batch.session_ids is None:
        return batch
    of_row = torch.unique(batch.session_ids, return_inverse=True)[1]
    counts = torch.bincount(of_row[batch.sequence_index[mask]], minlength=batch.num_sequences)
    return replace(batch, session_tokens=counts[of_row])


def session_units(batch: TrainBatch) -> tuple[list[list[int]], list[int]] | None:
    """The sequences of each session, and its number of trained tokens; None when each sequence is a session."""
    if batch.session_ids is None:
        return None
    ids: list[int] = batch.session_ids.tolist()
    tokens: list[int] = torch.bincount(batch.sequence_index[batch.loss_mask], minlength=batch.num_sequences).tolist()
    units: dict[int, list[int]] = {}
    for row, session in enumerate(ids):
        units.setdefault(session, []).append(row)
    return list(units.values()), [sum(tokens[row] for row in rows) for rows in units.values()]
