"""Experts of a transformers model over ranks: each rank computes some experts of a layer, for the tokens of all ranks.

Two all-to-all operations for a layer in each direction: states go to the ranks of their experts, and results back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from areal.api.errors import ConfigError
from areal.engine.region import view_of


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with the experts of a layer."""
    return [module for path, module in model.named_modules() if path.rpartition(".")[2] == "experts"]


def apply_expert_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the experts of every layer, which have no memory yet, over the one-dimensional `mesh`.

    Raises ConfigError for a model without experts, and for one whose parameters do not have a row for each expert.
    """
    found = expert_modules(model)
    if not found:
        raise _no_plan(model, "it has no experts")
    for experts in found:
        weights = dict(experts.named_parameters())
        sizes = {len(weight) for weight in weights.values()}
        if len(sizes) != 1 or any("." in name for name in weights):
            raise _no_plan(model, f"{type(experts).__name__} has separate parameters for each expert")
        (count,) = sizes
        if count % mesh.size():
            raise _no_plan(model, f"e{mesh.size()} does not divide its {count} experts")
        for name, weight in weights.items():
            own = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(own, requires_grad=weight.requires_grad))
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
    own = view_of(module, DTensor.to_local, num_experts=num_experts // ranks)
    results: Tensor = type(module).forward(own, mine, experts.unsqueeze(1), mine.new_ones(len(mine), 1))[:rows]
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
    found = rows.new_empty(sum(sizes_in), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), sizes_in, sizes_out, group=group)
    return found


def _no_plan(model: nn.Module, problem: str) -> ConfigError:
    message = f"{type(model).__name__} cannot be split over expert ranks: {problem}; change e in allocation_mode"
    return ConfigError(message, code="model.cannot_split")
