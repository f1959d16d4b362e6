"""The weights of a Megatron-Core model by Hugging Face name: read, copied and streamed one by one."""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open
from torch import Tensor, nn

from areal.api.errors import InputError
from areal.engine.hf_model import raise_missing
from areal.engine.megatron.weight_map import MappedWeight, Place, Stages, names_on_rank
from areal.models.checkpoint_files import weight_files

Put = Callable[[Tensor, Tensor], object]
"""Gives a parameter of this rank new values of any type."""


class RankWeights:
    """The parameters of this rank, found by the map of the whole model."""

    def __init__(
        self,
        weights: Sequence[MappedWeight],
        copies: Sequence[MappedWeight],
        chunks: Sequence[nn.Module],
        stages: Stages,
        groups: ProcessGroupCollection,
        num_experts: int,
    ) -> None:
        """`copies`: weights of the last stage that are equal to one of the first."""
        self.weights = list(weights)
        self._copies = list(copies)
        self._stages, self._groups = stages, groups
        self._stage = groups.pp.rank()
        self.num_experts = num_experts // groups.ep.size()
        """Experts of a layer on this rank."""
        named = [dict(chunk.named_parameters()) | dict(chunk.named_buffers()) for chunk in chunks]
        self.parameters: dict[str, Tensor] = {}
        """Megatron's name in the whole model -> this rank's part of the weight."""
        for weight in [*self.weights, *self._copies]:
            if self._is_own(weight):
                self.parameters[key_of(weight)] = parameter = self._find(weight, named)
                # norms of gradients count a weight that tensor ranks do not split once
                parameter.tensor_model_parallel = weight.split is not None  # pyright: ignore[reportAttributeAccessIssue]
                if weight.expert is not None:  # also where e is 1: their data ranks are not those of other weights
                    parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
        mapped = {id(value) for value in self.parameters.values()}
        trained = [each for chunk in chunks for each in chunk.named_parameters()]
        unmapped = [name for name, value in trained if id(value) not in mapped]
        if unmapped:
            raise RuntimeError(f"weights without a Hugging Face name: {', '.join(unmapped[:4])}")

    def of_rank(self, *, with_copies: bool = True) -> Iterator[tuple[MappedWeight, Tensor]]:
        """The weights that this rank has a part of, in the order of the map."""
        for weight in [*self.weights, *(self._copies if with_copies else ())]:
            if (parameter := self.parameters.get(key_of(weight))) is not None:
                yield weight, parameter

    def without(self, name: str) -> "RankWeights":
        """The same without the weight `name`."""
        result = copy(self)
        result.weights = [weight for weight in self.weights if key_of(weight) != name]
        return result

    def tensor_group(self, weight: MappedWeight) -> dist.ProcessGroup:
        """The ranks that hold the other parts of a weight of this rank."""
        return self._groups.tp if weight.expert is None else self._groups.expt_tp

    def owner_stage(self, weight: MappedWeight) -> int:
        return self._stages.of(weight).stage

    def data_group(self, weight: MappedWeight) -> dist.ProcessGroup:
        """The ranks that hold the same part."""
        return self._groups.dp_cp if weight.expert is None else self._groups.expt_dp

    @torch.no_grad()
    def whole(self, weight: MappedWeight, local: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        """The parts of a weight by the shapes of the checkpoint, on every rank; a collective over all ranks.

        `local`: this rank's part, None on the ranks that have none. One weight is whole in memory at a time.
        """
        parts: list[Tensor] | None = None
        if local is not None:
            parts = self.gathered(weight, local.detach().to(dtype))
        device = next(iter(self.parameters.values())).device
        if parts is None:
            parts = [torch.empty(part.shape, dtype=dtype, device=device) for part in weight.parts]
        if weight.expert is not None and self._groups.ep.size() > 1 and self._stage == self.owner_stage(weight):
            source = weight.expert // self.num_experts
            parts = [self._sent(part, source, self._groups.ep) for part in parts]
        if self._groups.pp.size() > 1:
            parts = [self._sent(part, self.owner_stage(weight), self._groups.pp) for part in parts]
        return parts

    def gathered(self, weight: MappedWeight, local: Tensor) -> list[Tensor]:
        """The parts of a weight of this rank; a collective over its tensor ranks."""
        group, divided = self.tensor_group(weight), weight.divided(local)
        if weight.split is None or group.size() == 1:
            return divided
        whole: list[Tensor] = []
        for part in divided:
            parts = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            whole.append(torch.cat(parts, weight.split))
        return whole

    def _sent(self, part: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        part = part.contiguous()
        dist.broadcast(part, group_src=source, group=group)
        return part

    def local_of(self, weight: MappedWeight, parts: Sequence[Tensor]) -> Tensor:
        """This rank's part from the whole parts of the checkpoint."""
        group = self.tensor_group(weight)
        locals_of_parts = [
            whole[weight.region(part, group.rank(), group.size())]
            for part, whole in zip(weight.parts, parts, strict=True)
        ]
        return weight.joined(locals_of_parts)

    def _is_own(self, weight: MappedWeight) -> bool:
        if weight in self._copies:
            return self._stage == self._stages.size - 1
        has_expert = weight.expert is None or weight.expert // self.num_experts == self._groups.ep.rank()
        return self.owner_stage(weight) == self._stage and has_expert

    def _find(self, weight: MappedWeight, named: Sequence[Mapping[str, Tensor]]) -> Tensor:
        place = self._stages.of(weight)
        if weight in self._copies:
            place = Place(self._stages.size - 1, self._stages.chunks - 1, 0)
        expert = 0 if weight.expert is None else weight.expert % self.num_experts
        names = list(names_on_rank(weight, place, expert))
        result = next((named[place.chunk][name] for name in names if name in named[place.chunk]), None)
        if result is None:
            raise RuntimeError(f"the model has no weight {names[0]}")
        return result


def key_of(weight: MappedWeight) -> str:
    """A name of a weight that is unique in the model."""
    name = weight.name if weight.layer is None else weight.name.replace("{layer}", str(weight.layer))
    return name if weight.expert is None else name.replace("{expert}", str(weight.expert))


class CheckpointReader:
    """Reads parts of the weights of a Hugging Face folder."""

    def __init__(self, folder: Path, prefix: str = "model.") -> None:
        self._folder, self._prefix = folder, prefix
        self._places: dict[str, Path] = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                self._places |= dict.fromkeys(opened.keys(), file)

    def has(self, name: str) -> bool:
        return self._stored(name) is not None

    def part(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...]) -> Tensor:
        """A part of a weight. Raises InputError when it is missing or has another shape."""
        stored = self._stored(name)
        if stored is None:
            raise_missing(self._folder, [name])
            raise AssertionError
        with safe_open(self._places[stored], framework="pt") as opened:
            stored_part: Any = opened.get_slice(stored)
            if (has := list(stored_part.get_shape())) != list(shape):
                text = (
                    f"checkpoint {self._folder}: {stored} has shape {has}, but {list(shape)} according to config.json"
                )
                raise InputError(text, code="model.weights_do_not_fit")
            return stored_part[region]

    def _stored(self, name: str) -> str | None:
        """The name in the checkpoint, which may be that of the model without its head."""
        short = name.removeprefix(self._prefix)
        return next((each for each in (name, short) if each in self._places), None)


@torch.no_grad()
def read_weights(weights: RankWeights, reader: CheckpointReader, put: Put) -> None:
    """Fill the parameters of this rank from a checkpoint; only its parts are read."""
    for weight, target in weights.of_rank():
        group = weights.tensor_group(weight)
        parts = [
            reader.part(part.name, part.shape, weight.region(part, group.rank(), group.size())) for part in weight.parts
        ]
        put(target, weight.joined(parts))


@torch.no_grad()
def copy_weights(weights: RankWeights, tensors: Iterable[tuple[str, Tensor]], put: Put) -> None:
    """Fill the parameters of this rank from whole weights by name; other names are ignored.

    Raises InputError when a weight is missing or has another shape.
    """
    by_name: dict[str, list[MappedWeight]] = {}
    for weight, _ in weights.of_rank():
        for part in weight.parts:
            by_name.setdefault(part.name, []).append(weight)
    pending: dict[str, dict[str, Tensor]] = {}
    missing = {key_of(weight) for weight, _ in weights.of_rank()}
    for name, value in tensors:
        for weight in by_name.get(name, ()):
            shape = next(part.shape for part in weight.parts if part.name == name)
            if tuple(value.shape) != shape:
                message = f"the given weights: {name} has shape {list(value.shape)}, the model's has {list(shape)}"
                raise InputError(message, code="model.weights_do_not_fit")
            parts_by_name = pending.setdefault(key_of(weight), {})
            parts_by_name[name] = value.detach().clone() if len(weight.parts) > 1 else value.detach()
            if len(parts_by_name) == len(weight.parts):
                parts = [parts_by_name[part.name] for part in weight.parts]
                put(weights.parameters[key_of(weight)], weights.local_of(weight, parts))
                missing.discard(key_of(weight))
                del pending[key_of(weight)]
    if missing:
        message = f"the given weights: {len(missing)} weights of the model are missing, among them {min(missing)}"
        raise InputError(message, code="model.weights_do_not_fit")
