"""Micro-batches: partition of a batch by token budget, equal in number on every rank, and model inputs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from areal.api.batch import CANDIDATE_IDS, MicroBatch, TrainBatch
from areal.api.columns import ROUTED_EXPERTS
from areal.api.config import MicroBatchSpec
from areal.api.config.train import DEFAULT_TOKENS_PER_MB
from areal.api.data import TEMPERATURES
from areal.api.errors import ConfigError, InputError
from areal.data.pack import split_by_tokens, take
from areal.engine.mesh import RankGroup
from areal.engine.packed_attention import AnswerRun, PackedLayout, own_tokens, packed_layout
from areal.engine.vision import ImageInput, VisionReader

# ----------------------------------------------------------------------------------------------------------------------
# Prompts that several answers of a micro-batch share are computed once: the layout of such a row.
#
# The row that the model computes has sequences without a shared prompt, then shared prompts, then answers. An answer
# attends to its prompt and to itself, so every token has the hidden state that it has in its whole sequence. No
# token attends to the last one of an answer, which is computed only if the model has an output there.

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
    """The first sequence with the group and prompt of each sequence, itself where the tokens differ. -> [S] int64"""
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
    answer_runs: list[AnswerRun] = []
    pairs = zip(answers, places, strict=True)
    for (prompt, length), same in groupby(
        pairs, key=lambda pair: (prompt_of[pair[0]], end_of[pair[0]] - prompt_of[pair[0]])
    ):
        rows = torch.tensor([place - first[prompt] for _, place in same])
        answer_runs.append(AnswerRun(length=length, prompts=rows, block=blocks[prompt]))
    return tuple(answer_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Inputs of one forward pass, on the model's device. T tokens."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, or [3, T] of a row with images
    labels: Tensor  # [T] int64: the next token, 0 at the last position of each sequence
    has_label: Tensor  # [T] bool: false at the last position of each sequence
    layout: PackedLayout
    candidate_ids: Tensor | None = None  # [T, k] int64, as in the batch
    temperatures: Tensor | None = None  # [T] float32, as in the batch
    routed_experts: Tensor | None = None  # [T, layers, k] int16, as in the batch
    rows: Tensor | None = None
    """[T] int64: place of each token in a row of fewer tokens, whose are input_ids, position_ids and layout."""
    images: ImageInput | None = None


def plan_micro_batches(
    lengths: list[int], spec: MicroBatchSpec, reduce_max: Callable[[Tensor], Tensor], patches: Sequence[int] = ()
) -> list[list[int]]:
    """Sequence indices of each micro-batch: equally many lists on every rank, some may be empty. A collective.

    `reduce_max`: elementwise maximum of a float64 tensor over all ranks. An error on one rank is raised on every rank.
    `patches`: of the images of each sequence, for mb_spec.max_patches_per_mb.
    """
    granularity = spec.granularity
    limit = spec.max_tokens_per_mb or max(DEFAULT_TOKENS_PER_MB, *_sums(lengths, granularity))
    if spec.max_patches_per_mb and any(patches):  # a patch counts as the tokens that fill a pass as far as it does
        each = [-(-number * limit // spec.max_patches_per_mb) for number in patches]
        lengths = [max(pair) for pair in zip(lengths, each, strict=True)]
    longest = max(_sums(lengths, granularity))
    uneven = float(len(lengths) % granularity)
    fits = longest <= limit
    parts: list[list[int]] = []
    if not uneven and fits:
        parts = split_by_tokens(lengths, limit, spec.n_mbs or 1, spec.n_mbs_divisor, granularity)
    facts: list[float] = [len(parts), longest, not fits, uneven]
    num_parts, longest, exceeds, uneven = reduce_max(torch.tensor(facts, dtype=torch.float64)).tolist()
    if uneven:
        message = f"mb_spec.granularity={granularity} does not divide every rank's sequences: choose one that does"
        raise ConfigError(message, code="data.uneven_units")
    if exceeds:
        if spec.max_tokens_per_mb is None:
            message = f"mb_spec.max_patches_per_mb={spec.max_patches_per_mb} is below the patches of a sequence"
            raise InputError(f"{message}: raise it, or lower vision.max_pixels", code="data.too_long")
        message = f"mb_spec.max_tokens_per_mb={limit} is below the {int(longest)} tokens of a sequence: raise it"
        if spec.max_patches_per_mb is not None:
            message += f", or mb_spec.max_patches_per_mb={spec.max_patches_per_mb} if it has images"
        raise InputError(message, code="data.too_long")
    if len(parts) < num_parts:
        parts = split_by_tokens(lengths, limit, int(num_parts), spec.n_mbs_divisor, granularity)
    return parts


def _sums(lengths: Sequence[int], granularity: int) -> list[int]:
    """Sums of the lengths that stay in one micro-batch; [0] without sequences."""
    return [sum(lengths[i : i + granularity]) for i in range(0, len(lengths), granularity)] or [0]


def checked_ids(
    batch: TrainBatch, vocab_size: int, all_max: Callable[[Tensor], Tensor], *, with_candidates: bool
) -> Callable[[Tensor], Tensor]:
    """The `reduce_max` of `plan_micro_batches` from that over all ranks, with a check of the token ids of the batch.

    It raises InputError on every rank when any rank holds a token id outside the vocabulary.
    """
    ids = batch.input_ids
    if CANDIDATE_IDS in batch.columns and with_candidates:
        ids = torch.cat([ids, batch.columns[CANDIDATE_IDS].flatten()])

    def reduce_max(facts: Tensor) -> Tensor:
        own = [float(ids.max()), -float(ids.min())] if ids.numel() else [0.0, 0.0]
        found = all_max(torch.cat([facts, torch.tensor(own, dtype=facts.dtype)]))
        highest, lowest = int(found[-2]), -int(found[-1])
        if highest >= vocab_size or lowest < 0:
            raise InputError(
                f"the train batch contains token id {highest if highest >= vocab_size else lowest}, the vocabulary "
                f"has {vocab_size} tokens: check the workflow, and that the tokenizer belongs to the model",
                code="data.token_id",
            )
        return found[:-2]

    return reduce_max


def make_micro_batch(
    batch: TrainBatch,
    indices: list[int],
    device: torch.device,
    *,
    shares_prompts: bool = False,
    needs_last: bool = True,
) -> tuple[MicroBatch, ModelInput]:
    """The sequences `indices` on `device`, sorted by length: neighbours of equal length share attention calls.

    `shares_prompts`: the model computes a prompt that several of them have once, if that saves enough. `needs_last`: it
    has an output at the last token of a sequence.
    """
    lengths = batch.sequence_lengths
    order = sorted(indices, key=lambda i: (lengths[i], i))
    chosen = batch if order == list(range(len(lengths))) else take(batch, order)
    chosen = _to_device(chosen, device)
    sizes = [lengths[i] for i in order]
    model_input = replace(
        model_input_of(
            chosen.input_ids,
            chosen.cu_seqlens,
            sizes,
            chosen.columns.get(CANDIDATE_IDS),
            chosen.columns.get(TEMPERATURES),
        ),
        routed_experts=_signed(chosen.columns.get(ROUTED_EXPERTS)),
    )
    micro = MicroBatch(batch=chosen, position_ids=model_input.position_ids, max_seqlen=max(sizes), source_index=order)
    shared = shared_row(chosen, model_input.layout, needs_last=needs_last) if shares_prompts else None
    if shared is not None:
        ids, positions = model_input.input_ids[shared.source], model_input.position_ids[shared.source]
        shorter = {"input_ids": ids, "position_ids": positions, "layout": shared.layout, "rows": shared.rows}
        model_input = replace(model_input, **shorter)
    return micro, model_input


def _signed(experts: Tensor | None) -> Tensor | None:
    """Routed experts as int16, -1 = not recorded."""
    if experts is None or experts.dtype == torch.int16:
        return experts
    return experts.short().masked_fill(experts == 255, -1)


def with_images(inputs: ModelInput, batch: TrainBatch | None, reader: VisionReader, *, runs_tower: bool) -> ModelInput:
    """The inputs of a micro-batch (None: of `dummy_input`) with its images, or with one if the tower runs elsewhere."""
    images, positions = None, None
    if batch is not None:
        images, positions = reader.of(batch, inputs.input_ids.device)
    if images is None and runs_tower:
        images = reader.without_images(inputs.input_ids)
    if images is not None and images.blocks is not None:
        inputs = replace(inputs, layout=replace(inputs.layout, blocks=images.blocks))
    return replace(inputs, images=images, position_ids=inputs.position_ids if positions is None else positions)


def dummy_input(batch: TrainBatch, device: torch.device) -> ModelInput:
    """One sequence of two tokens, for a rank without work while the others compute; fields as in `batch`."""
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    candidates = batch.columns.get(CANDIDATE_IDS)
    if candidates is not None:
        candidates = torch.zeros(2, candidates.shape[1], dtype=torch.int64, device=device)
    return model_input_of(ids, torch.tensor([0, 2], dtype=torch.int32, device=device), [2], candidates)


def model_input_of(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    lengths: list[int],
    candidate_ids: Tensor | None = None,
    temperatures: Tensor | None = None,
) -> ModelInput:
    """Compute positions and labels of a packed row."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    offsets = torch.repeat_interleave(starts, ends - starts, output_size=input_ids.numel())
    has_label = torch.ones_like(input_ids, dtype=torch.bool)
    has_label[ends - 1] = False
    labels = input_ids.roll(-1) * has_label
    return ModelInput(
        input_ids=input_ids,
        position_ids=torch.arange(input_ids.numel(), device=input_ids.device) - offsets,
        labels=labels,
        has_label=has_label,
        layout=packed_layout(cu_seqlens, lengths),
        candidate_ids=candidate_ids,
        temperatures=temperatures,
    )


