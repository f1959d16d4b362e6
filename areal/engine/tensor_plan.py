"""Tensor parallelism of a transformers model: DTensor plans from the structure of its blocks.

Column-wise: projections to heads and to the wide layer of the MLP; row-wise: those back; by vocabulary: embedding and
output head. The hidden states between them are whole and equal on every tensor rank, as are the parts for images.
"""

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import ConfigError
from areal.engine.hf_model import other_towers
from areal.engine.lora import DOWN, START_DOWN, START_UP, UP, LoRALinear

_COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_ROWS = frozenset({"o_proj", "down_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_HEADS_DIM = 2
"""Of the states [1, T, H, D] that norms of queries and keys get."""


class _AdaptedColumns(ColwiseParallel):
    """Each rank has some rows of the weight and of B, and all of A."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, {DOWN: None, START_DOWN: None}, default=0)


class _AdaptedRows(RowwiseParallel):
    """Each rank has some columns of the weight and of A, and all of B."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _distribute(module, device_mesh, {"bias": None, UP: None, START_UP: None}, default=1)


def _distribute(module: nn.Module, mesh: DeviceMesh, dims: dict[str, int | None], default: int) -> None:
    """Split each parameter of a module in the dimension that `dims` has for its name; None = whole on every rank."""
    for name, weight in list(module.named_parameters(recurse=False)):
        dim = dims.get(name, default)
        own = distribute_tensor(weight, mesh, [Replicate() if dim is None else Shard(dim)])
        module.register_parameter(name, nn.Parameter(own, requires_grad=weight.requires_grad))


def apply_tensor_plan(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Distribute the model, which has no memory yet, over the one-dimensional `mesh`.

    Raises ConfigError for a model whose blocks have other parts than those of Llama.
    """
    plan = tensor_plan(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    parallelize_module(model, mesh, plan)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)  # torch's SequenceParallel makes all weights trained
    if isinstance(head, nn.Linear) and is_tied:
        head.weight = cast("nn.Parameter", embedding.weight)


def tensor_plan(model: PreTrainedModel) -> dict[str, ParallelStyle]:
    """Module name -> how it is distributed. What is not named is whole on every tensor rank."""
    plan: dict[str, ParallelStyle] = {}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_images = {id(module) for tower in other_towers(model) for module in tower.modules()}
    for path, module in model.named_modules():
        if id(module) in of_images:
            continue
        name = path.rpartition(".")[2]
        weights = dict(module.named_parameters(recurse=False))
        if module is embedding:
            plan[path] = RowwiseParallel(input_layouts=Replicate())
        elif module is head:
            plan[path] = ColwiseParallel(output_layouts=Shard(-1))
        elif isinstance(module, nn.Linear) and name in _COLUMNS:
            plan[path] = _AdaptedColumns() if isinstance(module, LoRALinear) else ColwiseParallel()
        elif isinstance(module, nn.Linear) and name in _ROWS:
            plan[path] = _AdaptedRows() if isinstance(module, LoRALinear) else RowwiseParallel()
        elif name in _HEAD_NORMS and [tuple(value.shape) for value in weights.values()] == [(head_dim,)]:
            # every rank normalises its heads: the gradient of the weight is the sum over the ranks
            plan[path] = SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
        elif any(value.ndim != 1 for value in weights.values()) and name != "score":
            raise _no_plan(model, path)
    if not any(isinstance(style, RowwiseParallel) for path, style in plan.items() if path.endswith("o_proj")):
        raise _no_plan(model, "no attention output called o_proj")
    return plan


def _no_plan(model: PreTrainedModel, part: str) -> ConfigError:
    message = f"{type(model).__name__} has no tensor-parallel plan ({part}): leave t out of allocation_mode"
    return ConfigError(message, code="model.cannot_split")
