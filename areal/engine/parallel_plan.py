"""Tensor parallelism of a transformers model: how the weights of its blocks are split, and what the ranks exchange.

Projections to heads and to the wide layer of the MLP have the rows of a rank, those back the columns of a rank,
embedding and output head a part of the vocabulary. The hidden states between them are whole and equal on every tensor
rank, as are the parts for images and the layers with a state: attention and MLP sum them over the ranks once in each
direction. Modules compute with plain tensors, because operations on distributed ones cost much more than a small matrix
product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.modeling_utils import PreTrainedModel

from areal.api.errors import ConfigError
from areal.engine.hf_model import other_towers
from areal.engine.lora import DOWN, START_DOWN, START_UP, UP, LoRALinear
from areal.engine.mesh import region_of, view_of
from areal.models.recurrent_layers import state_layers

_COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_ROWS = frozenset({"o_proj", "down_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})


def apply_tensor_plan(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Distribute the model, which has no memory yet, over the one-dimensional `mesh`.

    Raises ConfigError for a model whose blocks have other parts than those of Llama.
    """
    columns, rows, norms, with_sinks = _parts(model)
    head, embedding = model.get_output_embeddings(), cast("Any", model.get_input_embeddings())
    is_tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
    group = mesh.get_group()
    _distribute(embedding, mesh, {}, default=0)
    (rows_of_rank, _), padding = region_of(embedding.weight), embedding.padding_idx
    first, size = rows_of_rank.start, rows_of_rank.stop - rows_of_rank.start
    padding = padding - first if padding is not None and padding in range(first, first + size) else None
    embedding.forward = partial(_embedded, _with_own_weights(embedding, group, padding_idx=padding), first, size, group)
    if isinstance(head, nn.Linear):  # the head's caller reads its weight
        _distribute(head, mesh, {}, default=0)
        if is_tied:
            head.weight = embedding.weight
    for module in columns:  # each rank has some rows of the weight and of B, and all of A
        _distribute(module, mesh, {DOWN: None, START_DOWN: None}, default=0)
        module.forward = _with_own_weights(module, group)
    for module in rows:  # each rank has some columns of the weight and of A, and all of B
        _distribute(module, mesh, {"bias": None, UP: None, START_UP: None}, default=1)
        if isinstance(module, LoRALinear):
            module.own_columns = region_of(module.weight)[1]
        module.forward = partial(_summed_rows, module, _with_own_weights(module, group, bias=None), group)
    for module in norms:  # every rank normalises its heads
        _distribute(module, mesh, {}, default=None)
        module.forward = _with_own_weights(module, group)
    for module in with_sinks:  # each rank has those of its heads
        _distribute(module, mesh, {}, default=0)
        module.forward = _with_own_weights(module, group)
    for parent in {name.rpartition(".")[0] for name, module in model.named_modules() if module in columns}:
        model.get_submodule(parent).register_forward_pre_hook(partial(_shared_input, group), with_kwargs=True)


def _parts(model: PreTrainedModel) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module], list[nn.Module]]:
    """The modules that are split by rows and by columns, the norms of heads, and the attention modules with a sink for
    each head. What is in none of them, besides embedding and head, is whole on every tensor rank."""
    columns, rows, norms, with_sinks = list[nn.Module](), list[nn.Module](), list[nn.Module](), list[nn.Module]()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    left_out = {id(part) for tower in other_towers(model) for part in tower.modules()}
    left_out |= {id(part) for layer in state_layers(model).values() for part in layer.modules()}
    for path, module in model.named_modules():
        if id(module) in left_out:
            continue
        name = path.rpartition(".")[2]
        weights = dict(module.named_parameters(recurse=False))
        if module is head or module is embedding:
            continue
        if isinstance(module, nn.Linear) and name in _COLUMNS:
            columns.append(module)
        elif isinstance(module, nn.Linear) and name in _ROWS:
            rows.append(module)
        elif name in _HEAD_NORMS and [tuple(value.shape) for value in weights.values()] == [(head_dim,)]:
            norms.append(module)
        elif weights.keys() == {"sinks"} and weights["sinks"].shape == (config.num_attention_heads,):
            with_sinks.append(module)
        elif any(value.ndim != 1 for value in weights.values()) and name != "score":
            raise _no_plan(model, path)
    if not any(path.endswith(".o_proj") and module in rows for path, module in model.named_modules()):
        raise _no_plan(model, "no attention output called o_proj")
    return columns, rows, norms, with_sinks


def _no_plan(model: PreTrainedModel, part: str) -> ConfigError:
    message = f"{type(model).__name__} has no tensor-parallel plan ({part}): leave t out of allocation_mode"
    return ConfigError(message, code="model.cannot_split")


def _distribute(module: nn.Module, mesh: DeviceMesh, dims: dict[str, int | None], default: int | None) -> None:
    """Split each parameter of a module in the dimension that `dims` has for its name; None = whole on every rank."""
    for name, weight in list(module.named_parameters(recurse=False)):
        dim = dims.get(name, default)
        sharded = distribute_tensor(weight, mesh, [Replicate() if dim is None else Shard(dim)])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))


def _with_own_weights(module: nn.Module, group: dist.ProcessGroup, **changes: Any) -> Callable[..., Any]:
    """The forward function of a module on this rank's parts of its parameters; `changes`: other attributes."""

    def own_part(weight: DTensor) -> Tensor:
        """A rank uses a weight that all ranks have for its heads or columns: the ranks sum the gradients."""
        is_whole = all(isinstance(placement, Replicate) for placement in weight.placements)
        return _shared(weight.to_local(), group) if is_whole else weight.to_local()

    def forward(*args: Any, **kwargs: Any) -> Any:
        view = view_of(module, own_part, **changes)
        return type(module).forward(view, *args, **kwargs)

    return forward