def padded(inputs: ModelInput, multiple: int) -> ModelInput:
    """The row with a last sequence without labels, so that `multiple` divides its tokens."""
    count, layout = inputs.input_ids.numel(), inputs.layout
    missing = -count % multiple
    if not missing:
        return inputs

    def longer(values: Tensor, fill: float = 0) -> Tensor:
        return torch.cat([values, values.new_full((missing, *values.shape[1:]), fill)])

    return ModelInput(
        input_ids=longer(inputs.input_ids),
        position_ids=longer(inputs.position_ids),
        labels=longer(inputs.labels),
        has_label=longer(inputs.has_label),
        layout=_with_last(layout, count, missing),
        candidate_ids=None if inputs.candidate_ids is None else longer(inputs.candidate_ids),
        temperatures=None if inputs.temperatures is None else longer(inputs.temperatures, fill=1),
        routed_experts=None if inputs.routed_experts is None else longer(inputs.routed_experts, fill=-1),
    )


def _with_last(layout: PackedLayout, count: int, padding: int) -> PackedLayout:
    return replace(
        layout,
        cu_seqlens=torch.cat([layout.cu_seqlens, layout.cu_seqlens.new_tensor([count + padding])]),
        max_seqlen=max(layout.max_seqlen, padding),
        runs=(*layout.runs, (count, 1, padding)),
        blocks=None if layout.blocks is None else torch.cat([layout.blocks, layout.blocks.new_full((padding,), -1)]),
    )


