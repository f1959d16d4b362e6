"""The model, the memory of the KV cache, and the tensors of one step."""

from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from areal.api.columns import ExpertShape
from areal.api.errors import ConfigError
from areal.api.images import VisionLayout
from areal.inference.adapters import AdapterProducts
from areal.inference.attention import (
    ATTENTION_NAME,
    AttentionPlan,
    AttentionProbe,
    DecodeGroup,
    LaterChunk,
    LayerCache,
    PromptGroup,
    padded_keys,
    register_attention,
)
from areal.inference.decode_graph import EQUAL_ROWS, Capture, DecodeGraphs, capture_cuda, dense_decoder, tried
from areal.inference.decode_rows import DecodeInputs, DecodeRows, SampledRows
from areal.inference.layer_states import LayerStates, Span, zeroed_memory
from areal.inference.paged_kernel import PagedKernel, find_kernel, paged_rows
from areal.inference.scheduler import Chunk, Sequence, StepPlan
from areal.inference.vision import Vision, last_seen
from areal.models.attention import described_masks
from areal.models.output_head import has_float32_head, routers_of, unrounded_linear
from areal.models.stored_form import without_progress_bar

# ----------------------------------------------------------------------------------------------------------------------
# The model of a native server: loading, its vocabulary, and faster modules with equal results.


def load_model(path: Path, dtype: torch.dtype, device: str, *, from_scratch: bool = False) -> PreTrainedModel:
    """The model in `path`, whose decoder uses our attention; `from_scratch`: with random weights."""
    if not (path / "config.json").is_file():
        message = f"model_path={path} has no config.json: set it to the folder of a Hugging Face checkpoint"
        raise ConfigError(message, code="model.not_found")
    try:
        config = AutoConfig.from_pretrained(path)
        auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
        if from_scratch:
            model = auto.from_config(config, dtype=dtype)
        else:
            with without_progress_bar():
                model = auto.from_pretrained(path, config=config, dtype=dtype)
        use_paged_attention(model)
    except (ValueError, OSError) as error:
        message = f"model_path={path}: transformers cannot load it ({error})"
        raise ConfigError(message, code="model.not_loadable") from error
    model.to(torch.device(device))  # pyright: ignore[reportArgumentType] - its stub lacks the device form
    return model.eval().requires_grad_(False)


def use_paged_attention(model: PreTrainedModel) -> None:
    """Our attention in the decoder; a vision tower, whose tokens are never cached, uses that of torch."""
    register_attention()
    has_tower = "vision_config" in model.config.sub_configs
    model.set_attn_implementation(
        {"text_config": ATTENTION_NAME, "vision_config": "sdpa"} if has_tower else ATTENTION_NAME
    )


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of token ids of the model."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def fuse_norms(model: nn.Module) -> int:
    """Use the fused RMS norm kernel of torch on CPU for norms where it is bitwise equal. Returns their number.

    The seven operations of an unfused norm take a tenth of the decode step of a small model.
    """
    num_fused = 0
    for module in model.modules():
        weight, epsilon = module.__dict__.get("_parameters", {}).get("weight"), module.__dict__.get("variance_epsilon")
        if not type(module).__name__.endswith("RMSNorm") or weight is None or epsilon is None:
            continue
        fused = partial(_rms_norm, module, epsilon)
        trial = torch.linspace(-3.0, 5.0, 7 * weight.numel(), dtype=weight.dtype).view(7, -1).sin()
        with torch.inference_mode():
            if weight.device.type == "cpu" and torch.equal(fused(trial), module(trial)):
                module.forward = fused
                num_fused += 1
    return num_fused


