"""Micro-batches: partition of a batch by token budget, equal in number on every rank, and model inputs."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from areal.api.batch import CANDIDATE_IDS, MicroBatch, TrainBatch
from areal.api.columns import ROUTED_EXPERTS
from areal.api.config import MicroBatchSpec
from areal.api.config.train import DEFAULT_TOKENS_PER_MB
from areal.api.data import TEMPERATURES
from areal.api.errors import ConfigError, InputError
from areal.data.pack import split_by_tokens, take
from areal.data.prefix_tree import SortedRows, joint_keys, prefix_tree, sorted_rows
from areal.engine.mesh import RankGroup
from areal.engine.packed_attention import PackedLayout, own_tokens, packed_layout
from areal.engine.tree_attention import TreeLayout, tree_layout
from areal.engine.vision import ImageInput, VisionReader

# ----------------------------------------------------------------------------------------------------------------------
# Tokens that rows of a micro-batch share are computed once: the row that the model computes is their prefix tree.
#
# An output belongs to a token and the next one, so the tree has one for each of its tokens but the first ones of rows.
# Outputs are gathered for each row: losses do not know of trees.

MIN_SAVED = 0.15
"""Minimum fraction of tokens saved: calls of attention become more and smaller."""
SAVED_PER_CALL = 32
"""Minimum number of tokens saved for each length that rows share, which needs a call of attention."""


def rows_that_share(batch: TrainBatch, vision: VisionReader | None = None) -> SortedRows | None:
    """The rows of a batch in the order of their tree; None when sharing saves too little.

    Tokens are equal when all that the model reads of them, and of all before them, is equal.
    """
    rows = rows_of(batch, vision)
    saved, calls = int(rows.shared.sum()), len(np.unique(rows.shared)) - 1
    return rows if saved and saved >= max(MIN_SAVED * batch.num_tokens, SAVED_PER_CALL * calls) else None


def rows_of(batch: TrainBatch, vision: VisionReader | None = None) -> SortedRows:
    """The rows of a batch in the order of their tree."""
    bounds = batch.cu_seqlens.numpy()
    keys = batch.input_ids.numpy().astype(np.uint32)
    columns = [batch.columns[ROUTED_EXPERTS].numpy()] if ROUTED_EXPERTS in batch.columns else []
    if vision is not None and (images := vision.keys(batch)) is not None:
        columns.append(images)
    for spec in (CANDIDATE_IDS, TEMPERATURES):
        if spec in batch.columns:  # those of a token are at the one before it
            values = np.roll(batch.columns[spec].numpy(), 1, axis=0)
            values[bounds[:-1]] = 0
            columns.append(values)
    return sorted_rows(joint_keys([keys, *columns]) if columns else keys, bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """U tokens in place of the T tokens of the packed sequences, and E outputs."""

    source: Tensor
    """[U] int64: the token of the packed sequences that each token of the tree is."""
    heads: Tensor
    """[E] int64: the token of the tree whose state each output is computed from."""
    of_token: Tensor
    """[E] int64: the token of the packed sequences that each output belongs to."""
    rows: Tensor
    """[T] int64: the output of each token of the packed sequences."""
    counts: Tensor
    """[U] int64: the sequences that have each token."""
    layout: TreeLayout


TreeKey = tuple[bytes, ...]
"""The order of the rows, what they share, and their bounds."""


def tree_row(
    ordered: SortedRows,
    bounds: np.ndarray,
    device: torch.device,
    *,
    keeps_last: bool,
    kept: MutableMapping[TreeKey, TreeRow],
) -> TreeRow:
    """`keeps_last`: the last token of each sequence is computed too, though no other attends to it.

    `kept`: trees on this device with this `keeps_last`; the tree is taken from them, or added.
    """
    key = (ordered.order.tobytes(), ordered.shared.tobytes(), bounds.tobytes())
    tree = kept[key] = kept.get(key) or _tree_row(ordered, bounds, device, keeps_last)
    return tree


def _tree_row(ordered: SortedRows, bounds: np.ndarray, device: torch.device, keeps_last: bool) -> TreeRow:
    tree = prefix_tree(ordered, bounds)
    _, _, parents, firsts, sizes = np.array(tree.branches).T
    ends = firsts + sizes - 1
    computed = np.ones(len(tree.source), dtype=bool)
    computed[ends] = keeps_last or len(ends) == len(computed)
    place = np.cumsum(computed) - 1
    of_row = np.zeros(len(tree.places), dtype=bool)
    of_row[bounds[1:] - 1] = True
    has_output = np.ones(len(tree.source), dtype=bool)
    has_output[firsts[parents < 0]] = False
    number = np.cumsum(has_output) - 1
    last = bounds[1:] - 1
    rows = np.empty(len(tree.places), dtype=np.int64)
    inner = np.flatnonzero(~of_row)
    rows[inner] = number[tree.places[inner + 1]]
    _, some, which = np.unique(tree.places[last] if keeps_last else last * 0, return_index=True, return_inverse=True)
    rows[last] = number[-1] + 1 + which
    of_token = np.concatenate([tree.source[has_output] - 1, last[some]])
    states = tree.places[of_token]
    heads = np.where(computed[states], place[states], 0)
    counts = np.bincount(tree.places, minlength=len(tree.source))[computed]
    arrays = {"source": tree.source[computed], "heads": heads, "of_token": of_token, "rows": rows, "counts": counts}
    return TreeRow(
        **{name: torch.from_numpy(values).to(device) for name, values in arrays.items()},
        layout=tree_layout(tree, computed, bounds, device),
    )


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
    tree: TreeRow | None = None
    """Of a row that is a prefix tree: input_ids, position_ids, layout and routed_experts are of its tokens, labels,
    has_label, candidate_ids and temperatures of its outputs."""
    images: ImageInput | None = None


def plan_micro_batches(
    lengths: list[int],
    spec: MicroBatchSpec,
    reduce_max: Callable[[Tensor], Tensor],
    patches: Sequence[int] = (),
    rows: SortedRows | None = None,
) -> list[list[int]]:
    """Sequence indices of each micro-batch: equally many lists on every rank, some may be empty. A collective.

    `rows`: the limit of tokens counts one that sequences of a micro-batch share once, and those that share most are
    together.
    `reduce_max`: elementwise maximum of a float64 tensor over all ranks. An error on one rank is raised on every rank.
    `patches`: of the images of each sequence, for mb_spec.max_patches_per_mb.
    """
    granularity = spec.granularity
    limit = spec.max_tokens_per_mb or max(DEFAULT_TOKENS_PER_MB, *_sums(lengths, granularity))
    if spec.max_patches_per_mb and any(patches):  # a patch counts as the tokens that fill a pass as far as it does
        each = [-(-number * limit // spec.max_patches_per_mb) for number in patches]
        lengths, rows = [max(pair) for pair in zip(lengths, each, strict=True)], None
    longest = max(_sums(lengths, granularity))
    uneven = float(len(lengths) % granularity)
    fits = longest <= limit
    parts: list[list[int]] = []

    def split(min_parts: int) -> list[list[int]]:
        if rows is not None and granularity == 1:
            return rows.parts(limit, min_parts, spec.n_mbs_divisor)
        return split_by_tokens(lengths, limit, min_parts, spec.n_mbs_divisor, granularity)

    if not uneven and fits:
        parts = split(spec.n_mbs or 1)
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
        parts = split(int(num_parts))
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
        extremes = [float(ids.max()), -float(ids.min())] if ids.numel() else [0.0, 0.0]
        maxima = all_max(torch.cat([facts, torch.tensor(extremes, dtype=facts.dtype)]))
        highest, lowest = int(maxima[-2]), -int(maxima[-1])
        if highest >= vocab_size or lowest < 0:
            raise InputError(
                f"the train batch contains token id {highest if highest >= vocab_size else lowest}, the vocabulary "
                f"has {vocab_size} tokens: check the workflow, and that the tokenizer belongs to the model",
                code="data.token_id",
            )
        return maxima[:-2]

    return reduce_max


def make_micro_batch(
    batch: TrainBatch,
    indices: list[int],
    device: torch.device,
    *,
    rows: SortedRows | None = None,
    keeps_last: bool = True,
    trees: MutableMapping[TreeKey, TreeRow] | None = None,
) -> tuple[MicroBatch, ModelInput]:
    """The sequences `indices` on `device`, sorted by length: neighbours of equal length share attention calls.

    `rows`: of the batch; tokens that the sequences share are computed once. `keeps_last`, `trees`: see `tree_row`.
    """
    lengths = batch.sequence_lengths
    order = sorted(indices, key=lambda i: (lengths[i], i))
    chosen = batch if order == list(range(len(lengths))) else take(batch, order)
    tree = None
    if rows is not None:
        bounds, kept = chosen.cu_seqlens.long().numpy(), {} if trees is None else trees
        tree = tree_row(rows.among(order), bounds, device, keeps_last=keeps_last, kept=kept)
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
    return micro, model_input if tree is None else _of_tree(model_input, tree)


def _of_tree(inputs: ModelInput, tree: TreeRow) -> ModelInput:
    source, of_token = tree.source, tree.of_token
    return ModelInput(
        input_ids=inputs.input_ids[source],
        position_ids=inputs.position_ids[source],
        labels=inputs.labels[of_token],
        has_label=inputs.has_label[of_token],
        layout=replace(inputs.layout, tree=tree.layout),
        candidate_ids=None if inputs.candidate_ids is None else inputs.candidate_ids[of_token],
        temperatures=None if inputs.temperatures is None else inputs.temperatures[of_token],
        routed_experts=None if inputs.routed_experts is None else inputs.routed_experts[source],
        tree=tree,
    )


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
    if inputs.tree is not None and images is not None:
        source = inputs.tree.source
        images = images.of_tokens(lambda values: values[source])
        positions = None if positions is None else positions[:, source]
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
    local = partial(own_tokens, ranks=ranks)
    return ModelInput(
        input_ids=local(inputs.input_ids),
        position_ids=local(inputs.position_ids.movedim(-1, 0)).movedim(0, -1),
        labels=local(inputs.labels),
        has_label=local(inputs.has_label),
        layout=replace(layout, context=ranks, num_tokens=count),
        candidate_ids=None if inputs.candidate_ids is None else local(inputs.candidate_ids),
        temperatures=None if inputs.temperatures is None else local(inputs.temperatures, fill=1),
        routed_experts=None if inputs.routed_experts is None else local(inputs.routed_experts, fill=-1),
        images=None if inputs.images is None else inputs.images.of_tokens(local),
    )


def _to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    if device.type == "cpu":
        return batch

    def moved(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    return batch.mapped(
        token=moved, sequence=moved, cu_seqlens=moved(batch.cu_seqlens), sequence_index=moved(batch.sequence_index)
    )
