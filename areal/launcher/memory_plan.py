"""Memory of a trainer rank by part, from the sizes of its models, and whether the cards and the host have it.

The activations are those that autograd keeps in the decoder blocks of Llama, Qwen2 and Qwen3 in transformers (counted
by `saved_tensors_hooks`); the peak is compared with tracked allocations in tests/launcher/test_memory_plan.py.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from areal.api.allocation import ParallelDims
from areal.api.config import BaseExperimentConfig, PPOConfig, TrainEngineConfig
from areal.api.config.train import ALL_LINEAR, DEFAULT_TOKENS_PER_MB, FLOAT8_MULTIPLE, LoRAConfig, is_target
from areal.fleet.native import state_problems
from areal.launcher.job import LaunchPlan, num_shards
from areal.models.checkpoint_files import PUBLISHED_FILE_BYTES
from areal.models.model_shape import ModelShape
from areal.models.vision_layout import FAMILIES, read_vision_layout

LIBRARY_BYTES = 2**29
"""Python, torch and transformers in one process."""
CARD_SHARE = 0.95
"""The rest is for the CUDA context and fragments."""
_PINNED = 1.5  # Torch rounds each piece of memory that a GPU copies to up to a power of two bytes.
_BLOCK_LOGITS = {True: 2**26, False: 2**22}
"""The rank has a GPU -> logits that the head computes at a time (`areal.engine.linear_logprobs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole blocks, and the embedding with the head, that FSDP gathers for a pass, with their gradients."""
    activations: int
    """Activations of the largest micro-batch, for the model that needs most of them."""
    publishing: int
    """The largest weight and one bucket; not at the same time as activations."""
    host_copy: int
    """Memory of the host into which recovery checkpoints are copied (recover.async_save)."""

    @property
    def peak(self) -> int:
        state = self.weights + self.gradients + self.optimizer
        return state + max(self.gathered + self.activations, self.publishing)


def rank_memory(
    models: Sequence[tuple[TrainEngineConfig, ModelShape]],
    *,
    dims: ParallelDims,
    tokens: int,
    on_gpu: bool,
    bucket_bytes: int = 0,
    accumulates: bool = False,
    backend: str = "fsdp",
    patches: int = 0,
) -> RankMemory:
    """The peak of a rank that holds its part of these models. `tokens`: of the largest micro-batch; `patches`: of its
    images. `accumulates`: an optimiser step has several."""
    weights = gradients = optimizer = gathered = activations = largest = copied = 0
    for model, shape in models:
        width = 2 if model.compute_dtype == "bfloat16" else 4
        needed = activation_bytes(model, shape, -(-tokens // dims.cp), on_gpu=on_gpu, tensor_ranks=dims.tp)
        activations = max(activations, needed + tower_bytes(model, shape, patches))
        largest = max(largest, shape.vocabulary * shape.hidden * width)
        if backend == "megatron":
            state = _megatron_state(model, shape, dims, on_gpu=on_gpu)
            weights, gradients, optimizer = (a + b for a, b in zip((weights, gradients, optimizer), state, strict=True))
            if model.optimizer is not None:
                copied += int(shape.parameters * (4 + model.optimizer.state_bytes)) // dims.world_size
            continue
        trained, ranks = model.optimizer is not None, num_shards(model, dims)
        is_away = on_gpu and model.fsdp.offload_params
        tower = 0 if shape.vision is None else shape.vision.parameters * dims.tp  # tensor ranks have it whole
        size = shape.text_parameters + tower
        kept = 4 if model.has_masters and model.lora is None else width
        weights += 0 if is_away else size * kept // ranks
        if model.optimizer is not None:
            parameters = size if trains_tower(model, shape) else shape.text_parameters
            learned = parameters if model.lora is None else adapter_parameters(model.lora, shape)
            weights += 0 if model.lora is None or is_away else learned * 4 // ranks
            keeps_whole = accumulates and ranks > 1 and model.fsdp.gradient_sync == "last"
            state = model.optimizer.state_bytes
            if keeps_whole or not is_away:
                gradients += learned * (4 if model.has_masters else width) // (dims.tp if keeps_whole else ranks)
            if not is_away and not (on_gpu and model.fsdp.offload_optimizer):
                optimizer += int(learned * state) // ranks
            copied += int(learned * ((4 if model.has_masters else width) + state)) // dims.world_size
        if ranks > 1 or (trained and width < 4):
            alone = not on_gpu and ranks == dims.tp * dims.pp  # then the engine gathers all weights once
            learns = trained and model.lora is None
            block_width = 1 if _gathers_in_8_bits(model, shape, dims) else width
            size = _gathered(shape, width, block_width, trained=learns, at_once=alone)
            gathered = max(gathered, size // dims.tp)
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=activations,
        publishing=largest + bucket_bytes,
        host_copy=int(copied * (_PINNED if on_gpu else 1)),
    )


def _megatron_state(
    model: TrainEngineConfig, shape: ModelShape, dims: ParallelDims, *, on_gpu: bool
) -> tuple[int, int, int]:
    """Bytes of the weights, gradients and optimiser state of the first stage.

    Each data rank has whole weights and gradients; they share the optimiser state with ddp.use_distributed_optimizer.
    """
    options, width = model.megatron, 2 if model.compute_dtype == "bfloat16" else 4
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.intermediate
    table = shape.vocabulary * shape.hidden
    tables = 2 if dims.pp == 1 and not shape.tied else 1
    blocks = shape.parameters - experts - table * (1 if shape.tied else 2)
    parameters = (blocks // dims.pp + tables * table) // dims.tp + experts // (dims.ep * dims.etp * dims.pp)
    if model.optimizer is None:
        return parameters * width, 0, 0
    in_float32 = options.ddp.grad_reduce_in_fp32 and model.grad_reduce_dtype == "float32"
    moments = 0.0 if on_gpu and options.offload_optimizer else model.optimizer.state_bytes
    is_shared = options.ddp.use_distributed_optimizer and model.optimizer.type != "sgd"
    ranks = dims.dp * dims.cp if is_shared else 1
    return (
        parameters * width,
        parameters * (4 if in_float32 else width),
        int(parameters * (moments + (4 if width < 4 else 0))) // ranks,
    )


def adapter_parameters(lora: LoRAConfig, shape: ModelShape) -> int:
    """Trained parameters with adapters. A pattern counts as all-linear; modules_to_save are counted by known names."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (shape.hidden, queries),
        "k_proj": (shape.hidden, keys),
        "v_proj": (shape.hidden, keys),
        "o_proj": (queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    targets = (
        sizes if isinstance(lora.target_modules, str) or lora.target_modules == [ALL_LINEAR] else lora.target_modules
    )
    chosen = [size for name, size in sizes.items() if name in targets and not is_target(name, lora.exclude_modules)]
    whole = sum(shape.vocabulary * shape.hidden for name in ("lm_head", "embed_tokens") if name in lora.modules_to_save)
    return whole + shape.layers * lora.rank * sum(map(sum, chosen))


def trains_tower(model: TrainEngineConfig, shape: ModelShape) -> bool:
    """Whether a vision tower has gradients: no pattern of `freeze` fits all of its modules."""
    family = FAMILIES.get(shape.family)
    if shape.vision is None or family is None or model.optimizer is None or model.lora is not None:
        return False
    names = [f"model.{module}." for module in family.modules]
    return not all(any(re.search(pattern, name) for pattern in model.freeze) for name in names)


def tower_bytes(model: TrainEngineConfig, shape: ModelShape, patches: int) -> int:
    """What autograd keeps of the patches of a micro-batch in the vision tower: tensor and context ranks have all."""
    vision = shape.vision
    if vision is None:
        return 0
    width = 2 if model.compute_dtype == "bfloat16" else 4
    block = width * ((14 if vision.rotary else 8) * vision.hidden + (4 if vision.gated else 2) * vision.intermediate)
    if not trains_tower(model, shape):
        return patches * block  # of one block
    if model.gradient_checkpointing and model.checkpointing != "selective":
        return patches * (vision.layers * vision.hidden * width + block)
    return patches * vision.layers * block


def activation_bytes(
    model: TrainEngineConfig, shape: ModelShape, tokens: int, *, on_gpu: bool, tensor_ranks: int = 1
) -> int:
    """What autograd keeps of this rank's tokens of one micro-batch, and the largest temporaries of its passes."""
    width = 2 if model.compute_dtype == "bfloat16" else 4
    shape = replace(
        shape,
        heads=-(-shape.heads // tensor_ranks),
        kv_heads=-(-shape.kv_heads // tensor_ranks),
        intermediate=-(-shape.intermediate // tensor_ranks),
        vocabulary=-(-shape.vocabulary // tensor_ranks),
    )
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    read = keys if on_gpu else queries  # without a kernel for groups of heads, keys and values are repeated
    block = width * (4 * shape.intermediate + 2 * queries + 2 * read)
    block += shape.hidden * (6 * width + (4 if width < 4 else 0))  # norms compute in float32
    if shape.query_key_norm:
        block += (queries + keys) * (2 * width if width == 4 else 6)
    passing = width * 2 * shape.intermediate  # gradients inside the block whose backward pass runs
    logits = 2 * 4 * min(tokens * shape.vocabulary, _BLOCK_LOGITS[on_gpu])
    ends = 4 * shape.hidden * width  # of the embedding, the last norm and the head
    if model.optimizer is None:
        return tokens * (block // 2 + ends) + logits
    if model.gradient_checkpointing and model.checkpointing != "selective":
        kept = shape.layers * shape.hidden * width + ends
        return tokens * kept + max(tokens * (block + passing), logits)
    return tokens * (block * shape.layers + ends) + max(tokens * passing, logits)


def _gathers_in_8_bits(model: TrainEngineConfig, shape: ModelShape, dims: ParallelDims) -> bool:
    """Whether ranks gather all weights of the blocks in 8 bits: the rule of areal/engine/float8.py."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = (shape.hidden, shape.intermediate, queries, keys)
    shards = model.fsdp.shard_size or dims.dp * dims.cp
    return (
        model.fp8 is not None
        and model.fp8.recipe == "tensorwise"
        and not (model.fp8.filter_fqns or model.lora or shape.experts or shape.states or dims.tp > 1)
        and all(size % FLOAT8_MULTIPLE == 0 and size % shards == 0 for size in sizes)
    )


def _gathered(shape: ModelShape, width: int, block_width: int, *, trained: bool, at_once: bool) -> int:
    """Two blocks (one is gathered ahead) and the outer unit, or all of them `at_once`, in the compute type, blocks in
    8 bits where `block_width` is 1; gradients and their float32 copies."""
    outer = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    block = (shape.text_parameters - outer) // shape.layers
    tower = 0 if shape.vision is None else shape.vision.parameters  # one unit: gathered for a pass of the tower
    outer += 0 if at_once else tower
    weights = width * shape.parameters if at_once else block_width * 2 * block + width * outer
    return weights + ((width + 4) * block + width * outer if trained else 0)


def planned_memory(config: BaseExperimentConfig, tokens: int, *, on_gpu: bool) -> RankMemory | None:
    """The memory of a trainer rank with `tokens` in its largest micro-batch; None without a trainer, or when a model is
    not on this machine.

    Each rank has the same models.
    """
    held = {name: model for name, model in config.models.items() if name != "ref" or not config.reference_is_base}
    shapes = [(model, ModelShape.read(model.path)) for model in held.values()]
    known = [(model, shape) for model, shape in shapes if shape is not None]
    if not config.allocation.train or len(known) < len(shapes):
        return None
    return rank_memory(
        known,
        dims=config.allocation.train[0].parallel,
        tokens=tokens,
        on_gpu=on_gpu,
        bucket_bytes=config.actor.weight_chunked_mem_mb * 2**20 if isinstance(config, PPOConfig) else 0,
        accumulates=_accumulates(config, tokens),
        backend=config.train_backend,
        patches=largest_images(config, tokens),
    )


def _samples(config: PPOConfig) -> int:
    """Tokens of one train step."""
    return config.train_dataset.batch_size * config.gconfig.n_samples


def _accumulates(config: BaseExperimentConfig, tokens: int) -> bool:
    if not isinstance(config, PPOConfig):
        return False
    per_rank = _samples(config) * config.gconfig.max_tokens // config.allocation.train[0].parallel.dp
    return tokens * config.actor.ppo_n_minibatches < per_rank


class PublishedBytes(NamedTuple):
    """Host memory for the weights that were published last (actor.weight_update_mode=delta...)."""

    ranks: list[int]
    """Of each trainer rank: the files that it keeps, with several ranks as much again for their differences, and on
    rank 0 the differences for a collective, in all at most as large as the weights."""
    server: int
    """Of a native server on a GPU."""


def published_bytes(config: BaseExperimentConfig) -> PublishedBytes:
    ranks = config.allocation.num_train_ranks
    if not isinstance(config, PPOConfig) or not config.actor.sends_deltas:
        return PublishedBytes([0] * ranks, 0)
    shape = ModelShape.read(config.actor.path)
    size = 0 if shape is None else shape.parameters * (2 if config.actor.compute_dtype == "bfloat16" else 4)
    whole, rest = divmod(size, PUBLISHED_FILE_BYTES)
    files = [PUBLISHED_FILE_BYTES] * whole + [rest]
    kept = [sum(files[rank::ranks]) * min(ranks, 2) for rank in range(ranks)]
    kept[0] += size if config.actor.weight_update_mode == "delta_xccl" else 0
    return PublishedBytes(kept, size if config.server_backend == "native" else 0)


def memory_texts(config: BaseExperimentConfig, plan: LaunchPlan) -> dict[str, str]:
    """Name of a process on the CPU -> what it needs in all; of trainer ranks also the weights that they publish by
    differences. Without those whose models are not known."""
    on_gpu = any(process.gpus for process in plan.processes if process.role == "trainer")
    memory, tokens, texts = None, 0, dict[str, str]()
    if config.allocation.train:  # an evaluation has no trainers
        tokens = largest_micro_batch(config)
        memory = planned_memory(config, tokens, on_gpu=on_gpu)
    for process in (process for process in plan.processes if not process.gpus):
        if process.role == "server" and process.memory_bytes:
            texts[process.name] = f"about {_gib(LIBRARY_BYTES + process.memory_bytes)} in all"
        elif process.role == "trainer" and memory is not None:
            held = LIBRARY_BYTES + memory.weights + memory.gradients + memory.optimizer + memory.gathered
            models = config.models.values()
            once = ", those that rows share once" if any(model.shared_prefixes != "off" for model in models) else ""
            size = _gib(memory.activations * 1000 // tokens)
            each = f"{size} for 1,000 tokens of a micro-batch (at most {tokens:,}{once})"
            texts[process.name] = f"about {_gib(held)} in all and {each}"
    trainers = (process.name for process in plan.processes if process.role == "trainer")
    for name, kept in zip(trainers, published_bytes(config).ranks, strict=True):
        if kept:
            text = f"{_gib(kept)} of host memory for the weights published last (delta)"
            texts[name] = f"{texts[name]}, {text}" if name in texts else text
    return texts


def memory_problems(
    config: BaseExperimentConfig, plan: LaunchPlan, *, card_bytes: int | None, host_bytes: int
) -> Iterator[str]:
    """One sentence when a trainer rank needs more than its card has, or the ranks of a machine more than the host, and
    when states of layers do not fit into a server."""
    server = next((process for process in plan.processes if process.role == "server"), None)
    if server is not None and isinstance(config, PPOConfig) and config.server_backend == "native":
        free = card_bytes if server.gpus and card_bytes else host_bytes
        yield from state_problems(config, int(free * CARD_SHARE))
    ranks = [process for process in plan.processes if process.role == "trainer"]
    on_gpu = any(process.gpus for process in ranks)
    memory = planned_memory(config, tokens := largest_micro_batch(config), on_gpu=on_gpu)
    if memory is None or not ranks:
        return
    backend, patches, accumulates = config.train_backend, largest_images(config, tokens), _accumulates(config, tokens)
    state = memory.weights + memory.gradients + memory.optimizer
    advice = "use more ranks (allocation_mode) or fsdp.offload_optimizer=true or fsdp.offload_params=true"
    if backend == "megatron":
        advice = "use more ranks (allocation_mode) or megatron.offload_optimizer=true"
    elif accumulates and any(model.fsdp.gradient_sync == "last" for model in config.models.values()):
        advice += ", or fsdp.gradient_sync=every"
    here = max(Counter(process.host for process in ranks).values())
    needed, copied = (0 if on_gpu else state * here), memory.host_copy * here
    has = f"this machine has {_gib(host_bytes)}"
    if needed > host_bytes:
        text = f"weights, gradients and optimiser take {_gib(needed)}, {has}: use a smaller model or more nodes"
        yield f"allocation_mode: {text}"
    elif config.recover.mode != "disabled" and config.recover.async_save and needed + copied > host_bytes:
        text = f"checkpoints need {_gib(copied)} of host memory"
        text += f" besides the {_gib(needed)} of weights, gradients and optimiser" if needed else ""
        yield f"recover.async_save: {text}, {has}: set it to false"
    published, first = published_bytes(config), ranks[0].host
    kept = sum(size for process, size in zip(ranks, published.ranks, strict=True) if process.host == first)
    kept += published.server * sum(
        process.role == "server" and bool(process.gpus) and process.host == first for process in plan.processes
    )
    if needed <= host_bytes < needed + kept:
        who = "trainer ranks and the servers beside them keep" if published.server else "trainer ranks keep"
        text = f"{who} {_gib(kept)} of published weights in host memory"
        text += f" besides the {_gib(needed)} of weights, gradients and optimiser" if needed else ""
        yield f"actor.weight_update_mode: with delta {text}, {has}: use a mode without delta"
    if on_gpu and card_bytes is not None and memory.peak > card_bytes * CARD_SHARE:
        key = "allocation_mode"
        if memory.activations > state:
            key, advice = "actor.mb_spec.max_tokens_per_mb", "lower it, or set gradient_checkpointing=true"
            shapes = [(model, ModelShape.read(model.path)) for model in config.models.values()]
            of_images = max(tower_bytes(model, shape, patches) for model, shape in shapes if shape is not None)
            if of_images > memory.activations // 2:
                key = "actor.mb_spec.max_patches_per_mb"
        parts = ", ".join(f"{part.name} {_gib(getattr(memory, part.name))}" for part in fields(memory)[:-1])
        yield (
            f"{key}: a trainer rank needs about {_gib(memory.peak)} with {tokens} tokens a micro-batch ({parts}), but "
            f"a GPU has {_gib(card_bytes)}: {advice}"
        )


def largest_images(config: BaseExperimentConfig, tokens: int) -> int:
    """Patches of a micro-batch of `tokens` tokens: the limit, or those of one image of the largest size. 0 where no
    option says that rows have images."""
    limits = [model.mb_spec.max_patches_per_mb for model in config.models.values()]
    if set_limits := [limit for limit in limits if limit is not None]:
        return max(set_limits)
    has_images = config.vision.max_pixels is not None
    has_images |= isinstance(config, PPOConfig) and config.workflow == "vision_rlvr"
    layouts = [read_vision_layout(model.path) for model in config.models.values()] if has_images else []
    limit = config.vision.max_pixels or 2**63
    sizes = [
        min(min(limit, layout.max_pixels) // layout.patch_size**2, tokens * layout.merge_size**2)
        for layout in layouts
        if layout is not None
    ]
    return max(sizes, default=0)


def largest_micro_batch(config: BaseExperimentConfig) -> int:
    """Tokens of the largest micro-batch of any model: at most its limit, and at most the share of a rank."""
    limit = max(model.mb_spec.max_tokens_per_mb or DEFAULT_TOKENS_PER_MB for model in config.models.values())
    if not isinstance(config, PPOConfig):
        return limit
    longest, shares = config.gconfig.max_tokens, config.allocation.train[0].parallel.dp
    if config.server_backend == "native" and config.native.context_length:
        longest = min(longest, config.native.context_length)
    return min(limit, max(longest, _samples(config) * longest // shares))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