def _rms_norm(module: nn.Module, epsilon: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return rms_norm(hidden_states, weight.shape, weight, epsilon)


def use_float32_head(model: PreTrainedModel, head_dtype: str) -> None:
    """Compute logits as native.head_dtype says."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and has_float32_head(head_dtype, model.device, model.dtype):
        head.forward = partial(_unrounded_head, head)


def _unrounded_head(head: nn.Linear, input: Tensor) -> Tensor:
    return unrounded_linear(input.flatten(0, -2), head.weight, head.bias).unflatten(0, input.shape[:-1])


def _score(logits: Tensor, scored: list[tuple[Sequence, int]]) -> None:
    """Add what logits [rows, vocabulary] say about tokens of prompts to the scores of their sequences."""
    logprobs = logits.float().log_softmax(dim=-1)
    tokens = torch.tensor([sequence.token_ids[token] for sequence, token in scored], device=logits.device)
    of_tokens = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    for row, (sequence, token), logprob in zip(logprobs, scored, of_tokens, strict=True):
        scoring, scores = sequence.scoring, sequence.scores
        assert scoring is not None
        scores.logprobs.append(logprob)
        if scoring.top_k:
            values, ids = row.topk(min(scoring.top_k, len(row)))
            scores.top.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
        if scoring.num_draws:
            sums = (row / max(sequence.params.temperature, 1e-6)).softmax(-1).cumsum(-1).cpu()
            generator = torch.Generator().manual_seed((sequence.seed + token) % 2**63)
            ids = torch.searchsorted(sums, torch.rand(scoring.num_draws, generator=generator) * sums[-1], right=True)
            ids = ids.clamp(max=len(row) - 1).to(row.device)
            scores.draws.append(list(zip(ids.tolist(), row[ids].tolist(), strict=True)))
        if token <= len(scoring.targets):
            ids = torch.tensor(scoring.targets[token - 1], dtype=torch.int64, device=row.device)
            scores.targets.append(row[ids.clamp(min=0)].masked_fill(ids < 0, 0.0).tolist())


BLOCK_SIZE = 16
_EXPERT_TYPES = {1: torch.uint8, 2: torch.int16}
_CPU_GROUP_BYTES = 1 << 20
"""Size of the gathered keys and values of one decode group, so that they stay in the cache of a CPU core."""
_CUDA_GROUP_BYTES = 1 << 28


def capture_of(device: torch.device) -> Capture | None:
    """How decode steps become graphs on a device; None where they do not."""
    return capture_cuda if device.type == "cuda" else None


class ModelRunner:
    """Computes the logits of a planned step."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head_dtype: str = "auto",
        experts: ExpertShape | None = None,
        layout: VisionLayout | None = None,
    ) -> None:
        """`head_dtype`: see native.head_dtype. `experts`: record the chosen experts of each cached token. `layout`: of
        a model that takes images."""
        self.model = model
        self.vision = None if layout is None else Vision(model, layout)
        self._experts, self.records_experts = experts, experts is not None
        self._chosen: dict[int, Tensor] = {}
        self._routed = torch.empty(0)
        fuse_norms(model)
        use_float32_head(model, head_dtype)
        self.device = model.device
        self.dtype = model.dtype
        self.states = LayerStates(model)
        probe = self._probe()
        self._attention_layers = sorted(probe.shapes)
        self.layer_shapes = [probe.shapes[layer] for layer in self._attention_layers]
        self.vocab_size = vocabulary_size(model)
        self._caches: dict[int, LayerCache] = {}
        self._row_bytes = max(
            BLOCK_SIZE * shape.num_kv_heads * (shape.key_size + shape.value_size) * self.dtype.itemsize
            for shape in self.layer_shapes
        )
        self._group_bytes = _CPU_GROUP_BYTES if self.device.type == "cpu" else _CUDA_GROUP_BYTES
        self._workspace = torch.empty(0, dtype=self.dtype, device=self.device)
        self._dense = None if self.states.indices else dense_decoder(model, self.layer_shapes)
        self.adapters = AdapterProducts(model, self.states)
        for product in self._dense.products if self._dense else ():
            product.adapters = self.adapters
        self._paged = self._find_paged_kernel() if probe.is_plain else None
        self._graphs: DecodeGraphs | None = None
        self._rows = DecodeRows(BLOCK_SIZE, self.device, spare_block=0)
        is_exact = self.device.type == "cpu" and self.dtype == torch.float32 and not self.states.indices
        self._least_with_adapters = EQUAL_ROWS if is_exact else 1
        self._least_rows = self._dense.equal_rows() if is_exact and self._dense else self._least_with_adapters
        """So that an answer depends neither on the requests beside it nor on what is taken from the cache."""
        self._adapters_of_rows: list[int] | None = None
        """Of the step; None: it has none."""
        self._is_in_rows = False
        """The logits of the last step were those of all decode rows, and no others."""

    def _find_paged_kernel(self) -> PagedKernel | None:
        shape, config = self.layer_shapes[0], self.model.config.get_text_config()
        if any(layer_shape != shape for layer_shape in self.layer_shapes) or shape.key_size != shape.value_size:
            return None
        heads = {"heads": config.num_attention_heads, "kv_heads": shape.num_kv_heads}
        return find_kernel(self.device, self.dtype, block_size=BLOCK_SIZE, **heads, size=shape.key_size)

    def _probe(self) -> AttentionProbe:
        """What all attention layers are, from a forward pass with one token."""
        probe = AttentionProbe()
        zero = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        config = self.model.config.get_text_config()
        try:
            with torch.inference_mode(), described_masks(ATTENTION_NAME):
                inputs = {"input_ids": zero, "position_ids": zero, "attention_mask": zero + 1}
                self.model(**inputs, use_cache=False, attention_plan=probe)
        except TypeError as error:  # its forward does not accept the keyword
            message = f"the native engine cannot serve {type(self.model).__name__}: {error}; use sglang or vllm"
            raise ConfigError(message, code="model.unsupported") from error
        count, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or []
        plain = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}
        if {*probe.shapes, *self.states.indices} != set(range(count)) - plain or not probe.shapes:
            raise ConfigError(
                f"the native engine cannot serve {type(self.model).__name__}: {len(probe.shapes)} of its {count} "
                f"layers use the attention interface of transformers, {len(self.states.indices)} its caches of states; "
                "use sglang or vllm",
                code="model.unsupported",
            )
        return probe

    @property
    def bytes_per_token(self) -> int:
        """Cache memory of one token over all layers."""
        sizes = (shape.num_kv_heads * (shape.key_size + shape.value_size) for shape in self.layer_shapes)
        return sum(sizes) * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the memory of the cache. On CPU, untouched pages use no memory."""
        self._spare_block = num_blocks
        self._rows = DecodeRows(BLOCK_SIZE, self.device, spare_block=num_blocks)
        self._caches = {
            layer: LayerCache(zeroed_memory((num_blocks + 1, BLOCK_SIZE, *shape.sizes), self.dtype, self.device), shape)
            for layer, shape in zip(self._attention_layers, self.layer_shapes, strict=True)
        }
        if self._experts is not None:
            sizes = (num_blocks + 1, BLOCK_SIZE, self._experts.layers, self._experts.choices)
            self._routed = zeroed_memory(sizes, _EXPERT_TYPES[self._experts.item_bytes], self.device)
            for layer, router in routers_of(self.model).items():
                router.register_forward_hook(partial(self._note_chosen, layer))
        capture = capture_of(self.device)
        # a graph would record neither the chosen experts nor states
        if self._paged and capture and self._experts is None and not self.states.indices:
            self._graphs = self._tried_graphs(self._paged, capture)

    @torch.inference_mode()
    def _tried_graphs(self, kernel: PagedKernel, capture: Capture) -> DecodeGraphs | None:
        def compute(inputs: DecodeInputs) -> Tensor:
            longest = inputs.blocks.shape[1] * BLOCK_SIZE
            paged = paged_rows(kernel, inputs.blocks, inputs.lengths, longest)
            plan = AttentionPlan(caches=self._caches, slots=inputs.slots, decode=[], prompts=[], later=[], paged=paged)
            return self.model(
                input_ids=inputs.tokens[None], position_ids=inputs.positions[None], use_cache=False, attention_plan=plan
            ).logits[0]

        return tried(
            DecodeGraphs(compute, capture, weights=(*self.model.parameters(), *self.model.buffers())), self._rows.inputs
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor, SampledRows]:
        """Compute a step. Returns logits [rows, vocabulary] and what the sampler needs."""
        single = {chunk.sequence: chunk for chunk in plan.chunks if chunk.count == 1}
        longer = [chunk for chunk in plan.chunks if chunk.count > 1]
        longer.sort(key=self._kind_of)
        self._rows.update(plan, list(single))
        order = self._order()
        if self.states.indices:
            self._begin_states(plan, order, longer)
        chunks = [] if self.vision is None else self._row_chunks(order) + longer
        has_images = any(chunk.start < chunk.sequence.image_end for chunk in chunks)
        logits = None
        self._adapters_of_rows = self._row_adapters(order, longer)
        if self._graphs is not None and not longer and not has_images and self._adapters_of_rows is None:
            self.adapters.begin(None, 0, None)  # a graph that is captured now has no adapters
            logits = self._graphs.logits(self._rows.inputs)
            logits = None if logits is None else logits[: len(self._rows)]
        self._is_in_rows = not plan.chunks
        if self._is_in_rows:
            sampled = self._rows.sampled()
            if logits is None:
                kept = None if order is None else torch.from_numpy(order).argsort().to(self.device)
                logits = self._computed(order, [], chunks if has_images else [], kept)
        else:
            rows, sequences, ahead, expand = self._sampled_rows(order, single, longer)
            sampled = SampledRows.of(sequences, self.device, ahead)
            num_sampled, scored = len(rows), self._scored_rows(order, single, longer)
            rows += [row for row, _, _ in scored]
            index = torch.tensor(rows, dtype=torch.int64, device=self.device)
            logits = (
                self._computed(order, longer, chunks if has_images else [], index) if logits is None else logits[index]
            )
            if scored:
                _score(logits[num_sampled:], [(sequence, token) for _, sequence, token in scored])
                logits = logits[:num_sampled]
            if expand is not None:
                logits = logits[torch.tensor(expand, device=self.device)]
        if self.vision is not None:
            logits = self.vision.without_banned(logits)
        self._copy_blocks(plan.copies_after)
        for chunk in plan.chunks if self.states.indices else ():
            self.states.copy(chunk.sequence, chunk.siblings)
        self.states.save(plan.snapshots_after)
        return logits, sampled

    def _row_adapters(self, order: np.ndarray | None, longer: list[Chunk]) -> list[int] | None:
        if not self.adapters.groups:
            return None
        rows = self._rows.sequences
        sequences = rows if order is None else [rows[number] for number in order]
        counts = [1] * len(rows) + [chunk.count for chunk in longer]
        return self.adapters.numbers([*sequences, *(chunk.sequence for chunk in longer)], counts)

    def _begin_states(self, plan: StepPlan, order: np.ndarray | None, longer: list[Chunk]) -> None:
        rows = self._rows.sequences
        spans = [Span(rows if order is None else [rows[number] for number in order], 1, is_first=False)] if rows else []
        for (is_later, count, border), members in groupby(
            longer, key=lambda chunk: (chunk.start > 0, chunk.count, chunk.border)
        ):
            chunks = list(members)
            slots = [chunk.snapshot for chunk in chunks if chunk.snapshot is not None]
            spans.append(Span([chunk.sequence for chunk in chunks], count, not is_later, border, slots))
        copied = {chunk.sequence: chunk.begins_from for chunk in plan.chunks if chunk.begins_from is not None}
        self.states.begin(spans, [chunk.sequence for chunk in plan.chunks if chunk.start == 0], copied)

    def take_weights(self) -> None:
        """The weights of the model have changed."""
        if self._dense is not None:
            self._dense.repack()
        if self.vision is not None:
            self.vision.forget()

    def take_tokens(self, tokens: Tensor) -> None:
        """The tokens that were drawn from the logits of the last step."""
        if self._is_in_rows:
            self._rows.take_tokens(tokens)

    def _order(self) -> np.ndarray | None:
        """The decode rows by length, where they are split into groups of similar lengths; None = as they are."""
        if self._paged or len(self._rows) * self._row_bytes <= self._group_bytes:
            return None
        return self._rows.lengths.argsort(kind="stable")

    def _sampled_rows(
        self, order: np.ndarray | None, single: dict[Sequence, Chunk], longer: list[Chunk]
    ) -> tuple[list[int], list[Sequence], list[int], list[int] | None]:
        """Rows of the flat batch whose logits are needed, the sequences that sample from them, behind how many tokens
        of their drafts, and the repetition of the rows for siblings."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        ahead: list[int] = []
        expand: list[int] = []

        def add(row: int, sequence: Sequence, siblings: list[Sequence], drafted: int = 0) -> None:
            sequences.extend((sequence, *siblings))
            ahead.extend([drafted] * (1 + len(siblings)))
            expand.extend([len(rows)] * (1 + len(siblings)))
            rows.append(row)

        for row, number in enumerate(range(len(self._rows)) if order is None else order):
            sequence = self._rows.sequences[number]
            chunk = single.get(sequence)
            if chunk is None or chunk.is_last:
                add(row, sequence, [] if chunk is None else chunk.siblings)
        row = len(self._rows) - 1
        for chunk in longer:
            row += chunk.count
            if chunk.is_last:
                length = len(chunk.sequence.draft)
                for drafted in range(length + 1):
                    add(row - length + drafted, chunk.sequence, chunk.siblings, drafted)
        return rows, sequences, ahead, expand if len(expand) > len(rows) else None

    def _scored_rows(
        self, order: np.ndarray | None, single: dict[Sequence, Chunk], longer: list[Chunk]
    ) -> list[tuple[int, Sequence, int]]:
        """Rows whose logits score the next token of a prompt, the sequence, and the number of that token."""
        if all(sequence.scoring is None for sequence in (*single, *(chunk.sequence for chunk in longer))):
            return []
        rows = self._rows.sequences
        some = rows if order is None else [rows[number] for number in order]
        chunks: list[Chunk | None] = [*(single.get(sequence) for sequence in some), *longer]
        scored: list[tuple[int, Sequence, int]] = []
        row = 0
        for chunk in chunks:
            if chunk is not None:
                sequence, shift = chunk.sequence, chunk.start + 1 - row
                first, end = max(sequence.scores_from, chunk.start + 1), chunk.start + 1 + chunk.count
                scored += [(token - shift, sequence, token) for token in range(first, min(end, sequence.num_prompt))]
            row += 1 if chunk is None else chunk.count
        return scored

    def _row_chunks(self, order: np.ndarray | None) -> list[Chunk]:
        sequences = self._rows.sequences
        some = sequences if order is None else [sequences[row] for row in order]
        return [Chunk(sequence, sequence.num_computed - 1, 1) for sequence in some]

    def _computed(
        self, order: np.ndarray | None, longer: list[Chunk], chunks: list[Chunk], kept: Tensor | None
    ) -> Tensor:
        """The logits of the rows `kept` of a step without a graph. `chunks`: those of a step with images."""
        input_ids, positions, slots = self._inputs(order, longer)
        plan = AttentionPlan(caches=self._caches, slots=slots, decode=[], prompts=[], later=[])
        if count := len(self._rows):
            if self._paged:
                blocks, lengths = self._rows.inputs.blocks[:count], self._rows.inputs.lengths[:count]
                plan.paged = paged_rows(self._paged, blocks, lengths, int(self._rows.lengths.max()))
            else:
                plan.decode = self._decode_groups(order)
        self._add_longer(plan, longer, count)
        if kept is not None:
            count = len(kept)
            kept = pad(kept, (0, self._lacking(count)))
        self.adapters.begin(self._adapters_of_rows, len(slots), kept)
        if chunks and self.vision is not None:
            logits = self.vision.logits(chunks, input_ids, positions, kept, plan)
        elif self._dense is not None:
            logits = self._dense.logits(input_ids, positions, kept, plan)
        else:
            logits = self.model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if kept is None else kept,
                attention_plan=plan,
            ).logits[0]
        for layer, chosen in self._chosen.items():
            self._routed.flatten(0, 1)[plan.slots, layer] = chosen.to(self._routed.dtype)
        return logits[:count]

    def _note_chosen(
        self, layer: int, router: nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._chosen[layer] = outputs[2]

    def keep_experts(self, sequence: Sequence) -> None:
        """Add the chosen experts of the tokens in the cache to the record of a sequence, before its blocks are freed.

        Those of tokens that were computed again, after the sequence had lost its cache, remain as they were.
        """
        if sequence.experts_start is None or self._experts is None:
            return
        first = sequence.experts_start + len(sequence.experts)
        end = min(sequence.num_computed, len(sequence.token_ids) - 1)
        if first >= end or not sequence.blocks:
            return
        blocks = torch.tensor(sequence.blocks[: -(-end // BLOCK_SIZE)], device=self.device)
        rows = self._routed[blocks].flatten(0, 1)[first:end].cpu().numpy()
        sequence.experts += [row.tobytes() for row in rows]

    def _inputs(self, order: np.ndarray | None, longer: list[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and positions, [1, tokens] each, and cache slots [tokens]; `Vision` replaces the positions up to
        the last image."""
        rows, count = self._rows.inputs, len(self._rows)
        both = torch.stack((rows.tokens[:count], rows.positions[:count]))
        slots = rows.slots[:count].clone()  # the tensors change with the next step
        if order is not None:
            index = torch.from_numpy(order).to(self.device)
            both, slots = both[:, index], slots[index]
        if longer:
            parts: list[np.ndarray] = []
            for chunk in longer:
                end = chunk.start + chunk.count
                places = np.arange(chunk.start, end)
                blocks = np.array(chunk.sequence.blocks, dtype=np.int64)[places // BLOCK_SIZE]
                shifted = places + chunk.sequence.position_shift
                ids = chunk.sequence.token_ids[chunk.start : end] + chunk.sequence.draft
                parts.append(np.stack((ids, shifted, blocks * BLOCK_SIZE + places % BLOCK_SIZE)))
            more = torch.from_numpy(np.concatenate(parts, axis=1)).to(self.device)
            both, slots = torch.cat((both, more[:2]), dim=1), torch.cat((slots, more[2]))
        if lacking := self._lacking(len(slots)):
            both, slots = pad(both, (0, lacking)), pad(slots, (0, lacking), value=self._spare_block * BLOCK_SIZE)
        return both[:1], both[1:], slots

    def _lacking(self, count: int) -> int:
        """Rows with which a step of `count` is padded."""
        least = self._least_rows if self._adapters_of_rows is None else self._least_with_adapters
        return max(least - count, 0)

    def _decode_groups(self, order: np.ndarray | None) -> list[DecodeGroup]:
        """Split the decode rows into groups that fit into the group memory."""
        count = len(self._rows)
        lengths = self._rows.lengths.copy() if order is None else self._rows.lengths[order]
        widths = padded_keys(lengths) // BLOCK_SIZE
        table = self._rows.inputs.blocks[:count]
        if order is not None:
            table = table[torch.from_numpy(order).to(self.device)]
        if (lacking := int(widths.max()) - table.shape[1]) > 0:  # the table has a power of two
            table = pad(table, (0, lacking), value=self._spare_block)
        groups: list[DecodeGroup] = []
        most = self._group_bytes // self._row_bytes
        start = 0
        while start < count:
            widest = np.maximum.accumulate(widths[start:])
            size = max(1, int((widest * np.arange(1, len(widest) + 1) <= most).sum()))
            end = start + size
            groups.append(self._decode_group(start, table[start:end, : widest[size - 1]], lengths[start:end]))
            start = end
        return groups

    def _decode_group(self, start: int, table: Tensor, lengths: np.ndarray) -> DecodeGroup:
        needed = table.numel() * self._row_bytes // self.dtype.itemsize
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=self.dtype, device=self.device)
        return DecodeGroup(
            start=start,
            end=start + len(table),
            blocks=table.flatten(),
            width=table.shape[1],
            lengths=lengths,
            max_length=table.shape[1] * BLOCK_SIZE,
            workspace=self._workspace,
        )

    def _add_longer(self, plan: AttentionPlan, longer: list[Chunk], row: int) -> None:
        for (is_later, count), members in groupby(longer, key=self._kind_of):
            chunks = list(members)
            if not is_later:
                plan.prompts.append(PromptGroup(start=row, num_sequences=len(chunks), count=count))
                row += len(chunks) * count
                continue
            for chunk in chunks:
                width = padded_keys(chunk.start + count) // BLOCK_SIZE
                held = chunk.sequence.blocks[:width]
                blocks = torch.tensor(held + held[:1] * (width - len(held)), device=self.device)
                seen = torch.tensor(last_seen(chunk), device=self.device) if self._sees_images(chunk) else None
                plan.later.append(
                    LaterChunk(start=row, count=count, num_before=chunk.start, blocks=blocks, last_seen=seen)
                )
                row += count

    def _kind_of(self, chunk: Chunk) -> tuple[bool, int]:
        """(whether its attention is more than that of a prompt's beginning, count). Equal ones are computed at once."""
        return chunk.start > 0 or self._sees_images(chunk), chunk.count

    def _sees_images(self, chunk: Chunk) -> bool:
        """Whether some tokens of a chunk attend to later ones."""
        is_possible = self.vision is not None and self.vision.layout.is_bidirectional
        return is_possible and chunk.start < chunk.sequence.image_end

    def clear_blocks(self, blocks: list[int]) -> None:
        """Set the keys and values of blocks to zero. A NaN behind the end of a sequence would reach its attention."""
        places = torch.tensor(blocks, device=self.device)
        for cache in self._caches.values():
            cache.blocks.index_fill_(0, places, 0.0)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.device)
        if self._experts is not None:
            self._routed.index_copy_(0, pairs[:, 1], self._routed.index_select(0, pairs[:, 0]))
        for cache in self._caches.values():
            cache.blocks.index_copy_(0, pairs[:, 1], cache.blocks.index_select(0, pairs[:, 0]))
