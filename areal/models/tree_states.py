"""Layers that keep a state, over the prefix tree of rows: a branch continues the state of the one that it leaves.

A branch is cut where others leave it. A call computes parts of branches, from the states behind the tokens before them,
which earlier calls returned; the gradient of a state is the sum of those of all parts that continue it.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache, LinearAttentionLayer

MIN_PART = 16
"""Tokens below which those that continue a part compute it again, because a call costs more. At least 2: layers
continue a state by one token with functions that write to it."""
_CHUNK, _PADDED = 64, 1.5
"""Tokens of a chunk of linear attention, and the largest ratio of padded to real tokens in a call."""
_TOLERANCE = 0.03
"""The largest relative error of a layer that continues its state, in half precision."""


def is_one_call(lengths: Sequence[int]) -> bool:
    """Whether padding sequences to the longest costs less than another call."""
    is_padded_little = max(lengths) * len(lengths) <= _PADDED * sum(lengths)
    return is_padded_little and len({-(-each // _CHUNK) for each in lengths}) == 1


def cache_parameter(layer: nn.Module) -> str | None:
    """The parameter by which a layer takes a `Cache` of transformers; None: it keeps its state otherwise."""
    names = inspect.signature(type(layer).forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), None)


@dataclass(frozen=True, slots=True)
class Span:
    """The computed tokens of a branch, in a tree in depth-first order."""

    first: int
    size: int
    shared: int
    """Tokens of its rows before it."""
    parent: int
    """The branch that the last of them is on; -1 = none."""


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: np.ndarray  # [n] places in the tree
    num_new: int
    """How many of the last tokens have their outputs from this part."""
    after: int
    """The part whose state it continues; -1 = none."""
    depth: int
    """Number of parts before it."""
    is_continued: bool


def _parts(spans: Sequence[Span]) -> list[_Part]:
    """Parts come after those that they continue."""
    cuts: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        cuts[span.parent].add(span.shared)
    parts: list[_Part] = []
    paths: list[np.ndarray] = []
    states = {(-1, 0): (-1, 0)}
    """(branch, tokens of its rows up to a cut) -> (the part with the last state before the cut, tokens up to it)."""
    for number, span in enumerate(spans):
        tokens = np.arange(span.first, span.first + span.size)
        paths.append(tokens if span.parent < 0 else np.concatenate([paths[span.parent][: span.shared], tokens]))
        after, begin = states[span.parent, span.shared]
        done, end = span.shared, span.shared + span.size
        for cut in sorted({*cuts[number], end}):
            is_continued = cut in cuts[number] and cut - begin >= MIN_PART
            if is_continued or (cut == end and end > done):
                depth = 0 if after < 0 else parts[after].depth + 1
                parts.append(_Part(paths[-1][begin:cut], cut - done, after, depth, is_continued))
            if is_continued:
                after, begin, done = len(parts) - 1, cut, cut
            states[number, cut] = after, begin
    return parts


@dataclass(frozen=True, slots=True)
class _Call:
    tokens: Tensor  # [n, L] int64: places in the tree of the tokens of n parts; padded with the last
    after: tuple[tuple[int, Tensor], ...]
    """Calls with the states that the parts continue, in order: (number of the call, its parts [m] int64)."""
    is_continued: bool


@dataclass(frozen=True, slots=True)
class StateCalls:
    """The calls of a layer for a row that is a tree."""

    calls: tuple[_Call, ...]
    places: Tensor  # [U] int64: the place of each token of the tree in the outputs of the calls, one after another


def state_calls(spans: Sequence[Span], device: torch.device) -> StateCalls:
    """Parts that others continue are not padded, because padding would be a part of their state."""
    parts = _parts(spans)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        if part.is_continued:
            alike[part.depth, len(part.tokens)].append(number)
    groups = [alike[key] for key in sorted(alike)]
    last: list[list[int]] = []
    for number in sorted(range(len(parts)), key=lambda index: (parts[index].after < 0, len(parts[index].tokens))):
        if parts[number].is_continued:
            continue
        both = [*last[-1], number] if last else []
        is_alike = len({parts[index].after < 0 for index in both}) == 1
        if is_alike and is_one_call([len(parts[index].tokens) for index in both]):
            last[-1] = both
        else:
            last.append([number])
    calls: list[_Call] = []
    place_of: dict[int, tuple[int, int]] = {-1: (-1, 0)}
    places = np.empty(sum(span.size for span in spans), dtype=np.int64)
    begin = 0
    for group in [*groups, *last]:
        group = sorted(group, key=lambda member: place_of[parts[member].after])
        width = max(2, *(len(parts[member].tokens) for member in group))
        index = np.stack(
            [np.pad(parts[member].tokens, (0, width - len(parts[member].tokens)), "edge") for member in group]
        )
        sources: dict[int, list[int]] = defaultdict(list)
        for row, member in enumerate(group):
            part = parts[member]
            size = len(part.tokens)
            places[part.tokens[size - part.num_new :]] = begin + row * width + np.arange(size - part.num_new, size)
            place_of[member] = (len(calls), row)
            if part.after >= 0:
                call, place = place_of[part.after]
                sources[call].append(place)
        after = tuple((call, torch.tensor(rows, device=device)) for call, rows in sources.items())
        calls.append(_Call(torch.from_numpy(index).to(device), after, parts[group[0]].is_continued))
        begin += index.size
    return StateCalls(tuple(calls), torch.from_numpy(places).to(device))


class _Carried(LinearAttentionLayer):
    """States with gradients: each is replaced, where those of transformers are written to."""

    def __init__(self, number_of_states: int, before: Sequence[tuple["_Carried", Tensor]]) -> None:
        super().__init__(number_of_states)
        self.record_past = True  # so that layers do not write to a state to continue it by one token
        for number in range(number_of_states):
            for joined, states in (
                (self.conv_states, [(each.conv_states[number], rows) for each, rows in before]),
                (self.recurrent_states, [(each.recurrent_states[number], rows) for each, rows in before]),
            ):
                chosen = [state.index_select(0, rows) for state, rows in states if state is not None]
                if chosen:
                    joined[number] = torch.cat(chosen)
                    self.has_previous_state[number] = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        before = self.conv_states[state_idx]
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            whole = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            whole = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = whole[..., -size:]
        self.has_previous_state[state_idx] = True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def for_each_part(
    layer: nn.Module,
    forward: Callable[..., Any],
    plan: StateCalls,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: Any,
) -> Any:
    """What the `forward` function of a layer returns of a tree [1, U, ...]. `config`: of the text model."""
    name, index = cache_parameter(layer), layer.layer_idx
    assert name is not None
    assert isinstance(index, int)
    number = max(getattr(config, "number_of_conv_states", 1), 1)
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    values, form = tree_flatten({**dict(zip(names, args, strict=False)), **kwargs, name: None})
    results: list[list[Any]] = []
    kept: list[Any] = []
    output_form = form
    for call in plan.calls:
        inputs = tree_unflatten([_of_tokens(value, plan, call.tokens) for value in values], form)
        state: Any = _Carried(number, [(kept[before], rows) for before, rows in call.after])
        outputs, output_form = tree_flatten(forward(**inputs | {name: Cache(layers=[state] * (index + 1))}))
        results.append([out.flatten(0, 1) if isinstance(out, Tensor) else out for out in outputs])
        if call.is_continued:
            kept.append(state)
    joined = [
        _chosen(torch.cat(each), plan.places).unsqueeze(0) if isinstance(each[0], Tensor) else each[0]
        for each in zip(*results, strict=True)
    ]
    return tree_unflatten(joined, output_form)


def _of_tokens(value: Any, plan: StateCalls, tokens: Tensor) -> Any:
    is_of_tokens = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, len(plan.places))
    return _chosen(value[0], tokens) if is_of_tokens else value


def _chosen(values: Tensor, places: Tensor) -> Tensor:
    if values.ndim < 2 or not values.is_floating_point():
        return values[places]
    # an embedding, because the backward pass of an index adds one row at a time
    return F.embedding(places, values.flatten(1)).unflatten(-1, values.shape[1:])


def continues_state(layer: nn.Module, config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether such a layer, with the installed packages, gives the same outputs and gradients of inputs for a tree as
    for separate rows. `layer` may be on the meta device. Raises torch.OutOfMemoryError and torch.AcceleratorError: they
    say nothing about the layer."""
    name = cache_parameter(layer)
    if name is None:
        return False
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(0)
            tried: Any = type(layer)(config, layer_idx=0)
            for buffer_name, buffer in layer.named_buffers(recurse=False):  # some are from the model
                tried._buffers.setdefault(buffer_name, torch.ones(buffer.shape))
            tried.to(device, dtype)
            for weight in tried.parameters():
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5)
            size = (1, MIN_PART + 5, config.hidden_size)
            tree = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
            common, *ends = tree.split([MIN_PART, 2, 3], dim=1)
            rows = [tried(torch.cat([common, end], dim=1), **{name: None}) for end in ends]
            spans = [Span(0, MIN_PART + 2, 0, -1), Span(MIN_PART + 2, 3, MIN_PART, 0)]
            outputs = for_each_part(tried, tried.forward, state_calls(spans, device), (tree,), {}, config)
            pairs: list[tuple[Tensor, Tensor]] = []
            for ours, first, second in zip(*map(tree_leaves, (outputs, *rows)), strict=True):
                if isinstance(ours, Tensor):
                    whole = torch.cat([first, second[:, MIN_PART:]], dim=1)
                    weights = torch.randn_like(whole)
                    gradient, exact = (
                        torch.autograd.grad((each * weights).sum(), tree, retain_graph=True)[0]
                        for each in (ours, whole)
                    )
                    pairs += [(ours, whole), (gradient, exact)]
            return all(bool((ours - exact).norm() <= _TOLERANCE * exact.norm()) for ours, exact in pairs)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
