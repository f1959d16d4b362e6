"""The model, the memory of the KV cache, and the tensors of one step."""

from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from areal.api.columns import ExpertShape
from areal.api.errors import ConfigError
from areal.api.images import VisionLayout
from areal.inference.attention import (
    ATTENTION_NAME,
    AttentionPlan,
    AttentionProbe,
    DecodeGroup,
    LaterChunk,
    LayerCache,
    PromptGroup,
    register_attention,
)
from areal.inference.decode_graph import Capture, DecodeGraphs, DecodeRow, capture_cuda, dense_decoder, tried
from areal.inference.paged_kernel import PagedKernel, PagedRows, find_kernel, paged_rows
from areal.inference.scheduler import Chunk, Sequence, StepPlan
from areal.inference.vision import Vision, last_seen
from areal.models.attention import described_masks
from areal.models.output_head import has_float32_head, routers_of, unrounded_linear

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
        probe = self._probe()
        self.layer_shapes = [shape for _, shape in sorted(probe.shapes.items())]
        self.vocab_size = vocabulary_size(model)
        self._caches: list[LayerCache] = []
        self._row_bytes = max(
            BLOCK_SIZE * shape.num_kv_heads * (shape.key_size + shape.value_size) * self.dtype.itemsize
            for shape in self.layer_shapes
        )
        self._group_bytes = _CPU_GROUP_BYTES if self.device.type == "cpu" else _CUDA_GROUP_BYTES
        self._workspace = torch.empty(0, dtype=self.dtype, device=self.device)
        self._dense = dense_decoder(model, self.layer_shapes)
        self._paged = self._find_paged_kernel() if probe.is_plain else None
        self._graphs: DecodeGraphs | None = None

    def _find_paged_kernel(self) -> PagedKernel | None:
        shape, config = self.layer_shapes[0], self.model.config.get_text_config()
        if any(layer_shape != shape for layer_shape in self.layer_shapes) or shape.key_size != shape.value_size:
            return None
        heads = {"heads": config.num_attention_heads, "kv_heads": shape.num_kv_heads}
        return find_kernel(self.device, self.dtype, block_size=BLOCK_SIZE, **heads, size=shape.key_size)

    def _probe(self) -> AttentionProbe:
        """What all attention layers are, from a forward pass with one token."""
        probe = AttentionProbe()
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        expected = self.model.config.get_text_config().num_hidden_layers
        try:
            with torch.inference_mode(), described_masks(ATTENTION_NAME):
                inputs = {"input_ids": one, "position_ids": one, "attention_mask": one + 1}
                self.model(**inputs, use_cache=False, attention_plan=probe)
        except TypeError as error:  # its forward does not accept the keyword
            message = f"the native engine cannot serve {type(self.model).__name__}: {error}; use sglang or vllm"
            raise ConfigError(message, code="model.unsupported") from error
        if sorted(probe.shapes) != list(range(expected)):
            raise ConfigError(
                f"the native engine cannot serve {type(self.model).__name__}: {len(probe.shapes)} of its {expected} "
                "layers use the attention interface of transformers; use sglang or vllm",
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
        spare = 1 if self._paged else 0
        self._caches = [
            LayerCache(_zeros((num_blocks + spare, BLOCK_SIZE, *shape.sizes), self.dtype, self.device), shape)
            for shape in self.layer_shapes
        ]
        if self._experts is not None:
            sizes = (num_blocks, BLOCK_SIZE, self._experts.layers, self._experts.choices)
            self._routed = _zeros(sizes, _EXPERT_TYPES[self._experts.item_bytes], self.device)
            for layer, router in routers_of(self.model).items():
                router.register_forward_hook(partial(self._note_chosen, layer))
        capture = capture_of(self.device)
        if self._paged and capture and self._experts is None:  # a graph would not record the chosen experts
            self._graphs = self._tried_graphs(self._paged, capture, num_blocks)

    @torch.inference_mode()
    def _tried_graphs(self, kernel: PagedKernel, capture: Capture, spare_block: int) -> DecodeGraphs | None:
        def compute(inputs: Tensor, slots: Tensor, paged: PagedRows) -> Tensor:
            plan = AttentionPlan(caches=self._caches, slots=slots, decode=[], prompts=[], later=[], paged=paged)
            return self.model(
                input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, attention_plan=plan
            ).logits[0]

        graphs = DecodeGraphs(
            compute,
            kernel,
            capture,
            weights=self.model.parameters(),
            block_size=BLOCK_SIZE,
            spare_block=spare_block,
            device=self.device,
        )
        return tried(graphs)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Tensor, list[Sequence]]:
        """Compute a step. Returns logits [rows, vocabulary] and the sequence of each row."""
        self._copy_blocks(plan.copies_before)
        single = [chunk for chunk in plan.chunks if chunk.count == 1]
        longer = [chunk for chunk in plan.chunks if chunk.count > 1]
        if len(single) * self._row_bytes > self._group_bytes:
            single.sort(key=lambda chunk: chunk.start)
        longer.sort(key=self._kind_of)
        rows, expand, sequences = _sampled_rows(single + longer)
        logits = self._by_graph(single, rows) if single and not longer else None
        if logits is None:
            logits = self._computed(single, longer, rows)
        if expand is not None:
            logits = logits[torch.tensor(expand, device=self.device)]
        if self.vision is not None:
            logits = self.vision.without_banned(logits)
        self._copy_blocks(plan.copies_after)
        return logits, sequences

    def _by_graph(self, single: list[Chunk], rows: list[int]) -> Tensor | None:
        """The logits of `rows` of a step that only decodes; None without graphs."""
        if self._graphs is None or any(chunk.start < chunk.sequence.image_end for chunk in single):
            return None
        slots = self._slots_of(single)
        logits = self._graphs.logits(
            [
                DecodeRow(
                    token=chunk.sequence.token_ids[chunk.start],
                    position=chunk.start + chunk.sequence.position_shift,
                    length=chunk.start + 1,
                    slot=slot,
                    blocks=chunk.sequence.blocks[: chunk.start // BLOCK_SIZE + 1],
                )
                for chunk, slot in zip(single, slots, strict=True)
            ]
        )
        if logits is None or len(rows) == len(logits):
            return logits
        return logits[torch.tensor(rows, device=self.device)]

    def _computed(self, single: list[Chunk], longer: list[Chunk], rows: list[int]) -> Tensor:
        input_ids, positions = self._inputs(single, longer)
        attention_plan = AttentionPlan(
            caches=self._caches,
            slots=self._slots(single, longer),
            decode=[] if self._paged else self._decode_groups(single),
            prompts=[],
            later=[],
        )
        if self._paged and single:
            held = [chunk.sequence.blocks[: chunk.start // BLOCK_SIZE + 1] for chunk in single]
            attention_plan.paged = paged_rows(self._paged, held, [chunk.start + 1 for chunk in single], self.device)
        self._add_longer(attention_plan, longer, len(single))
        kept = None if len(rows) == input_ids.shape[1] else torch.tensor(rows, dtype=torch.int64, device=self.device)
        chunks = single + longer
        if self.vision is not None and any(chunk.start < chunk.sequence.image_end for chunk in chunks):
            logits = self.vision.logits(chunks, input_ids, positions, kept, attention_plan)
        elif self._dense is not None:
            logits = self._dense.logits(input_ids, positions, kept, attention_plan)
        else:
            logits = self.model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if kept is None else kept,
                attention_plan=attention_plan,
            ).logits[0]
        for layer, chosen in self._chosen.items():
            self._routed.flatten(0, 1)[attention_plan.slots, layer] = chosen.to(self._routed.dtype)
        return logits

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

    def _inputs(self, single: list[Chunk], longer: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Token ids and positions, [1, tokens] each; `Vision` replaces the positions up to the last image."""
        ids = [chunk.sequence.token_ids[chunk.start] for chunk in single]
        places = [chunk.start + chunk.sequence.position_shift for chunk in single]
        for chunk in longer:
            end, shift = chunk.start + chunk.count, chunk.sequence.position_shift
            ids += chunk.sequence.token_ids[chunk.start : end]
            places += range(chunk.start + shift, end + shift)
        both = torch.tensor((ids, places), device=self.device)
        return both[:1], both[1:]

    @staticmethod
    def _slots_of(single: list[Chunk]) -> list[int]:
        return [
            chunk.sequence.blocks[chunk.start // BLOCK_SIZE] * BLOCK_SIZE + chunk.start % BLOCK_SIZE for chunk in single
        ]

    def _slots(self, single: list[Chunk], longer: list[Chunk]) -> Tensor:
        """Cache slots of the new keys and values: block * BLOCK_SIZE + offset, int64 [tokens]."""
        slots = self._slots_of(single)
        if not longer:
            return torch.tensor(slots, device=self.device)
        parts = [np.array(slots, dtype=np.int64)]
        for chunk in longer:
            places = np.arange(chunk.start, chunk.start + chunk.count)
            blocks = np.array(chunk.sequence.blocks, dtype=np.int64)
            parts.append(blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE)
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def _decode_groups(self, single: list[Chunk]) -> list[DecodeGroup]:
        """Split the decode rows into groups that fit into the group memory; several groups are sorted by length."""
        groups: list[DecodeGroup] = []
        start = 0
        while start < len(single):
            end, width = start, 0
            while end < len(single):
                needed = max(width, single[end].start // BLOCK_SIZE + 1)
                if end > start and (end + 1 - start) * needed * self._row_bytes > self._group_bytes:
                    break
                end, width = end + 1, needed
            groups.append(self._decode_group(single, start, end, width))
            start = end
        return groups

    def _decode_group(self, single: list[Chunk], start: int, end: int, width: int) -> DecodeGroup:
        members = single[start:end]
        blocks: list[int] = []
        for chunk in members:
            held = chunk.sequence.blocks
            used = chunk.start // BLOCK_SIZE + 1
            blocks += held[:used] if len(held) > used else held
            blocks += [held[0]] * (width - used)
        lengths = [chunk.start + 1 for chunk in members]
        needed = len(blocks) * self._row_bytes // self.dtype.itemsize
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed, dtype=self.dtype, device=self.device)
        return DecodeGroup(
            start=start,
            end=end,
            blocks=torch.tensor(blocks, device=self.device),
            width=width,
            lengths=lengths,
            max_length=max(lengths),
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
                width = -(-(chunk.start + count) // BLOCK_SIZE)
                blocks = torch.tensor(chunk.sequence.blocks[:width], device=self.device)
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
        for cache in self._caches:
            cache.blocks.index_fill_(0, places, 0.0)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        pairs = torch.tensor(copies, device=self.device)
        if self._experts is not None:
            self._routed.index_copy_(0, pairs[:, 1], self._routed.index_select(0, pairs[:, 0]))
        for cache in self._caches:
            cache.blocks.index_copy_(0, pairs[:, 1], cache.blocks.index_select(0, pairs[:, 0]))


def _sampled_rows(chunks: list[Chunk]) -> tuple[list[int], list[int] | None, list[Sequence]]:
    """Rows of the flat batch whose logits are needed, their repetition for siblings, and their sequences."""
    rows: list[int] = []
    expand: list[int] = []
    sequences: list[Sequence] = []
    row = 0
    for chunk in chunks:
        row += chunk.count
        if not chunk.is_last:
            continue
        expand += [len(rows)] * (1 + len(chunk.siblings))
        rows.append(row - 1)
        sequences += [chunk.sequence, *chunk.siblings]
    return rows, expand if len(expand) > len(rows) else None, sequences


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    # numpy gets zeroed pages from the system, which use no memory before they are touched; torch would write zeros.
    flat = np.zeros(int(np.prod(sizes)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(sizes)