def over_context(inputs: ModelInput, ranks: RankGroup) -> ModelInput:
    """The tokens of this context rank: every c-th. The layout remains that of the whole row.

    The row gets a last sequence without labels when c does not divide its tokens: all ranks have the same number.
    """
    count, layout = inputs.input_ids.numel(), inputs.layout
    if padding := -count % ranks.size:
        layout = _with_last(layout, count, padding)
    own = partial(own_tokens, ranks=ranks)
    return ModelInput(
        input_ids=own(inputs.input_ids),
        position_ids=own(inputs.position_ids.movedim(-1, 0)).movedim(0, -1),
        labels=own(inputs.labels),
        has_label=own(inputs.has_label),
        layout=replace(layout, context=ranks, num_tokens=count),
        candidate_ids=None if inputs.candidate_ids is None else own(inputs.candidate_ids),
        temperatures=None if inputs.temperatures is None else own(inputs.temperatures, fill=1),
        routed_experts=None if inputs.routed_experts is None else own(inputs.routed_experts, fill=-1),
        images=None if inputs.images is None else inputs.images.of_tokens(own),
    )


def _to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    if device.type == "cpu":
        return batch

    def moved(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    return batch.mapped(
        token=moved, sequence=moved, cu_seqlens=moved(batch.cu_seqlens), sequence_index=moved(batch.sequence_index)
    )
