"""Prompts that several answers of a micro-batch share are computed once: the layout of such a row.

The row that the model computes has sequences without a shared prompt, then shared prompts, then answers. An answer
attends to its prompt and to itself, so every token has the hidden state that it has in its whole sequence. No
token attends to the last one of an answer, which is computed only if the model has an output there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from areal.api.batch import TrainBatch
from areal.engine.packed_attention import AnswerRun, PackedLayout

MIN_SAVED = 0.15
"""Minimum fraction of tokens saved: attention of an answer to a shared prompt has a mask and copies keys and values."""
SAVED_PER_CALL = 32
"""Minimum number of tokens saved for each additional call of attention. Sequences of equal length share a call; answers
of equal length do only if their prompts have equal lengths too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """U tokens in place of the T tokens of the packed sequences."""

    source: Tensor
    """[U] int64: the token of the packed sequences that each token of the row is."""
    rows: Tensor
    """[T] int64: the token of the row that has the hidden state of each token of the packed sequences. A last token of
    an answer may have that of the token before it."""
    layout: PackedLayout


def shared_row(batch: TrainBatch, layout: PackedLayout, *, needs_last: bool) -> SharedRow | None:
    """The row of a batch on the CPU, None when sharing saves too little. `layout`: of the packed sequences.

    A prompt is what precedes the first trained token. Sequences share it when their group and all its tokens are equal.
    `needs_last`: the model has an output at the last token of a sequence.
    """
    bounds = batch.cu_seqlens.long()
    starts, lengths = bounds[:-1], bounds.diff()
    prompts = _prompt_lengths(batch, starts)
    leaders = _leaders(batch, starts, prompts)
    members = torch.bincount(leaders, minlength=len(leaders))[leaders] > 1
    is_leader = leaders == torch.arange(len(leaders))
    saved = int(prompts[members & ~is_leader].sum())
    if not saved or saved < MIN_SAVED * batch.num_tokens:
        return None
    size, prompt_of, first = lengths.tolist(), prompts.tolist(), starts.tolist()
    end_of: list[int] = (lengths if needs_last else lengths - members.long()).tolist()
    leader_of: list[int] = leaders.tolist()
    alone = sorted((~members).nonzero()[:, 0].tolist(), key=size.__getitem__)
    led = sorted((members & is_leader).nonzero()[:, 0].tolist(), key=prompt_of.__getitem__)
    place = {leader: number for number, leader in enumerate(led)}
    answers = sorted(
        (i for i in members.nonzero()[:, 0].tolist() if end_of[i] > prompt_of[i]),
        key=lambda i: (prompt_of[i], end_of[i] - prompt_of[i], place[leader_of[i]]),
    )
    spans = [(first[i], size[i]) for i in alone] + [(first[i], prompt_of[i]) for i in led]
    spans += [(first[i] + prompt_of[i], end_of[i] - prompt_of[i]) for i in answers]
    source = _ranges(*torch.tensor(spans).unbind(1))
    rows = torch.empty(batch.num_tokens, dtype=torch.int64)
    rows[source] = torch.arange(source.numel())
    others = members & ~is_leader
    own = _ranges(starts[others], prompts[others])
    rows[own] = rows[_ranges(starts[leaders[others]], prompts[others])]
    if not needs_last:
        last = bounds[1:][members] - 1
        rows[last] = rows[last - 1]
    runs, blocks = _runs([(None, size[i]) for i in alone] + [(prompt_of[i], prompt_of[i]) for i in led])
    answer_runs = _answer_runs(answers, end_of, prompt_of, [place[leader_of[i]] for i in answers], led, blocks)
    if saved < SAVED_PER_CALL * (len(runs) + len(answer_runs) - len(layout.runs)):
        return None
    return SharedRow(source=source, rows=rows, layout=replace(layout, runs=runs, answers=answer_runs))


def _prompt_lengths(batch: TrainBatch, starts: Tensor) -> Tensor:
    """Tokens before the first trained one of each sequence, 0 where none is trained. -> [S] int64"""
    trained = batch.loss_mask.nonzero()[:, 0]
    first = torch.full_like(starts, batch.num_tokens)
    first.scatter_reduce_(0, batch.sequence_index[trained], trained, "amin")
    return torch.where(first < batch.num_tokens, first + 1 - starts, 0)


def _leaders(batch: TrainBatch, starts: Tensor, prompts: Tensor) -> Tensor:
    """For each sequence the first one with its group and prompt, itself where the tokens differ. -> [S] int64"""
    seen: dict[tuple[int, int], int] = {}
    keys = zip(batch.group_ids.tolist(), prompts.tolist(), strict=True)
    leaders = torch.tensor([seen.setdefault(key, i) if key[1] else i for i, key in enumerate(keys)])
    ids = batch.input_ids
    differs = ids[_ranges(starts, prompts)] != ids[_ranges(starts[leaders], prompts)]
    which = torch.repeat_interleave(torch.arange(len(prompts)), prompts)[differs]
    leaders[which] = which
    return leaders


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ..., start + length - 1 for each pair, one after the other."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))


def _runs(items: Iterable[tuple[int | None, int]]) -> tuple[tuple[tuple[int, int, int], ...], dict[int, int]]:
    """Runs of neighbours with equal key; and the number of the run of each length of shared prompts."""
    runs: list[tuple[int, int, int]] = []
    blocks: dict[int, int] = {}
    start = 0
    for (prompt, length), same in groupby(items):
        count = len(list(same))
        if prompt is not None:
            blocks[prompt] = len(runs)
        runs.append((start, count, length))
        start += count * length
    return tuple(runs), blocks


def _answer_runs(
    answers: Sequence[int],
    end_of: Sequence[int],
    prompt_of: Sequence[int],
    places: Sequence[int],
    led: Sequence[int],
    blocks: dict[int, int],
) -> tuple[AnswerRun, ...]:
    """`end_of`: tokens of each sequence up to the last one that is computed; `places`: of the prompt of each answer in
    `led`; `blocks`: the run of each length of prompts."""
    first: dict[int, int] = {}
    for number, leader in enumerate(led):
        first.setdefault(prompt_of[leader], number)
    found: list[AnswerRun] = []
    pairs = zip(answers, places, strict=True)
    for (prompt, length), same in groupby(
        pairs, key=lambda pair: (prompt_of[pair[0]], end_of[pair[0]] - prompt_of[pair[0]])
    ):
        rows = torch.tensor([place - first[prompt] for _, place in same])
        found.append(AnswerRun(length=length, prompts=rows, block=blocks[prompt]))
    return tuple(found)
