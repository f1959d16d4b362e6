"""Packing of records into a train batch. The shift to next-token alignment happens only here."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import BatchShare, TrainBatch
from areal.api.errors import InputError
from areal.api.images import ImageRef


def to_train_batch(share: BatchShare) -> TrainBatch:
    """Pack a rank's share. The record entry of token t+1 moves to position t; the first token's entry is dropped.
    Routed experts stay at their token: position t computes with them.

    No position predicts the first token of a sequence, so it is never trained on. A share may be empty. Raises
    InputError when the arrays of the share have inconsistent lengths.
    """
    lengths = share.lengths.astype(np.int64)
    _require_lengths(share, lengths)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    sampled_at = share.temperatures
    return TrainBatch(
        input_ids=_tensor(share.token_ids, torch.int64),
        cu_seqlens=_tensor(bounds, torch.int32),
        loss_mask=_next_token(share.loss_mask, bounds, 0, torch.bool),
        sequence_index=_tensor(np.repeat(np.arange(lengths.size), lengths), torch.int64),
        rollout_logprobs=_next_token(share.rollout_logprobs, bounds, 0.0, torch.float32),
        output_versions=_next_token(share.output_versions, bounds, -1, torch.int64),
        rewards=_tensor(share.rewards, torch.float32),
        group_ids=_tensor(share.group_index, torch.int64),
        finished=_tensor(share.finished, torch.bool),
        baselines=_tensor(share.baselines, torch.float32),
        reward_parts=_tensor(share.reward_parts, torch.float32) if share.reward_names else None,
        reward_names=tuple(share.reward_names),
        temperatures=_next_token(sampled_at, bounds, np.nan, torch.float32) if sampled_at.size else None,
        routed_experts=_tensor(share.routed_experts, torch.int16) if share.routed_experts.size else None,
        images=(table := tuple(dict.fromkeys(image for row in share.images for image in row))),
        image_index=_image_index(share.images, table),
        version=share.version,
        session_ids=_tensor(share.sessions, torch.int64) if share.sessions.size else None,
        turns=_next_token(share.turns, bounds, -1, torch.int64) if share.turns.size else None,
        turn_rewards=_next_token(share.turn_rewards, bounds, 0.0, torch.float32) if share.turn_rewards.size else None,
    )


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
    share = BatchShare(
        step=0,
        version=0,
        token_ids=np.fromiter((token for ids in token_ids for token in ids), np.int32, num_tokens),
        lengths=np.array(lengths, np.int32),
        loss_mask=np.fromiter((flag for mask in loss_mask for flag in mask), np.uint8, num_tokens),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        output_versions=np.full(num_tokens, -1, np.int32),
        rewards=np.zeros(num_rows, np.float32),
        group_index=np.arange(num_rows, dtype=np.int32),
        finished=np.ones(num_rows, np.uint8),
        baselines=np.full(num_rows, np.nan, np.float32),
        images=[tuple(row) for row in images],
    )
    return to_train_batch(share)


def _require_lengths(share: BatchShare, lengths: np.ndarray) -> None:
    num_tokens = share.token_ids.size
    optional = ("sessions", "turns", "turn_rewards", "temperatures")
    per_token = ("loss_mask", "rollout_logprobs", "output_versions", "turns", "turn_rewards", "temperatures")
    per_sequence = ("rewards", "group_index", "finished", "baselines", "sessions")
    problems: list[str] = []
    if lengths.size and lengths.min() < 1:
        problems.append(f"sequence {int(lengths.argmin())} has no tokens")
    if lengths.sum() != num_tokens:
        problems.append(f"the lengths sum to {lengths.sum()}, but there are {num_tokens} token ids")
    for names, expected in ((per_token, num_tokens), (per_sequence, lengths.size)):
        for name in names:
            if getattr(share, name).size != expected and not (name in optional and not getattr(share, name).size):
                problems.append(f"{name} has {getattr(share, name).size} entries, not {expected}")
    if share.routed_experts.size and len(share.routed_experts) != num_tokens:
        problems.append(f"routed_experts has {len(share.routed_experts)} rows, not {num_tokens}")
    if len(share.images) not in (0, lengths.size):
        problems.append(f"images has {len(share.images)} entries, not {lengths.size}")
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


def _next_token(values: np.ndarray, bounds: np.ndarray, last: float, dtype: torch.dtype) -> Tensor:
    """Position t gets the value of t+1; the last position of each sequence gets `last`."""
    shifted = np.empty_like(values)
    shifted[:-1] = values[1:]
    shifted[bounds[1:] - 1] = last
    return _tensor(shifted, dtype)


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy, because the array may be a view of a network buffer."""
    return torch.tensor(values).to(dtype)
