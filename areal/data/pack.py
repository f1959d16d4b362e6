"""Packing of records into a train batch. The shift to next-token alignment happens only here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import IMAGE_INDEX, BatchShare, TrainBatch
from areal.api.columns import ColumnSpec
from areal.api.data import TURNS
from areal.api.errors import InputError
from areal.api.images import ImageRef
from areal.api.table import CORE, IMAGE_COUNT, SESSION, StoredColumn, TokenTable, image_columns, images_of
from areal.data.balance import balanced_parts

SESSION_IDS = ColumnSpec("session_ids", "i8", per="sequence", show="", made_by="to_train_batch")
"""[S] int64, unique on this rank: sequences with one id are rows of one session; absent = each is a session."""
SESSION_TOKENS = ColumnSpec("session_tokens", "i8", per="sequence", show="", made_by="with_session_tokens")
"""[S] int64, trained tokens of the whole session in the mini-batch; absent = without SESSION_IDS."""

# ----------------------------------------------------------------------------------------------------------------------
# Sessions that are cut into several sequences: their trained tokens as one sequence, in order of time.
#
# What is computed on this view does not depend on the cut.


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
        result = values.new_zeros(size, *values.shape[1:])
        return result.index_copy(0, self.positions[inside], values[inside])


def session_view(batch: TrainBatch) -> SessionView | None:
    """The sessions of a batch; None when each sequence is one.

    Sequences of one session need not be neighbours. The order of tokens is (turn, position in their sequence), which
    is equal in every cut.
    """
    if SESSION_IDS not in batch.columns:
        return None
    sessions, of_row = torch.unique(batch.columns[SESSION_IDS], return_inverse=True)
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
    wide = [spec for spec, values in batch.columns.items() if values.dim() > 1]  # nothing reads them by session
    view = batch.without(SESSION_IDS, SESSION_TOKENS, *wide).mapped(
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
    view = replace(view, loss_mask=view.loss_mask & is_token, **masks)
    return SessionView(batch=view, positions=positions, rows=rows)


def by_session(batch: TrainBatch) -> TrainBatch:
    """The view of the sessions of a batch; the batch itself when each sequence is one."""
    view = session_view(batch)
    return batch if view is None else view.batch


def with_session_tokens(batch: TrainBatch, mask: Tensor) -> TrainBatch:
    """Add the number of tokens of the whole session in `mask` [T] bool; unchanged when each sequence is a session."""
    if SESSION_IDS not in batch.columns:
        return batch
    of_row = torch.unique(batch.columns[SESSION_IDS], return_inverse=True)[1]
    counts = torch.bincount(of_row[batch.sequence_index[mask]], minlength=batch.num_sequences)
    return batch.with_column(SESSION_TOKENS, counts[of_row])


def session_units(batch: TrainBatch) -> tuple[list[list[int]], list[int]] | None:
    """The sequences of each session, and its number of trained tokens; None when each sequence is a session."""
    if SESSION_IDS not in batch.columns:
        return None
    ids: list[int] = batch.columns[SESSION_IDS].tolist()
    tokens: list[int] = torch.bincount(batch.sequence_index[batch.loss_mask], minlength=batch.num_sequences).tolist()
    units: dict[int, list[int]] = {}
    for row, session in enumerate(ids):
        units.setdefault(session, []).append(row)
    return list(units.values()), [sum(tokens[row] for row in rows) for rows in units.values()]


# ----------------------------------------------------------------------------------------------------------------------
# Partition of a packed batch: which sequences form a micro-batch under a token limit, and selection of sequences.
#
# Only lengths decide, so a replay makes the same partition.


def split_by_tokens(
    lengths: Sequence[int], max_tokens: int | None, min_parts: int = 1, divisor: int = 1, granularity: int = 1
) -> list[list[int]]:
    """Partition the indices of `lengths` into lists of at most `max_tokens` tokens each (None: no limit).

    The number of lists is at least `min_parts` and a multiple of `divisor`; it starts from the count that first-fit
    decreasing needs. The lists are then balanced as far as the limit allows; some may be empty. Each run of
    `granularity` neighbours stays together. Raises InputError when one such unit exceeds the limit, or when
    `granularity` does not divide the number of sequences.
    """
    if len(lengths) % granularity:
        message = f"{len(lengths)} sequences cannot be divided into units of granularity={granularity}"
        raise InputError(message, code="data.uneven_units")
    units = [sum(lengths[i : i + granularity]) for i in range(0, len(lengths), granularity)]
    if max_tokens is not None and units and max(units) > max_tokens:
        message = f"a unit of {max(units)} tokens exceeds max_tokens={max_tokens}: raise the limit"
        raise InputError(message, code="data.too_long")
    bins = [list(range(len(units)))]
    if max_tokens is not None and sum(units) > max_tokens:
        bins = _first_fit_decreasing(units, max_tokens)
    num_parts = -(-max(len(bins), min_parts) // divisor) * divisor
    level = balanced_parts(units, num_parts)
    if max_tokens is not None and max(sum(units[i] for i in part) for part in level) > max_tokens:
        level = _split_further(bins, units, num_parts)
    return [[unit * granularity + k for unit in part for k in range(granularity)] for part in level]


def _first_fit_decreasing(units: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        place = next((i for i, free in enumerate(room) if free >= units[index]), None)
        if place is None:
            bins.append([index])
            room.append(max_tokens - units[index])
        else:
            bins[place].append(index)
            room[place] -= units[index]
    return [sorted(members) for members in bins]


def _split_further(bins: list[list[int]], units: Sequence[int], num_parts: int) -> list[list[int]]:
    """Halve the fullest bins until there are `num_parts`. A bin of one unit is kept; empty bins complete the number."""
    parts = [list(members) for members in bins]
    while len(parts) < num_parts:
        fullest = max(parts, key=lambda part: (len(part) > 1, sum(units[i] for i in part)), default=[])
        if len(fullest) < 2:
            return parts + [[] for _ in range(num_parts - len(parts))]
        parts.remove(fullest)
        for half in balanced_parts([units[i] for i in fullest], 2):
            parts.append([fullest[i] for i in half])
    return parts


def token_positions(cu_seqlens: Tensor, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of the sequences `indices` in a packed batch, in that order, and their new boundaries.

    cu_seqlens [S + 1] int32 -> positions [T'] int64, new cu_seqlens [len(indices) + 1] int32.
    """
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=cu_seqlens.device)
    starts, ends = cu_seqlens[:-1].long()[chosen], cu_seqlens[1:].long()[chosen]
    lengths = ends - starts
    bounds = torch.zeros(len(indices) + 1, dtype=torch.int64, device=cu_seqlens.device)
    torch.cumsum(lengths, 0, out=bounds[1:])
    shift = torch.repeat_interleave(starts - bounds[:-1], lengths)
    return shift + torch.arange(shift.numel(), device=cu_seqlens.device), bounds.int()


