"""The shared-prefix filter: prefixes that answers of one prompt share although their rewards differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from areal.algorithm.aggregate import require_same_shape


@dataclass(frozen=True, slots=True)
class _Answer:
    """One sequence from its first trained position to its last."""

    first: int
    """Position of its first trained token in the packed batch."""
    keys: Tensor  # [n] int64: next token and whether it is trained on, in one number
    reward: float


def contested_prefixes(
    input_ids: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    rewards: Tensor,
    *,
    min_tokens: int,
) -> Tensor:
    """Trained tokens that answers of one prompt share although their rewards differ. -> [T] bool

    Per tokens input_ids, sequence_index [T] int64, loss_mask [T] bool; per sequence group_ids [S] int64, rewards [S].
    For each answer: the longest prefix that it shares with an answer of its group to the same prompt with another
    reward (cosmos-rl compares only the answers that share the longest prefix). Tokens inside it that are not trained on
    must be equal too, but are neither counted nor returned. A prefix of fewer than min_tokens, or of all trained tokens
    of the answer, does not count. Groups may be interleaved.
    """
    require_same_shape(input_ids=input_ids, loss_mask=loss_mask, sequence_index=sequence_index)
    prompts: dict[tuple[int, bytes], list[_Answer]] = {}
    bounds, groups, scores = _numbers(cu_seqlens), _numbers(group_ids), _numbers(rewards)
    for (start, end), group, reward in zip(pairwise(bounds), groups, scores, strict=True):
        places = torch.nonzero(loss_mask[start:end]).flatten()
        if not places.numel():
            continue
        first, last = start + int(places[0]), start + int(places[-1])
        keys = 2 * input_ids[first + 1 : last + 2] + loss_mask[first : last + 1]
        prompt = input_ids[start : first + 1].numpy().tobytes()
        answer = _Answer(first, keys, reward)
        prompts.setdefault((int(group), prompt), []).append(answer)
    contested = torch.zeros_like(loss_mask)
    for answers in prompts.values():
        # sorted by bytes in any byte order, answers with a common beginning are neighbours
        answers.sort(key=lambda answer: answer.keys.numpy().tobytes())
        for answer, length in zip(answers, _longest_contested(answers), strict=True):
            trained = (answer.keys % 2).bool()
            count = int(trained[:length].sum())
            if min_tokens <= count < int(trained.sum()):
                contested[answer.first : answer.first + length] = trained[:length]
    return contested


def _longest_contested(answers: Sequence[_Answer]) -> list[int]:
    """The longest beginning that each of the sorted answers shares with one of another reward.

    Sorted, the common beginning of two answers is the shortest of those between neighbours on the way, so the nearest
    answer with another reward on either side has the most in common.
    """
    shared = [_common_length(a.keys, b.keys) for a, b in pairwise(answers)]
    best = [0] * len(answers)
    for i in range(len(answers)):
        for step in (-1, 1):
            length, j = answers[i].keys.numel(), i
            while 0 <= j + step < len(answers):
                length = min(length, shared[min(j, j + step)])
                j += step
                if answers[j].reward != answers[i].reward:
                    best[i] = max(best[i], length)
                    break
    return best


def _numbers(values: Tensor) -> list[int]:
    # torch leaves the type of the numbers open; rewards are floats, which compare as well
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _common_length(a: Tensor, b: Tensor) -> int:
    size = min(a.numel(), b.numel())
    differ = torch.nonzero(a[:size] != b[:size]).flatten()
    return int(differ[0]) if differ.numel() else size
