"""Decode steps as CUDA graphs: all kernels of a step start with one call, where a trial gives the same logits.

A graph has fixed sizes and addresses: it reads the tensors of `DecodeRows` for one size, and each of the two copies of
the weights that an update exchanges has its own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu
from transformers.modeling_utils import PreTrainedModel

from areal.api.config import NativeServerConfig
from areal.inference.adapters import AdapterProducts
from areal.inference.attention import AttentionPlan, LayerCache, LayerShape, PromptGroup, ScoreRules, attend
from areal.inference.decode_rows import DecodeInputs
from areal.inference.quantization import QuantizedLinear
from areal.inference.weight_update import weight_bytes
from areal.observe.log import get_logger

# ----------------------------------------------------------------------------------------------------------------------
# The forward pass of the common dense decoders on the CPU, with bitwise the same logits in half the calls.
#
# A step with few rows of a small model spends most of its time between the operations: in the module calls and the
# keyword arguments of transformers, and in operations on queries and keys that can be one operation on both.

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the attention of a class of models has besides the four projections."""

    has_norms: bool = False
    """Queries and keys are normalised."""
    has_windows: bool = True
    """Each attention module has `sliding_window`, which is None without a window."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(has_windows=False),
    "Qwen2ForCausalLM": _Family(),
    "Qwen3ForCausalLM": _Family(has_norms=True),
}
"""Class name -> family. The import of all classes takes longer than that of the one that is used."""
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length of the sequence."""
_TRIAL_TOKENS = 9
_PACKED_ROWS = 8
"""What oneDNN packs weights for."""
EQUAL_ROWS = 16
"""From this number of rows on a float32 product of torch has in each row the same bits for any number of rows."""
_PACKED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""The largest error of each product, relative to its largest value. The logits of a real model prove nothing: rounding
in its first layers moves those of a text that it has not learned by a quarter."""

Norm = Callable[[Tensor], Tensor]


def dense_decoder(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> DenseDecoder | None:
    """The decoder of a model on the CPU, if it is of a known class and has the same logits in a trial."""
    family = _FAMILIES.get(type(model).__name__)
    if family is None or model.device.type != "cpu":
        return None
    untyped: Any = model
    ids = torch.arange(_TRIAL_TOKENS)[None] % model.config.vocab_size
    plans = [_trial_plan(shapes, model.dtype) for _ in range(2)]
    with torch.inference_mode():
        theirs = model(input_ids=ids, position_ids=ids, use_cache=False, attention_plan=plans[0]).logits[0]
        try:
            if untyped.model.rotary_emb.rope_type not in _FIXED_ROTATIONS:
                return None
            result = DenseDecoder(untyped, family)
            mine = result.logits(ids, ids, None, plans[1])
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            _LOG.warning("transformers computes the layers of this model, and small steps are slower: %s", error)
            return None
        if not torch.equal(mine, theirs):
            return None
        if NativeServerConfig.packed_bytes(weight_bytes(model)) and torch.backends.mkldnn.is_available():
            _try_packed(result)
    return result


def _try_packed(decoder: DenseDecoder) -> None:
    """Pack the weights where oneDNN computes the same but for rounding."""
    try:
        decoder.pack()
        problem = next((text for product in decoder.packable if (text := product.packing_problem())), "")
    except RuntimeError as refused:
        problem = str(refused).splitlines()[0]
    if problem:
        _LOG.warning("weights are not packed: %s", problem)
        decoder.unpack()


def _trial_plan(shapes: Sequence[LayerShape], dtype: torch.dtype) -> AttentionPlan:
    """One prompt in a cache of one block."""
    return AttentionPlan(
        caches={
            layer: LayerCache(torch.zeros((1, _TRIAL_TOKENS, *shape.sizes), dtype=dtype), shape)
            for layer, shape in enumerate(shapes)
        },
        slots=torch.arange(_TRIAL_TOKENS),
        decode=[],
        prompts=[PromptGroup(start=0, num_sequences=1, count=_TRIAL_TOKENS)],
        later=[],
    )


class _Product:
    """The product with the weights of some linear modules, side by side.

    Where oneDNN pays, it gets a copy of the weights in its own order.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.modules = modules
        self.is_quantized = any(isinstance(module, QuantizedLinear) for module in modules)
        self._multiply = [_product_of(module) for module in modules]
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self.adapters: AdapterProducts | None = None

    def pack(self) -> None:
        """Copy the present weights."""
        weights: list[Tensor] = [module.weight.detach() for module in self.modules]
        biases: list[Tensor] = [module.bias.detach() for module in self.modules if module.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)

    def unpack(self) -> None:
        self._packed = None

    def packing_problem(self) -> str:
        """What is wrong with the product of the packed weights; empty = nothing."""
        weight = self.modules[0].weight
        states = torch.arange(_TRIAL_TOKENS * weight.shape[1]).sin().to(weight.dtype).view(_TRIAL_TOKENS, -1)
        exact = torch.cat([linear(states, module.weight, module.bias) for module in self.modules], dim=-1)
        error = ((self(states) - exact).abs().max() / exact.abs().max()).item()
        return "" if error < _PACKED_ERROR[weight.dtype] else f"a product differs by {error:g}"

    def __call__(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """`added`: the product is added to it."""
        result = self._of_base(states, added)
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.add(self.modules, states, self._split(result))
        return result

    def _split(self, result: Tensor) -> list[Tensor]:
        return list(result.split([module.out_features for module in self.modules], dim=-1))

    def _of_base(self, states: Tensor, added: Tensor | None) -> Tensor:
        if self._packed is not None:
            product = torch.ops.mkldnn._linear_pointwise
            if added is not None:
                return product.binary(states, added, self._packed, self._bias, "add")
            return product(states, self._packed, self._bias, "none", [], "")
        results = [multiply(states) for multiply in self._multiply]
        result = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return result if added is None else added + result

    def each(self, states: Tensor) -> list[Tensor]:
        """The products with the modules."""
        if self._packed is not None:
            return self._split(self(states))
        results = [multiply(states) for multiply in self._multiply]
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.add(self.modules, states, results)
        return results

    def equal_rows(self) -> int:
        """The number of rows from which on those of a float32 product have the same bits for any number of rows."""
        if self._packed is not None:
            return 2  # a single row is another kernel of oneDNN
        weight = self.modules[0].weight
        states = torch.arange(2 * EQUAL_ROWS * weight.shape[1]).sin().view(2 * EQUAL_ROWS, -1)
        exact = self(states)
        unequal = (count for count in range(EQUAL_ROWS - 1, 0, -1) if not self(states[:count]).equal(exact[:count]))
        return 1 + next(unequal, 0)


def _product_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The product with its present and later weights, without what adapters add."""
    if isinstance(module, QuantizedLinear):
        return module.product
    return partial(linear, weight=module.weight, bias=module.bias)


class _Layer(NamedTuple):
    """The modules of one layer."""

    before_attention: Norm
    inputs: _Product
    """Queries, keys and values."""
    heads: tuple[int, int]
    """Number of query heads, and of key heads."""
    query_norm: Norm | None
    key_norm: Norm | None
    attended: _Product
    rules: ScoreRules
    before_mlp: Norm
    gate_and_up: _Product
    down: _Product


class DenseDecoder:
    """It computes with the weights of the model, and with packed copies of these where they are large: after an update
    `repack` copies them again."""

    def __init__(self, model: Any, family: _Family) -> None:
        decoder = model.model
        self._embedding, self._norm, self._head = decoder.embed_tokens, decoder.norm.forward, model.lm_head
        self._rotary = decoder.rotary_emb
        self._head_size = decoder.layers[0].self_attn.head_dim
        self._layers = [_layer(layer, family, self._head_size) for layer in decoder.layers]
        self.products = [
            product
            for layer in self._layers
            for product in (layer.inputs, layer.attended, layer.gate_and_up, layer.down)
        ]
        if "forward" not in self._head.__dict__:  # native.head_dtype has another product
            self._head = _Product(self._head)
            self.products.append(self._head)
        self.packable = [product for product in self.products if not product.is_quantized]
        self._is_packed = False

    def equal_rows(self) -> int:
        """The number of rows from which on those of a float32 step have the same bits for any number of rows."""
        shapes = {tuple(tuple(module.weight.shape) for module in product.modules): product for product in self.products}
        return max(product.equal_rows() for product in shapes.values())

    def pack(self) -> None:
        """Use packed copies of the weights."""
        self._is_packed = True
        self.repack()

    def unpack(self) -> None:
        self._is_packed = False
        for product in self.packable:
            product.unpack()

    @torch.inference_mode()
    def repack(self) -> None:
        """The weights have changed."""
        if self._is_packed:
            for product in self.packable:
                product.pack()

    def logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor | None, plan: AttentionPlan) -> Tensor:
        """Logits [rows, vocabulary] of the rows `kept`, None = all. token_ids, positions: [1, tokens]."""
        hidden = embedding(token_ids[0], self._embedding.weight)
        cos, sin = self._rotation(positions[0], hidden.dtype)
        for layer, cache in zip(self._layers, plan.caches.values(), strict=True):
            attended = self._attention(layer, layer.before_attention(hidden), cos, sin, cache, plan)
            hidden = layer.attended(attended, hidden)
            inner = layer.before_mlp(hidden)
            gate, up = layer.gate_and_up.each(inner)
            hidden = layer.down(silu(gate) * up, hidden)
        if kept is not None:
            hidden = hidden[kept]
        return self._head(self._norm(hidden))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [tokens, 1, head size], for states * cos + (states with exchanged halves) * sin."""
        angles = positions[:, None, None].float() * self._rotary.inv_freq
        cos, sin = angles.cos(), angles.sin()
        scaling = self._rotary.attention_scaling
        if scaling != 1.0:
            cos, sin = cos * scaling, sin * scaling
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def _attention(
        self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, plan: AttentionPlan
    ) -> Tensor:
        """The attended values [tokens, heads * size]."""
        split, num_keys = layer.heads
        states = layer.inputs(hidden).view(len(hidden), -1, self._head_size)
        both, values = states[:, : split + num_keys], states[:, split + num_keys :]
        if layer.query_norm is not None and layer.key_norm is not None:
            both = torch.cat((layer.query_norm(both[:, :split]), layer.key_norm(both[:, split:])), dim=1)
        both = both * cos + both.roll(self._head_size // 2, -1) * sin
        attended = attend(plan, cache, both[:, :split], both[:, split:], values, layer.rules)
        return attended.flatten(1)


def _layer(layer: Any, family: _Family, head_size: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if type(mlp.act_fn).__name__ != "SiLUActivation":
        raise TypeError(f"its activation is {type(mlp.act_fn).__name__}")
    window: int | None = attention.sliding_window if family.has_windows else None
    return _Layer(
        before_attention=layer.input_layernorm.forward,
        inputs=_Product(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=(attention.q_proj.out_features // head_size, attention.k_proj.out_features // head_size),
        query_norm=attention.q_norm.forward if family.has_norms else None,
        key_norm=attention.k_norm.forward if family.has_norms else None,
        attended=_Product(attention.o_proj),
        rules=ScoreRules(scaling=attention.scaling, window=window, softcap=None, sinks=None),
        before_mlp=layer.post_attention_layernorm.forward,
        gate_and_up=_Product(mlp.gate_proj, mlp.up_proj),
        down=_Product(mlp.down_proj),
    )


Compute = Callable[[DecodeInputs], Tensor]
"""Decode rows -> logits [rows, vocabulary]."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Returns what repeats a computation with the present content of its inputs, and the tensor of its result."""
_COPIES = 2
_TRIAL_ERROR = 0.02
"""Relative to the largest logit."""


def capture_cuda(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries allocate their workspaces at their first calls
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread may receive weights meanwhile
        logits = compute()
    return graph.replay, logits


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model, captured when a size first occurs. Only the engine thread uses it."""

    def __init__(self, compute: Compute, capture: Capture, *, weights: Iterable[Tensor]) -> None:
        self._compute, self._capture = compute, capture
        self._weights = list(weights)
        self._graphs: dict[tuple[int, ...], dict[tuple[int, ...], _Graph]] = {}
        """Addresses of the weights -> (rows, blocks per row) -> graph."""
        self.is_off = False

    def logits(self, inputs: DecodeInputs) -> Tensor | None:
        """[rows, vocabulary], valid until the next call; the tensors of a size are always the same. None when graphs
        cannot be used."""
        size = tuple(inputs.blocks.shape)
        graphs = self._graphs.setdefault(tuple(weight.data_ptr() for weight in self._weights), {})
        while len(self._graphs) > _COPIES:
            del self._graphs[next(iter(self._graphs))]
        if self.is_off or (size not in graphs and not self._add(graphs, inputs)):
            return None
        graphs[size].replay()
        return graphs[size].logits

    def trial_error(self, inputs: DecodeInputs) -> float:
        """Difference of a graph's logits, for another token than that of its capture, relative to the largest logit."""
        if self.logits(inputs) is None:
            return float("inf")
        inputs.tokens.add_(1)
        graph_logits = self.logits(inputs)
        assert graph_logits is not None
        graph_logits = graph_logits.clone()
        exact = self._compute(inputs)
        inputs.tokens.sub_(1)
        return ((graph_logits - exact).abs().max() / exact.abs().max()).item()

    def _add(self, graphs: dict[tuple[int, ...], _Graph], inputs: DecodeInputs) -> bool:
        """Capture a graph. It writes keys and values as the step does."""
        try:
            replay, logits = self._capture(lambda: self._compute(inputs))
        except RuntimeError as refused:
            get_logger(__name__).warning("decoding uses no CUDA graphs: %s", str(refused).splitlines()[0])
            self.is_off = True
            return False
        graphs[tuple(inputs.blocks.shape)] = _Graph(replay, logits)
        return True


def tried(graphs: DecodeGraphs, inputs: DecodeInputs) -> DecodeGraphs | None:
    """`graphs`, if a trial with rows of no sequence shows that they are right; None otherwise, with the reason in the
    log."""
    error = graphs.trial_error(inputs)
    if error < _TRIAL_ERROR:
        return graphs
    if not graphs.is_off:
        get_logger(__name__).warning("decoding uses no CUDA graphs: their logits differ by %g", error)
    return None
