"""How weights of Megatron-Core consist of weights of Hugging Face checkpoints: pure rules, without Megatron-Core."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD = "score.weight"
"""The head of critics and reward models."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    inside: "Inside | None" = None
    """Where transformers has it in a parameter of another name; recovery states have the parameters of transformers."""

    @property
    def state_name(self) -> str:
        return self.name if self.inside is None else self.inside.name

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.shape if self.inside is None else self.inside.shape

    def state_offsets(self, region: Sequence[slice]) -> tuple[int, ...]:
        """Where a region of this weight begins in the parameter of transformers."""
        starts = [each.start for each in region]
        if self.inside is None:
            return tuple(starts)
        offsets = self.inside.offsets
        starts = [0] * (len(offsets) - len(starts)) + starts
        return tuple(first + start for first, start in zip(offsets, starts, strict=True))


@dataclass(frozen=True, slots=True)
class Inside:
    """A part of a parameter of transformers, from `offsets`; the experts of a layer are rows of one parameter."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedWeight:
    """A weight of Megatron-Core and the weights of the checkpoint that it consists of."""

    name: str
    """Megatron's name; the layer is that of its model chunk, and `{expert}` the number of the expert on its rank."""
    parts: tuple[Part, ...]
    split: int | None = None
    """The dimension of each part that tensor ranks split; None = each has the whole weight."""
    head_dim: int = 0
    """Of queries, keys and values, whose rows are grouped by key head; 0 = the parts are stacked."""
    layer: int | None = None
    is_first: bool = False
    """Without a layer: of the first pipeline stage, else of the last."""
    expert: int | None = None

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Megatron's weight from the checkpoint's: the whole weights, or the parts of one tensor rank."""
        if not self.head_dim:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        groups = parts[1].shape[0] // self.head_dim
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def divided(self, weight: Tensor) -> list[Tensor]:
        """The inverse of `joined`."""
        rows = [part.shape[0] for part in self.parts]
        if not self.head_dim:
            share = sum(rows) // weight.shape[0] if self.split == 0 else 1
            return list(weight.split([count // share for count in rows]))
        share = sum(rows) // weight.shape[0]
        groups = rows[1] // share // self.head_dim
        sizes = [count // share // groups for count in rows]
        return [part.flatten(0, 1) for part in weight.unflatten(0, (groups, -1)).split(sizes, 1)]

    def region(self, part: Part, rank: int, ranks: int) -> tuple[slice, ...]:
        """What a tensor rank holds of a part."""
        bounds = [slice(0, size) for size in part.shape]
        if self.split is not None:
            step = part.shape[self.split] // ranks
            bounds[self.split] = slice(rank * step, (rank + 1) * step)
        return tuple(bounds)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer is: its pipeline stage, its model chunk there, its number in the chunk."""

    stage: int
    chunk: int
    number: int


@dataclass(frozen=True, slots=True)
class Stages:
    """Equal parts of the layers on `size` pipeline stages with `chunks` parts each, in turn."""

    layers: int
    size: int = 1
    chunks: int = 1

    def place(self, layer: int) -> Place:
        each = self.layers // (self.size * self.chunks)
        turn, number = divmod(layer, each)
        chunk, stage = divmod(turn, self.size)
        return Place(stage, chunk, number)

    def of(self, weight: MappedWeight) -> Place:
        if weight.layer is not None:
            return self.place(weight.layer)
        return Place(0, 0, 0) if weight.is_first else Place(self.size - 1, self.chunks - 1, 0)


def names_on_rank(weight: MappedWeight, place: Place, expert: int) -> Iterator[str]:
    """The names that a weight can have in its model chunk: without and with Transformer Engine."""
    name = weight.name.replace("{layer}", str(place.number)).replace("{expert}", str(expert))
    yield name
    yield name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
        "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
    )
    yield name.replace("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_").replace(
        "self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"
    )
    if ".local_experts." in name:
        prefix, rest = name.split("local_experts.")
        yield f"{prefix}{rest.split('.', 1)[1]}{expert}"
