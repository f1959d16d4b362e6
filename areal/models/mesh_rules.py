"""Which models a mesh of trainer ranks can compute: sizes that divide, families with a tensor-parallel plan."""

import importlib.util

from areal.api.allocation import ModelAllocation, ParallelDims
from areal.api.config.train import MegatronEngineConfig
from areal.models.model_shape import ModelShape

TENSOR_FAMILIES = ("gemma", "gemma2", "granite_swa", "llama", "mistral", "qwen2", "qwen3")
TENSOR_FAMILIES += ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
TENSOR_FAMILIES += ("bamba", "falcon_h1", "minicpmv4_6", "qwen3_5", "qwen3_5_text")  # have states
"""Model types whose blocks have the structure that `areal.engine.parallel_plan` distributes."""

MEGATRON_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "mixtral")
MEGATRON_FAMILIES += ("deepseek_v2", "deepseek_v3")
"""Model types that `tests/megatron` has compared with one process."""


def trainer_problem(shape: ModelShape, trainer: ModelAllocation, options: MegatronEngineConfig) -> str | None:
    """Why the ranks of a trainer cannot compute a model; None when they can."""
    chunks = options.virtual_pipeline_parallel_size
    problem = mesh_problem(shape, trainer.parallel, backend=trainer.backend, chunks=chunks)
    if trainer.backend == "megatron" and shape.experts and options.distribute_saved_activations:
        problem = problem or "megatron.distribute_saved_activations has no effect on experts: use false"
    return problem or package_problem(trainer.backend, options)


def mesh_problem(shape: ModelShape, dims: ParallelDims, *, backend: str = "fsdp", chunks: int = 1) -> str | None:
    """Why a model cannot be split in these sizes, and sizes that work; None when it can.

    Context ranks need an equal number of the attention heads of each tensor rank; they repeat key and value heads.
    `chunks`: parts of the layers on each pipeline stage.
    """
    is_megatron = backend == "megatron"
    if is_megatron and shape.family not in MEGATRON_FAMILIES:
        return f"{shape.family} models have no Megatron weight map, only {', '.join(MEGATRON_FAMILIES)}: use fsdp"
    if is_megatron and (problem := _pipeline_problem(shape, dims, chunks)):
        return problem
    if not is_megatron and dims.tp > 1 and shape.family not in TENSOR_FAMILIES:
        return (
            f"{shape.family} models have no tensor-parallel plan (t{dims.tp}), only {', '.join(TENSOR_FAMILIES)}: "
            "leave t out"
        )
    if dims.ep * dims.etp > 1 and (problem := _expert_problem(shape, dims, is_megatron=is_megatron)):
        return problem
    counts = {
        "attention heads": shape.heads,
        "key and value heads": shape.kv_heads,
        "MLP columns": shape.intermediate if not shape.experts else shape.dense_intermediate,
        "latents": shape.latents,
        "tokens of the vocabulary": shape.vocabulary,
    }
    if failing := [f"{count} {name}" for name, count in counts.items() if count % dims.tp]:
        works = [size for size in range(1, shape.kv_heads + 1) if not any(count % size for count in counts.values())]
        return f"t{dims.tp} does not divide the {' and '.join(failing)}: use {_sizes('t', works)}"
    if (heads := shape.heads // dims.tp) % dims.cp:
        works = [size for size in range(1, heads + 1) if heads % size == 0]
        each = f"{heads} attention heads" + (" of a tensor rank" if dims.tp > 1 else "")
        return f"c{dims.cp} does not divide the {each}: use {_sizes('c', works)}"
    return None


def _expert_problem(shape: ModelShape, dims: ParallelDims, *, is_megatron: bool) -> str | None:
    if not shape.experts:
        return f"{shape.family} models have no experts (e{dims.ep}): leave e out"
    if dims.tp > 1 and not is_megatron:
        return f"experts and tensors cannot both be split (e{dims.ep}, t{dims.tp}): leave t out"
    if shape.experts % dims.ep:
        ranks = dims.dp * dims.cp * dims.tp
        works = [size for size in range(1, ranks + 1) if ranks % size == 0 and shape.experts % size == 0]
        return f"e{dims.ep} does not divide the {shape.experts} experts of a layer: use {_sizes('e', works)}"
    if shape.intermediate % dims.etp:
        works = [size for size in range(1, dims.etp) if shape.intermediate % size == 0]
        return f"t{dims.etp} of ffn does not divide the {shape.intermediate} columns of an expert: use " + _sizes(
            "t", works
        )
    return None


def _pipeline_problem(shape: ModelShape, dims: ParallelDims, chunks: int) -> str | None:
    """Why the layers of a model cannot be distributed evenly."""
    if chunks > 1 and dims.pp == 1:
        return f"virtual_pipeline_parallel_size={chunks} needs several pipeline stages: use p2, or 1"
    if shape.layers % (dims.pp * chunks):
        works = [size for size in range(1, shape.layers + 1) if shape.layers % (size * chunks) == 0]
        parts = f" with {chunks} parts each" if chunks > 1 else ""
        return f"p{dims.pp}{parts} does not divide the {shape.layers} layers: use {_sizes('p', works) or 'fewer parts'}"
    return None


def _sizes(letter: str, sizes: list[int]) -> str:
    return " or ".join(f"{letter}{size}" for size in sizes)


def package_problem(backend: str, options: MegatronEngineConfig) -> str | None:
    """Which Python package a train engine lacks."""
    if backend != "megatron":
        return None
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return "megatron needs the package megatron-core: pip install -e '.[megatron]'"
    if (wanted := options.needing_transformer_engine()) and importlib.util.find_spec("transformer_engine") is None:
        return f"megatron.{wanted[0]} needs the package transformer-engine, which is not installed: leave it out"
    if options.moe_token_dispatcher_type == "flex" and importlib.util.find_spec("deep_ep") is None:
        return "megatron.moe_token_dispatcher_type=flex needs the package deep_ep, which is not installed: use alltoall"
    return None