def take(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Select the sequences `indices` of a batch, in that order. `indices` may be empty."""
    positions, cu_seqlens = token_positions(batch.cu_seqlens, indices)
    chosen = torch.as_tensor(indices, dtype=torch.int64, device=batch.cu_seqlens.device)
    new_index = torch.arange(len(indices), device=chosen.device)

    return batch.mapped(
        token=lambda values: values[positions],
        sequence=lambda values: values[chosen],
        cu_seqlens=cu_seqlens,
        sequence_index=torch.repeat_interleave(new_index, cu_seqlens.diff().long()),
    )


def to_train_batch(share: BatchShare) -> TrainBatch:
    """Pack a rank's share. The row of token t+1 moves to position t, the first token's row is dropped; columns that are
    not `is_predicted` stay at their token.

    No position predicts the first token of a sequence, so it is never trained on. A share may be empty. Raises
    InputError when the arrays of the share have inconsistent lengths.
    """
    table = share.table
    lengths = table.lengths.astype(np.int64)
    _require_lengths(share, lengths)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    pictures = images_of(table)
    return TrainBatch(
        input_ids=_tensor(table.token_ids, torch.int64),
        cu_seqlens=_tensor(bounds, torch.int32),
        loss_mask=_next_token(table.loss_mask, bounds, 0, torch.bool),
        sequence_index=_tensor(np.repeat(np.arange(lengths.size), lengths), torch.int64),
        rollout_logprobs=_next_token(table.rollout_logprobs, bounds, 0.0, torch.float32),
        output_versions=_next_token(table.output_versions, bounds, -1, torch.int64),
        rewards=_tensor(table.rewards, torch.float32),
        group_ids=_tensor(share.group_index, torch.int64),
        finished=_tensor(table.finished, torch.bool),
        images=(places := tuple(dict.fromkeys(image for row in pictures for image in row))),
        version=share.version,
        columns={
            column.spec: _column(column, table.columns[column.spec], bounds)
            for column in table.stored()
            if column.spec.per != "group" and column.spec not in (SESSION, IMAGE_COUNT)
        }
        | _session_ids(table, share.group_index)
        | _image_index(pictures, places),
    )


def _column(column: StoredColumn, values: np.ndarray, bounds: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.zeros(0, column.dtype)).dtype
    if column.spec.per == "sequence" or not column.spec.is_predicted:
        return _tensor(values, dtype)
    return _next_token(values, bounds, column.filled(1)[0], dtype)


def _session_ids(table: TokenTable, group_index: np.ndarray) -> dict[ColumnSpec, Tensor]:
    """SESSION_IDS, equal for the rows of one session of a group."""
    session = table.columns.get(SESSION)
    if session is None:
        return {}
    alone = np.where(session < 0, np.arange(session.size), -1)
    numbers = np.unique(np.stack([group_index, session, alone]), axis=1, return_inverse=True)[1]
    return {SESSION_IDS: _tensor(numbers.reshape(-1), torch.int64)}


def rows_to_train_batch(
    token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]], images: Sequence[Sequence[ImageRef]] = ()
) -> TrainBatch:
    """Pack rows for supervised training. Masks are aligned with tokens: 1 = train on this token.

    `images`: those of each row; empty = no row has any.
    """
    for row, (ids, mask) in enumerate(zip(token_ids, loss_mask, strict=True)):
        if len(ids) != len(mask):
            message = f"row {row} has {len(ids)} token ids, but {len(mask)} mask entries"
            raise InputError(message, code="data.inconsistent_batch")
    lengths = [len(ids) for ids in token_ids]
    num_rows, num_tokens = len(lengths), sum(lengths)
    table = TokenTable(
        lengths=np.array(lengths, np.int32),
        token_ids=np.fromiter((token for ids in token_ids for token in ids), np.int32, num_tokens),
        output_versions=np.full(num_tokens, -1, np.int32),
        rewards=np.zeros(num_rows, np.float32),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        loss_mask=np.fromiter((flag for mask in loss_mask for flag in mask), np.uint8, num_tokens),
        finished=np.ones(num_rows, np.uint8),
        columns=image_columns(images) if any(images) else {},
    )
    return to_train_batch(BatchShare(step=0, version=0, table=table, group_index=np.arange(num_rows, dtype=np.int32)))


def _require_lengths(share: BatchShare, lengths: np.ndarray) -> None:
    table, num_tokens = share.table, len(share.table.token_ids)
    problems: list[str] = []
    if lengths.size and lengths.min() < 1:
        problems.append(f"sequence {int(lengths.argmin())} has no tokens")
    if lengths.sum() != num_tokens:
        problems.append(f"the lengths sum to {lengths.sum()}, but there are {num_tokens} token ids")
    columns = [(name, per, values) for (name, per, _), values in zip(CORE, table.core(), strict=True)]
    columns += [(spec.name, spec.per, values) for spec, values in table.columns.items()]
    for name, per, values in (*columns, ("group_index", "sequence", share.group_index)):
        expected = {"token": num_tokens, "sequence": lengths.size}.get(per, len(values))
        if len(values) != expected:
            problems.append(f"{name} has {len(values)} entries, not {expected}")
    if problems:
        raise InputError(f"a train batch is inconsistent: {'; '.join(problems)}", code="data.inconsistent_batch")


def _image_index(rows: Sequence[Sequence[ImageRef]], table: Sequence[ImageRef]) -> dict[ColumnSpec, Tensor]:
    """IMAGE_INDEX, the places in `table`."""
    if not table:
        return {}
    place = {image: index for index, image in enumerate(table)}
    result = torch.full((len(rows), max(map(len, rows))), -1)
    for number, row in enumerate(rows):
        result[number, : len(row)] = torch.tensor([place[image] for image in row], dtype=torch.int64)
    return {IMAGE_INDEX: result}


def _next_token(values: np.ndarray, bounds: np.ndarray, last: float | np.ndarray, dtype: torch.dtype) -> Tensor:
    """Position t gets the value of t+1; the last position of each sequence gets `last`."""
    shifted = np.empty_like(values)
    shifted[:-1] = values[1:]
    shifted[bounds[1:] - 1] = last
    return _tensor(shifted, dtype)


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy, because the array may be a view of a network buffer."""
    return torch.tensor(values).to(dtype)
