"""How weights of Megatron-Core consist of weights of Hugging Face checkpoints: pure rules, without Megatron-Core."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.engine.routing import EXPERT_BIAS

HEAD = "score.weight"
"""The head of critics and reward models."""


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    inside: "Inside | None" = None
    """The parameter of transformers that contains it under another name; recovery states have those parameters."""

    @property
    def state_name(self) -> str:
        return self.name if self.inside is None else self.inside.name

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.shape if self.inside is None else self.inside.shape

    def state_offsets(self, region: Sequence[slice]) -> tuple[int, ...]:
        """The offsets of a region of this weight in the parameter of transformers."""
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
    """Head size of queries, keys and values whose rows are grouped by key head; 0 = the parts are stacked."""
    layer: int | None = None
    is_first: bool = False
    """A weight without a layer belongs to the first pipeline stage, else to the last."""
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
    """The place of a layer: its pipeline stage, its model chunk there, its number in the chunk."""

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


# ----------------------------------------------------------------------------------------------------------------------
# The weights of each model family by Hugging Face name: pure rules, without Megatron-Core.


def weight_map(config: Any, *, has_score: bool = False, splits_latents: bool = True) -> list[MappedWeight]:
    """All weights of a model with the Hugging Face configuration `config`, in the order of its checkpoint.

    `has_score`: a head of one output in place of the vocabulary. `splits_latents`: tensor ranks split the projections
    to latents of DeepSeek, as Megatron-Core does without Transformer Engine. Raises KeyError for a family without map.
    """
    layer_of = FAMILIES[config.model_type]
    hidden, vocab = config.hidden_size, config.vocab_size
    table = Part("model.embed_tokens.weight", (vocab, hidden))
    weights = [MappedWeight(name="embedding.word_embeddings.weight", parts=(table,), split=0, is_first=True)]
    for layer in range(config.num_hidden_layers):
        weights += layer_of(_Layer(config, layer, splits_latents))
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

    def __init__(self, config: Any, layer: int, splits_latents: bool) -> None:
        self.config, self.layer, self._splits_latents = config, layer, splits_latents
        self._theirs, self._ours = f"model.layers.{layer}.", "decoder.layers.{layer}."

    def weight(self, ours: str, *parts: tuple[str, tuple[int, ...]], **options: Any) -> MappedWeight:
        named = tuple(Part(self._theirs + name, shape) for name, shape in parts)
        return MappedWeight(name=self._ours + ours, parts=named, layer=self.layer, **options)

    def norms(self) -> list[MappedWeight]:
        size = (self.config.hidden_size,)
        return [
            self.weight("input_layernorm.weight", ("input_layernorm.weight", size)),
            self.weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", size)),
        ]

    def attention(self, *, qkv_bias: bool = False, out_bias: bool = False, norms: bool = False) -> list[MappedWeight]:
        config = self.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        result = [
            self.weight(
                "self_attention.linear_qkv.weight",
                *((f"self_attn.{name}.weight", (count, config.hidden_size)) for name, count in rows.items()),
                split=0,
                head_dim=dim,
            )
        ]
        if qkv_bias:
            biases = [(f"self_attn.{name}.bias", (count,)) for name, count in rows.items()]
            result.append(self.weight("self_attention.linear_qkv.bias", *biases, split=0, head_dim=dim))
        out = ("self_attn.o_proj.weight", (config.hidden_size, queries))
        result.append(self.weight("self_attention.linear_proj.weight", out, split=1))
        if out_bias:
            bias = ("self_attn.o_proj.bias", (config.hidden_size,))
            result.append(self.weight("self_attention.linear_proj.bias", bias))
        for name in ("q", "k") if norms else ():
            norm = (f"self_attn.{name}_norm.weight", (dim,))
            result.append(self.weight(f"self_attention.{name}_layernorm.weight", norm))
        return result

    def latent_attention(self) -> list[MappedWeight]:
        """Queries, keys and values through latents, as DeepSeek-V2 (arXiv 2405.04434, 2.1) has them."""
        config, hidden = self.config, self.config.hidden_size
        heads, rank, latents = config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
        queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        keys_and_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
        split = 0 if self._splits_latents else None

        def weight(ours: str, theirs: str, *shape: int, split: int | None = None) -> MappedWeight:
            return self.weight(f"self_attention.{ours}.weight", (f"self_attn.{theirs}.weight", shape), split=split)

        mapped = [weight("linear_q_proj", "q_proj", queries, hidden, split=0)]
        if rank is not None:
            mapped = [
                weight("linear_q_down_proj", "q_a_proj", rank, hidden, split=split),
                weight("q_layernorm", "q_a_layernorm", rank),
                weight("linear_q_up_proj", "q_b_proj", queries, rank, split=0),
            ]
        return [
            *mapped,
            weight("linear_kv_down_proj", "kv_a_proj_with_mqa", latents + config.qk_rope_head_dim, hidden, split=split),
            weight("kv_layernorm", "kv_a_layernorm", latents),
            weight("linear_kv_up_proj", "kv_b_proj", keys_and_values, latents, split=0),
            weight("linear_proj", "o_proj", hidden, heads * config.v_head_dim, split=1),
        ]

    def mlp(
        self, *, block: str = "", ours: str = "", size: int | None = None, bias: bool = False
    ) -> list[MappedWeight]:
        """`block`: the name of an MLP inside the MLP, with a dot; `ours`: where Megatron-Core has another one."""
        ours = ours or block
        hidden, size = int(self.config.hidden_size), int(size or self.config.intermediate_size)
        wide, out = [f"mlp.{block}{name}_proj" for name in ("gate", "up")], f"mlp.{block}down_proj"
        result = [
            self.weight(
                f"mlp.{ours}linear_fc1.weight", *((f"{name}.weight", (size, hidden)) for name in wide), split=0
            ),
            self.weight(f"mlp.{ours}linear_fc2.weight", (f"{out}.weight", (hidden, size)), split=1),
        ]
        if bias:
            biases = [(f"{name}.bias", (size,)) for name in wide]
            result.append(self.weight(f"mlp.{ours}linear_fc1.bias", *biases, split=0))
            result.append(self.weight(f"mlp.{ours}linear_fc2.bias", (f"{out}.bias", (hidden,))))
        return result

    def experts(
        self, size: int, block: str = "mlp.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> list[MappedWeight]:
        """The router and the experts. `names`: of gate, up and down projection in the checkpoint."""
        count, hidden = num_experts(self.config), int(self.config.hidden_size)
        inside = self._theirs + "mlp."
        router = Part(f"{self._theirs}{block}gate.weight", (count, hidden))
        if block != "mlp.":
            router = Part(router.name, router.shape, Inside(f"{inside}gate.weight", router.shape, (0, 0)))
        result = [MappedWeight(name=f"{self._ours}mlp.router.gate.weight", parts=(router,), layer=self.layer)]
        if self.config.model_type in ("deepseek_v3", "glm4_moe"):
            result.append(self.weight(f"mlp.router.gate.{EXPERT_BIAS}", (f"mlp.gate.{EXPERT_BIAS}", (count,))))
        wide, deep = (count, 2 * size, hidden), (count, hidden, size)
        for expert in range(count):
            gate, up, down = (f"{self._theirs}{block}experts.{expert}.{name}.weight" for name in names)
            whole = f"{inside}experts.gate_up_proj"
            parts = tuple(
                Part(name, (size, hidden), Inside(whole, wide, (expert, place * size, 0)))
                for place, name in enumerate((gate, up))
            )
            last = Part(down, (hidden, size), Inside(f"{inside}experts.down_proj", deep, (expert, 0, 0)))
            for number, parts_of_product, split in ((1, parts, 0), (2, (last,), 1)):
                name = self._ours + "mlp.experts.local_experts.{expert}." + f"linear_fc{number}.weight"
                result.append(
                    MappedWeight(name=name, parts=parts_of_product, split=split, layer=self.layer, expert=expert)
                )
        return result


def _llama(layer: _Layer) -> list[MappedWeight]:
    bias, mlp_bias = bool(layer.config.attention_bias), bool(layer.config.mlp_bias)
    return [*layer.attention(qkv_bias=bias, out_bias=bias), *layer.mlp(bias=mlp_bias), *layer.norms()]


def _mistral(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(), *layer.mlp(), *layer.norms()]


def _qwen2(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(qkv_bias=True), *layer.mlp(), *layer.norms()]


def _qwen3(layer: _Layer) -> list[MappedWeight]:
    return [*layer.attention(norms=True), *layer.mlp(), *layer.norms()]


def _qwen3_moe(layer: _Layer) -> list[MappedWeight]:
    config = layer.config
    mlp = layer.experts(config.moe_intermediate_size) if has_experts(config, layer.layer) else layer.mlp()
    return [*layer.attention(norms=True), *mlp, *layer.norms()]


def _qwen2_moe(layer: _Layer) -> list[MappedWeight]:
    config, mlp = layer.config, layer.mlp()
    if has_experts(config, layer.layer):
        gate = ("mlp.shared_expert_gate.weight", (1, config.hidden_size))
        mlp = layer.experts(config.moe_intermediate_size)
        mlp += layer.mlp(block="shared_expert.", ours="shared_experts.", size=shared_size(config))
        mlp.append(layer.weight("mlp.shared_experts.gate_weight", gate))
    return [*layer.attention(qkv_bias=True), *mlp, *layer.norms()]


def _glm4_moe(layer: _Layer) -> list[MappedWeight]:
    config = layer.config
    attention = layer.attention(qkv_bias=bool(config.attention_bias), norms=bool(config.use_qk_norm))
    return [*attention, *_shared_and_routed(layer), *layer.norms()]


def _mixtral(layer: _Layer) -> list[MappedWeight]:
    mlp = layer.experts(layer.config.intermediate_size, "block_sparse_moe.", ("w1", "w3", "w2"))
    return [*layer.attention(), *mlp, *layer.norms()]


def _deepseek(layer: _Layer) -> list[MappedWeight]:
    return [*layer.latent_attention(), *_shared_and_routed(layer), *layer.norms()]


def _shared_and_routed(layer: _Layer) -> list[MappedWeight]:
    config = layer.config
    if not has_experts(config, layer.layer):
        return layer.mlp()
    shared = layer.mlp(block="shared_experts.", size=shared_size(config))
    return [*layer.experts(config.moe_intermediate_size), *shared]


FAMILIES: dict[str, Callable[[_Layer], list[MappedWeight]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""Model type of the Hugging Face configuration -> the weights of a layer."""


def has_latents(config: Any) -> bool:
    """Whether attention goes through latents."""
    return getattr(config, "kv_lora_rank", None) is not None


def shared_size(config: Any) -> int:
    """Columns of the expert that computes every token; 0 without one."""
    if config.model_type == "qwen2_moe":
        return int(config.shared_expert_intermediate_size)
    return int(getattr(config, "n_shared_experts", None) or 0) * int(getattr(config, "moe_intermediate_size", 0))


def num_experts(config: Any) -> int:
    """0 for a model without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer's attention; None: it sees all earlier tokens."""
    kinds = getattr(config, "layer_types", None)
    is_windowed = kinds is None or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if is_windowed else None


def has_experts(config: Any, layer: int) -> bool:
    """Whether the MLP of a layer consists of experts."""
    if not num_experts(config):
        return False
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        step = config.decoder_sparse_step
        return layer not in (config.mlp_only_layers or ()) and step > 0 and (layer + 1) % step == 0
    return layer >= (getattr(config, "first_k_dense_replace", 0) or 0)
