"""Recovery state of a Megatron-Core model by Hugging Face name: any mesh of any engine loads it."""
# pyright: reportMissingImports=false

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from areal.engine.megatron.optimizer import MegatronOptimizer
from areal.engine.megatron.weight_map import MappedWeight
from areal.engine.megatron.weights import RankWeights
from areal.engine.mesh import TrainerMesh
from areal.engine.recovery import Piece, RecoveryReader, StagedPieces


def staged_pieces(own: RankWeights, optimizer: MegatronOptimizer | None, mesh: TrainerMesh) -> StagedPieces:
    """The weights and the optimiser's state, each part on one of the ranks that hold it; a collective."""
    kinds = () if optimizer is None else optimizer.kinds()
    step = None if optimizer is None or not kinds else torch.tensor(optimizer.num_updates())
    pieces: dict[str, Piece] = {}
    for number, (weight, parameter) in enumerate(own.of_rank(with_copies=False)):
        group, state = own.data_group(weight), {"value": parameter.detach()}
        if optimizer is not None:
            state = optimizer.state_of(weight, parameter, kinds)
        is_writer = weight.split is not None or own.tensor_group(weight).rank() == 0
        if is_writer and number % group.size() == group.rank():
            pieces |= _pieces_of(own, weight, state)
            if step is not None and own.tensor_group(weight).rank() == 0:
                pieces |= {_name("step", part.name): Piece(step, ()) for part in weight.parts}
    steps = 0 if optimizer is None else optimizer.num_steps
    return StagedPieces(pieces=pieces, rank=mesh.rank, world_size=mesh.world_size, num_steps=steps)


def _pieces_of(own: RankWeights, weight: MappedWeight, state: Mapping[str, Tensor]) -> dict[str, Piece]:
    group = own.tensor_group(weight)
    found: dict[str, Piece] = {}
    for kind, value in state.items():
        for part, tensor in zip(weight.parts, weight.divided(value), strict=True):
            region = weight.region(part, group.rank(), group.size())
            offsets = tuple(each.start for each in region)
            found[_name(kind, part.name)] = Piece(tensor.contiguous(), offsets)
    return found


def _name(kind: str, weight: str) -> str:
    return f"weights/{weight}" if kind == "value" else f"optimizer/{weight}/{kind}"


def load_state(folder: Path, own: RankWeights, optimizer: MegatronOptimizer | None) -> None:
    """Continue from the files of an engine. Raises InputError when they do not fit this model."""
    shapes = {part.name: part.shape for weight in own.weights for part in weight.parts}
    reader = RecoveryReader(folder, shapes)
    for weight, parameter in own.of_rank():
        found = {} if optimizer is None else reader.kinds(weight.parts[0].name)
        state = {kind: _local(reader, own, weight, kind) for kind in ("value", *sorted(set(found) - {"step"}))}
        if optimizer is None:
            with torch.no_grad():
                parameter.copy_(state["value"])
            continue
        step = torch.zeros(())
        if "step" in found:
            reader.fill({_name("step", weight.parts[0].name): step})
        optimizer.set_state(parameter, state, float(step))
    if optimizer is not None:
        optimizer.num_steps = reader.num_steps


def _local(reader: RecoveryReader, own: RankWeights, weight: MappedWeight, kind: str) -> Tensor:
    """This rank's part of a weight, or of the optimiser's state of it."""
    group = own.tensor_group(weight)
    parts: list[Tensor] = []
    for part in weight.parts:
        whole = torch.empty(part.shape)
        reader.fill({_name(kind, part.name): whole})
        parts.append(whole[weight.region(part, group.rank(), group.size())])
    return weight.joined(parts)