def _shared_input(
    group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before attention and MLP: their projections share the states, whose gradient the ranks sum once."""
    if args:
        return (_shared(args[0], group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _shared(kwargs["hidden_states"], group)}


def _summed_rows(
    module: nn.Module, local_product: Callable[[Tensor], Tensor], group: dist.ProcessGroup, input: Tensor
) -> Tensor:
    """The sum over the ranks of the products of their columns, plus the bias once."""
    product: Tensor = _Summed.apply(local_product(input), group)  # pyright: ignore[reportAssignmentType]
    bias = module.bias
    return product if bias is None else product + cast("DTensor", bias).to_local()


def _embedded(
    local_lookup: Callable[[Tensor], Tensor], first: int, size: int, group: dist.ProcessGroup, ids: Tensor
) -> Tensor:
    """The rows of the embedding that this rank has, `size` from `first`, and zeros; then the sum over the ranks."""
    is_elsewhere = (ids < first) | (ids >= first + size)
    vectors = local_lookup((ids - first).masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
    return _Summed.apply(vectors, group)  # pyright: ignore[reportReturnType]


def _shared(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Shared.apply(values, group)  # pyright: ignore[reportReturnType]


class _Shared(torch.autograd.Function):
    """The values; their gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _sum(upstream[0], ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum over the ranks; its gradient is that of each rank's values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(values, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = values.clone(memory_format=torch.contiguous_format)  # autograd, or a checkpoint, may keep the values
    dist.all_reduce(result, group=group)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Experts of a transformers model over ranks: each rank computes some experts of a layer, for the tokens of all ranks.
#
# Two all-to-all operations for a layer in each direction: states go to the ranks of their experts, and results back.


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with the experts of a layer."""
    return [module for path, module in model.named_modules() if path.rpartition(".")[2] == "experts"]


def apply_expert_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of every layer, which have no memory yet, over the one-dimensional `mesh`.

    Raises ConfigError for a model without experts, and for one whose parameters do not have a row for each expert.
    """
    modules = expert_modules(model)
    if not modules:
        raise _no_expert_plan(model, "it has no experts")
    for experts in modules:
        weights = dict(experts.named_parameters())
        sizes = {len(weight) for weight in weights.values()}
        if len(sizes) != 1 or any("." in name for name in weights):
            raise _no_expert_plan(model, f"{type(experts).__name__} has separate parameters for each expert")
        (count,) = sizes
        if count % mesh.size():
            raise _no_expert_plan(model, f"e{mesh.size()} does not divide its {count} experts")
        for name, weight in weights.items():
            sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))
        experts.forward = partial(_exchange_and_compute, experts, count, mesh.get_group())


def _exchange_and_compute(
    module: nn.Module,
    num_experts: int,
    group: dist.ProcessGroup,
    states: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The forward function of an experts module for the tokens of this rank: states [T, h], chosen experts [T, k],
    their weights [T, k] -> weighted sums [T, h].

    FSDP averages gradients over the ranks with equal experts, those of other weights over all ranks, which are e times
    as many. So the gradients of the experts are divided by e, those of the states are not.
    """
    ranks, (count, k) = group.size(), chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    sent = torch.bincount(flat, minlength=num_experts).view(ranks, -1)  # [rank, its experts]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes_out, sizes_in = sent.sum(1).tolist(), received.sum(1).tolist()
    rows = sum(sizes_in)
    mine = _Exchange.apply(states[order // k], sizes_out, sizes_in, group, float(ranks))
    experts = torch.arange(num_experts // ranks, device=flat.device).repeat(ranks)
    experts = experts.repeat_interleave(received.flatten(), output_size=rows)
    if not rows:  # the ranks exchange gradients, so a rank without tokens has gradients too: zeros
        mine, experts = torch.cat([mine, mine.new_zeros(1, mine.shape[1])]), experts.new_zeros(1)
    local = view_of(module, DTensor.to_local, num_experts=num_experts // ranks)
    results: Tensor = type(module).forward(local, mine, experts.unsqueeze(1), mine.new_ones(len(mine), 1))[:rows]
    back = _Exchange.apply(results, sizes_in, sizes_out, group, 1 / ranks)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    weighted = back[places].view(count, k, -1) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(states.dtype)


class _Exchange(torch.autograd.Function):
    """Rows [sum of sizes_out, h], in the order of the ranks they go to -> rows [sum of sizes_in, h] from the ranks.

    Its gradient is the exchange in the other direction, times `factor`.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes_out: list[int], sizes_in: list[int], group: dist.ProcessGroup, factor: float
    ) -> Tensor:
        ctx.back, ctx.factor = (sizes_in, sizes_out, group), factor
        return _exchanged(rows, sizes_out, sizes_in, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchanged(upstream[0], *ctx.back).mul_(ctx.factor), None, None, None, None


def _exchanged(rows: Tensor, sizes_out: list[int], sizes_in: list[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(sizes_in), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), sizes_in, sizes_out, group=group)
    return result


def _no_expert_plan(model: nn.Module, problem: str) -> ConfigError:
    message = f"{type(model).__name__} cannot be split over expert ranks: {problem}; change e in allocation_mode"
    return ConfigError(message, code="model.cannot_split")
