"""Packing of records into a train batch. The shift to next-token alignment happens only here."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import BatchShare, TrainBatch
from areal.api.errors import InputError
from areal.api.images import ImageRef
from areal.api.table import CORE, IMAGE_COUNT, SESSION, StoredColumn, TokenTable, image_columns, images_of


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
        image_index=_image_index(pictures, places),
        version=share.version,
        session_ids=_session_ids(table, share.group_index),
        columns={
            column.spec: _column(column, table.columns[column.spec], bounds)
            for column in table.stored()
            if column.spec.per != "group" and column.spec not in (SESSION, IMAGE_COUNT)
        },
    )


def _column(column: StoredColumn, values: np.ndarray, bounds: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.zeros(0, column.dtype)).dtype
    if column.spec.per == "sequence" or not column.spec.is_predicted:
        return _tensor(values, dtype)
    return _next_token(values, bounds, column.filled(1)[0], dtype)


def _session_ids(table: TokenTable, group_index: np.ndarray) -> Tensor | None:
    """[S] int64: equal for the rows of one session of a group, unique on this rank; None = each row is a session."""
    session = table.columns.get(SESSION)
    if session is None:
        return None
    alone = np.where(session < 0, np.arange(session.size), -1)
    numbers = np.unique(np.stack([group_index, session, alone]), axis=1, return_inverse=True)[1]
    return _tensor(numbers.reshape(-1), torch.int64)


def rows_to_train_batch(
    token_ids: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImageRef]] = (),
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


def _image_index(rows: Sequence[Sequence[ImageRef]], table: Sequence[ImageRef]) -> Tensor | None:
    """Places in `table`, -1 after the last image of a row. -> [S, m] int64"""
    if not table:
        return None
    place = {image: index for index, image in enumerate(table)}
    result = torch.full((len(rows), max(map(len, rows))), -1)
    for number, row in enumerate(rows):
        result[number, : len(row)] = torch.tensor([place[image] for image in row], dtype=torch.int64)
    return result


def _next_token(values: np.ndarray, bounds: np.ndarray, last: float | np.ndarray, dtype: torch.dtype) -> Tensor:
    """Position t gets the value of t+1; the last position of each sequence gets `last`."""
    shifted = np.empty_like(values)
    shifted[:-1] = values[1:]
    shifted[bounds[1:] - 1] = last
    return _tensor(shifted, dtype)


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy, because the array may be a view of a network buffer."""
    return torch.tensor(values).to(dtype)
