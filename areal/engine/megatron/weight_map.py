"""The weights of Megatron-Core's models from and to Hugging Face names: pure rules, without Megatron-Core."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD = "score.weight"
"""The head of critics and reward models."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


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


def weight_map(config: Any, *, has_score: bool = False) -> list[MappedWeight]:
    """All weights of a model with the Hugging Face configuration `config`, in the order of its checkpoint.

    `has_score`: a head of one output in place of the vocabulary. Raises KeyError for a family without a map.
    """
    layer_of = FAMILIES[config.model_type]
    hidden, vocab = config.hidden_size, config.vocab_size
    table = Part("model.embed_tokens.weight", (vocab, hidden))
    weights = [MappedWeight(name="embedding.word_embeddings.weight", parts=(table,), split=0, is_first=True)]
    for layer in range(config.num_hidden_layers):
        weights += layer_of(_Layer(config, layer))
    weights.append(MappedWeight(name="decoder.final_layernorm.weight", parts=(Part("model.norm.weight", (hidden,)),)))
    if has_score:
        weights.append(MappedWeight(name="score.weight", parts=(Part(HEAD, (1, hidden)),)))
    elif not config.tie_word_embeddings:
        head = Part("lm_head.weight", (vocab, hidden))
        weights.append(MappedWeight(name="output_layer.weight", parts=(head,), split=0))
    return weights


def tied_head(config: Any) -> MappedWeight:
    """The copy of the embedding on the last stage."""
    table = Part("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    return MappedWeight(name="output_layer.weight", parts=(table,), split=0)


class _Layer:
    """The names of one layer."""

    def __init__(self, config: Any, layer: int) -> None:
        self.config, self.layer = config, layer
        self._theirs, self._ours = f"model.layers.{layer}.", "decoder.layers.{layer}."

    def weight(self, ours: str, *parts: tuple[str, tuple[int, ...]], **options: Any) -> MappedWeight:
        named = tuple(Part(self._theirs + name, shape) for name, shape in parts)
        return MappedWeight(name=self._ours + ours, parts=named, layer=self.layer, **options)

    def norms(self) -> tuple[MappedWeight, MappedWeight]:
        size = (self.config.hidden_size,)
        return (
            self.weight("input_layernorm.weight", ("input_layernorm.weight", size)),
            self.weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", size)),
        )

    def attention(self, *, qkv_bias: bool = False, out_bias: bool = False, norms: bool = False) -> list[MappedWeight]:
        config = self.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        found = [
            self.weight(
                "self_attention.linear_qkv.weight",
                *((f"self_attn.{name}.weight", (count, config.hidden_size)) for name, count in rows.items()),
                split=0,
                head_dim=dim,
            )
        ]
        if qkv_bias:
            biases = [(f"self_attn.{name}.bias", (count,)) for name, count in rows.items()]
            found.append(self.weight("self_attention.linear_qkv.bias", *biases, split=0, head_dim=dim))
        out = ("self_attn.o_proj.weight", (config.hidden_size, queries))
        found.append(self.weight("self_attention.linear_proj.weight", out, split=1))
        if out_bias:
            bias = ("self_attn.o_proj.bias", (config.hidden_size,))
            found.append(self.weight("self_attention.linear_proj.bias", bias))
        for name in ("q", "k") if norms else ():
            norm = (f"self_attn.{name}_norm.weight", (dim,))
            found.append(self.weight(f"self_attention.{name}_layernorm.weight", norm))
        return found

    def mlp(
        self,
        ours: str = "mlp.",
        theirs: str = "mlp.",
        *,
        size: int | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        **options: Any,
    ) -> list[MappedWeight]:
        gate, up, down = names
        hidden, size = int(self.config.hidden_size), int(size or self.config.intermediate_size)
        shape = (size, hidden)
        wide = [(f"{theirs}{name}.weight", shape) for name in (gate, up)]
        found = [
            self.weight(f"{ours}linear_fc1.weight", *wide, split=0, **options),
            self.weight(f"{ours}linear_fc2.weight", (f"{theirs}{down}.weight", (hidden, size)), split=1, **options),
        ]
        if bias:
            biases = [(f"{theirs}{name}.bias", (size,)) for name in (gate, up)]
            found.append(self.weight(f"{ours}linear_fc1.bias", *biases, split=0))
            found.append(self.weight(f"{ours}linear_fc2.bias", (f"{theirs}{down}.bias", (hidden,))))
        return found

    def experts(self, count: int, router: str, theirs: str, **options: Any) -> list[MappedWeight]:
        """`theirs`: the prefix of an expert with {} for its number."""
        shape = (count, self.config.hidden_size)
        found = [self.weight("mlp.router.weight", (router, shape))]
        for expert in range(count):
            ours = "mlp.experts.local_experts.{expert}."
            found += self.mlp(ours, theirs.format(expert), expert=expert, **options)
        return found


def _llama(layer: _Layer) -> list[MappedWeight]:
    bias, mlp_bias = bool(layer.config.attention_bias), bool(layer.config.mlp_bias)
    first, second = layer.norms()
    return [*layer.attention(qkv_bias=bias, out_bias=bias), *layer.mlp(bias=mlp_bias), first, second]


def _mistral(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(), *layer.mlp(), *layer.norms()]


def _qwen2(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(qkv_bias=True), *layer.mlp(), *layer.norms()]


def _qwen3(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(norms=True), *layer.mlp(), *layer.norms()]


def _qwen3_moe(layer: _Layer) -> list[MappedWeight]:
    config = layer.config
    if has_experts(config, layer.layer):
        size, theirs = config.moe_intermediate_size, "mlp.experts.{}."
        mlp = layer.experts(num_experts(config), "mlp.gate.weight", theirs, size=size)
    else:
        mlp = layer.mlp()
    return [*layer.attention(norms=True), *mlp, *layer.norms()]


def _mixtral(layer: _Layer) -> list[MappedWeight]:
    block = "block_sparse_moe."
    names = ("w1", "w3", "w2")
    mlp = layer.experts(num_experts(layer.config), f"{block}gate.weight", block + "experts.{}.", names=names)
    return [*layer.attention(), *mlp, *layer.norms()]


FAMILIES: dict[str, Callable[[_Layer], list[MappedWeight]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
}
"""Model type of the Hugging Face configuration -> the weights of a layer."""


def num_experts(config: Any) -> int:
    """0 for a model without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(found) for name in names if (found := getattr(config, name, None))), 0)


def has_experts(config: Any, layer: int) -> bool:
    """Whether the MLP of a layer consists of experts."""
    if not num_experts(config):
        return False
    if config.model_type == "qwen3_moe":
        step = config.decoder_sparse_step
        return layer not in (config.mlp_only_layers or ()) and step > 0 and (layer + 1) % step == 0
    return True


def names_on_rank(weight: MappedWeight, place: Place, expert: int) -> Iterator[str]:
    """The names that a weight can have in its model chunk: without and with Transformer Engine."""
    name = weight.name.replace("{layer}", str(place.number)).replace("{expert}", str(expert))
    yield name
    yield name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
        "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
    )
    if ".local_experts." in name:
        prefix, rest = name.split("local_experts.")
        yield f"{prefix}{rest.split('.', 1)[1]}{expert}"
