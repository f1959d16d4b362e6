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
        is_first = own.tensor_group(weight).rank() == 0
        if weight.expert is None:
            found = _pieces_of(own, weight, state) if weight.split is not None or is_first else {}
        else:
            number = weight.layer or 0  # one rank writes the experts of a layer, which are one tensor
            found = {kind: own.gathered(weight, value) for kind, value in state.items()}
            found = _joined_experts(own, weight, found, pieces) if is_first else {}
        if number % group.size() == group.rank():
            pieces |= found
            if step is not None and is_first and len(state) > 1:
                pieces |= {_name("step", part.state_name): Piece(step, ()) for part in weight.parts}
    steps = 0 if optimizer is None else optimizer.num_steps
    return StagedPieces(pieces=pieces, rank=mesh.rank, world_size=mesh.world_size, num_steps=steps)


def _pieces_of(own: RankWeights, weight: MappedWeight, state: Mapping[str, Tensor]) -> dict[str, Piece]:
    group = own.tensor_group(weight)
    found: dict[str, Piece] = {}
    for kind, value in state.items():
        for part, tensor in zip(weight.parts, weight.divided(value), strict=True):
            region = weight.region(part, group.rank(), group.size())
            found[_name(kind, part.state_name)] = Piece(tensor.contiguous(), part.state_offsets(region))
    return found


def _joined_experts(
    own: RankWeights, weight: MappedWeight, state: Mapping[str, list[Tensor]], pieces: Mapping[str, Piece]
) -> dict[str, Piece]:
    """The pieces of all experts of this rank in a layer, with the values of one expert filled in.

    `state`: the whole parts by kind. `pieces`: with those of the experts before it.
    """
    found: dict[str, Piece] = {}
    for kind, parts in state.items():
        for part, value in zip(weight.parts, parts, strict=True):
            name, (expert, row, _) = _name(kind, part.state_name), part.state_offsets([slice(0, 0)] * value.dim())
            piece = found.get(name) or pieces.get(name)
            if piece is None:
                whole = value.new_empty(own.num_experts, *part.state_shape[1:])
                piece = Piece(whole, (expert, 0, 0))
            found[name] = piece
            piece.values[expert - piece.offsets[0], row : row + len(value)] = value
    return found


def _name(kind: str, weight: str) -> str:
    return f"weights/{weight}" if kind == "value" else f"optimizer/{weight}/{kind}"


def load_state(folder: Path, own: RankWeights, optimizer: MegatronOptimizer | None) -> None:
    """Continue from the files of an engine. Raises InputError when they do not fit this model."""
    shapes = {part.state_name: part.state_shape for weight in own.weights for part in weight.parts}
    reader = RecoveryReader(folder, shapes)
    for weight, parameter in own.of_rank():
        found = {} if optimizer is None else reader.kinds(weight.parts[0].state_name)
        state = {kind: _local(reader, own, weight, kind) for kind in ("value", *sorted(set(found) - {"step"}))}
        if optimizer is None:
            with torch.no_grad():
                parameter.copy_(state["value"])
            continue
        step = torch.zeros(())
        if "step" in found:
            reader.fill({_name("step", weight.parts[0].state_name): step})
        optimizer.set_state(parameter, state, float(step))
    if optimizer is not None:
        optimizer.num_steps = reader.num_steps


def _local(reader: RecoveryReader, own: RankWeights, weight: MappedWeight, kind: str) -> Tensor:
    """This rank's part of a weight, or of the optimiser's state of it."""
    group = own.tensor_group(weight)
    parts: list[Tensor] = []
    for part in weight.parts:
        region = weight.region(part, group.rank(), group.size())
        offsets = part.state_offsets(region)
        values = torch.empty([each.stop - each.start for each in region])
        target = values.view(*[1] * (len(offsets) - values.dim()), *values.shape)
        reader.fill_pieces({_name(kind, part.state_name): Piece(target, offsets)})
        parts.append(values)
    return weight.joined(parts)
