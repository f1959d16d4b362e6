"""Decode steps as CUDA graphs: all kernels of a step start with one call, where a trial gives the same logits.

A graph has fixed sizes and addresses: it reads the tensors of `DecodeRows` for one size, and each of the two copies of
the weights that an update exchanges has its own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers.modeling_utils import PreTrainedModel

from areal.inference.attention import AttentionPlan, LayerCache, LayerShape, PromptGroup, ScoreRules, attend
from areal.inference.decode_rows import DecodeInputs
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
    return result if torch.equal(mine, theirs) else None


def _trial_plan(shapes: Sequence[LayerShape], dtype: torch.dtype) -> AttentionPlan:
    """One prompt in a cache of one block."""
    return AttentionPlan(
        caches=[LayerCache(torch.zeros((1, _TRIAL_TOKENS, *shape.sizes), dtype=dtype), shape) for shape in shapes],
        slots=torch.arange(_TRIAL_TOKENS),
        decode=[],
        prompts=[PromptGroup(start=0, num_sequences=1, count=_TRIAL_TOKENS)],
        later=[],
    )


class _Layer(NamedTuple):
    """The modules of one layer."""

    before_attention: Norm
    queries: nn.Linear
    keys: nn.Linear
    values: nn.Linear
    query_norm: Norm | None
    key_norm: Norm | None
    attended: nn.Linear
    rules: ScoreRules
    before_mlp: Norm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    activation: Callable[[Tensor], Tensor]


class DenseDecoder:
    """It computes with the weights of the model, so updates of these need no call."""

    def __init__(self, model: Any, family: _Family) -> None:
        decoder = model.model
        self._embedding, self._norm, self._head = decoder.embed_tokens, decoder.norm.forward, model.lm_head
        self._rotary = decoder.rotary_emb
        self._head_size = decoder.layers[0].self_attn.head_dim
        self._layers = [_layer(layer, family) for layer in decoder.layers]

    def logits(self, token_ids: Tensor, positions: Tensor, kept: Tensor | None, plan: AttentionPlan) -> Tensor:
        """Logits [rows, vocabulary] of the rows `kept`, None = all. token_ids, positions: [1, tokens]."""
        hidden = embedding(token_ids[0], self._embedding.weight)
        cos, sin = self._rotation(positions[0], hidden.dtype)
        for layer, cache in zip(self._layers, plan.caches, strict=True):
            hidden = hidden + self._attention(layer, layer.before_attention(hidden), cos, sin, cache, plan)
            inner = layer.before_mlp(hidden)
            inner = layer.activation(_linear(layer.gate, inner)) * _linear(layer.up, inner)
            hidden = hidden + _linear(layer.down, inner)
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
        shape = (len(hidden), -1, self._head_size)
        queries, keys = _linear(layer.queries, hidden).view(shape), _linear(layer.keys, hidden).view(shape)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = layer.query_norm(queries), layer.key_norm(keys)
        both = torch.cat((queries, keys), dim=1)
        both = both * cos + both.roll(self._head_size // 2, -1) * sin
        split = queries.shape[1]
        values = _linear(layer.values, hidden).view(shape)
        found = attend(plan, cache, both[:, :split], both[:, split:], values, layer.rules)
        return _linear(layer.attended, found.view(len(hidden), -1))


def _linear(module: nn.Linear, states: Tensor) -> Tensor:
    return linear(states, module.weight, module.bias)


def _layer(layer: Any, family: _Family) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window: int | None = attention.sliding_window if family.has_windows else None
    return _Layer(
        before_attention=layer.input_layernorm.forward,
        queries=attention.q_proj,
        keys=attention.k_proj,
        values=attention.v_proj,
        query_norm=attention.q_norm.forward if family.has_norms else None,
        key_norm=attention.k_norm.forward if family.has_norms else None,
        attended=attention.o_proj,
        rules=ScoreRules(scaling=attention.scaling, window=window, softcap=None, sinks=None),
        before_mlp=layer.post_attention_layernorm.forward,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        activation=mlp.act_fn.forward,
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
        found = self.logits(inputs)
        assert found is not None
        found = found.clone()
        exact = self._compute(inputs)
        inputs.tokens.sub_(1)
        return ((found - exact).abs().max() / exact.abs().max()).item()

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
