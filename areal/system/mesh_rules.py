"""Which models a mesh of trainer ranks can compute: sizes that divide, families with a tensor-parallel plan."""

from areal.api.allocation import ParallelDims
from areal.system.model_shape import ModelShape

TENSOR_FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose blocks have the structure that `areal.engine.tensor_plan` distributes."""


def mesh_problem(shape: ModelShape, dims: ParallelDims) -> str | None:
    """Why a model cannot be split in these sizes, and sizes that work; None when it can.

    Context ranks need an equal number of the attention heads of each tensor rank; they repeat key and value heads.
    """
    if dims.tp > 1 and shape.family not in TENSOR_FAMILIES:
        return (
            f"{shape.family} models have no tensor-parallel plan (t{dims.tp}), only {', '.join(TENSOR_FAMILIES)}: "
            "leave t out"
        )
    if dims.ep > 1 and (problem := _expert_problem(shape, dims)):
        return problem
    counts = {
        "attention heads": shape.heads,
        "key and value heads": shape.kv_heads,
        "MLP columns": shape.intermediate,
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


def _expert_problem(shape: ModelShape, dims: ParallelDims) -> str | None:
    if not shape.experts:
        return f"{shape.family} models have no experts (e{dims.ep}): leave e out"
    if dims.tp > 1:
        return f"experts and tensors cannot both be split (e{dims.ep}, t{dims.tp}): leave t out"
    if shape.experts % dims.ep:
        ranks = dims.dp * dims.cp
        works = [size for size in range(1, ranks + 1) if ranks % size == 0 and shape.experts % size == 0]
        return f"e{dims.ep} does not divide the {shape.experts} experts of a layer: use {_sizes('e', works)}"
    return None


def _sizes(letter: str, sizes: list[int]) -> str:
    return " or ".join(f"{letter}{size}" for size in sizes)
