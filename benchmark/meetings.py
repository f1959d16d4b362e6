"""Where the ranks of a mesh wait for each other in a train step, and for how long: terms of `train_step.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from areal.api.allocation import ParallelDims
from areal.engine.mesh import TrainerMesh


@dataclass(frozen=True)
class Meeting:
    """Where ranks of a mesh wait for each other: at the outputs of the modules whose names match."""

    names: str
    forward: bool
    """Whether they do in the forward pass of a micro-batch."""
    backward: Literal["no", "each", "last"]
    """In the backward pass of which micro-batch."""


def meetings(shard_size: int, dims: ParallelDims) -> list[Meeting]:
    """Of a Llama."""
    result: list[Meeting] = []
    if shard_size > 1:  # to gather the weights of a block
        result.append(Meeting(r"layers\.\d+$", forward=True, backward="each"))
    elif dims.dp * dims.cp > 1:  # to reduce gradients
        result.append(Meeting(r"layers\.\d+$", forward=False, backward="last"))
    if dims.tp > 1:  # to sum states, and their gradients where heads and columns begin
        result.append(Meeting(r"(self_attn|mlp|embed_tokens)$", forward=True, backward="no"))
        result.append(Meeting(r"norm$", forward=False, backward="each"))
    if dims.cp > 1:  # to exchange heads for tokens
        result.append(Meeting(r"(v_proj|self_attn)$", forward=True, backward="each"))
    return result


def meet(model: nn.Module, meeting: Meeting, mesh: TrainerMesh, passes: int) -> int:
    """Let the passes of one process wait for the other ranks. Returns how often they do in a step."""

    def hook(numbers: Iterator[int], module: nn.Module, args: object, output: Any) -> Any:
        is_last = next(numbers) % passes == passes - 1
        waits = meeting.backward == "each" or (meeting.backward == "last" and is_last)
        states, *rest = output if isinstance(output, tuple) else (output,)
        met = _Meet.apply(states, mesh, meeting.forward, waits)
        return (met, *rest) if isinstance(output, tuple) else met

    modules = [module for name, module in model.named_modules() if re.search(meeting.names, name)]
    for module in modules:
        module.register_forward_hook(partial(hook, count()))
    return len(modules) * (passes * meeting.forward + {"no": 0, "each": passes, "last": 1}[meeting.backward])


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: TrainerMesh, waits: bool, waits_in_backward: bool) -> Tensor:
        ctx.mesh = mesh if waits_in_backward else None
        if waits:
            mesh.barrier()
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.mesh is not None:
            ctx.mesh.barrier()
        return upstream[0], None, None, None
