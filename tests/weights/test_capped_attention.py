"""Capped scores and sinks, against a softmax over all scores in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal.models.attention import capped_attention

N, H, L, K, D = 2, 3, 5, 7, 4


def states(length=L, keys=K):
    g = torch.Generator().manual_seed(0)
    shapes = ((N, H, length, D), (N, H, keys, D), (N, H, keys, D + 2))
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def slow(query, key, value, mask, scale, softcap, sinks):
    """Query by query."""
    rows = []
    for place in range(query.shape[2]):
        scores = (query[:, :, place, None] * key).sum(-1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = mask.expand(N, 1, query.shape[2], key.shape[2])[:, :, place]
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.expand(H, query.shape[2], 1)[:, place].exp()
        rows.append(((weights / total).unsqueeze(-1) * value).sum(2))
    return torch.stack(rows, dim=2)


def masks() -> dict[str, torch.Tensor]:
    window = torch.ones(L, K, dtype=torch.bool).tril(2).triu(-1)
    each = torch.rand(N, 1, L, K, generator=torch.Generator().manual_seed(1)) < 0.5
    each[..., 0] = True
    return {"window": window, "each": each, "one_row": each[:, :, :1]}


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("kind", ["none", "of_heads", "of_rows"])
@pytest.mark.parametrize("max_scores", [None, 1, N * H * K * 2])
@pytest.mark.parametrize("name", ["window", "each", "one_row", "added", "causal", "whole"])
def test_outputs_and_gradients_are_those_of_all_scores(softcap, kind, max_scores, name):
    query, key, value = states(L, L if name == "causal" else K)
    g = torch.Generator().manual_seed(2)
    shape = {"none": None, "of_heads": (H, 1, 1), "of_rows": (H, L, 1)}[kind]
    sinks = None if shape is None else torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    mask = masks().get(name, torch.ones(1, 1, dtype=torch.bool))
    if name == "causal":
        mask = torch.ones(L, L, dtype=torch.bool).tril()
    elif name == "added":
        mask = masks()["each"]
    passed = {"causal": None, "whole": None, "added": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}
    actual = capped_attention(
        query, key, value, passed.get(name, mask), is_causal=name == "causal", scale=0.6, softcap=softcap, sinks=sinks,
        max_scores=max_scores,
    )  # fmt: skip
    expected = slow(query, key, value, mask, 0.6, softcap, sinks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    inputs = [query, key, value, *([] if sinks is None else [sinks])]
    factors = torch.randn(actual.shape, generator=g, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((values * factors).sum(), inputs) for values in (actual, expected))
    for item, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(item, other, rtol=0, atol=1e-12)


def test_without_caps_and_sinks_it_is_the_attention_of_torch():
    query, key, value = (each[:, :, :5, :D].detach() for each in states())
    actual = capped_attention(query, key, value, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_half_precision_has_scores_in_float32():
    query, key, value = (each.detach().bfloat16() for each in states())
    result = capped_attention(query, key, value, softcap=0.7)
    exact = capped_attention(query.double(), key.double(), value.double(), softcap=0.7)
    assert result.dtype == torch.bfloat16
    assert (result.double() - exact).abs().max() < 0.02


class Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().size() // result.itemsize)
        return result


def test_memory_does_not_grow_with_the_square_of_the_length():
    length, limit = 400, 10_000
    query, key, value = states(length, length)
    sinks = torch.zeros(H, 1, 1, dtype=torch.float64, requires_grad=True)
    kept = dict[int, int]()

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().size() // tensor.itemsize
        return tensor

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = capped_attention(query, key, value, is_causal=True, softcap=2.0, sinks=sinks, max_scores=limit)
        result.sum().backward()
    states_size = value.numel()
    assert sizes.largest <= max(limit + N * H * length, states_size)
    assert sum(kept.values()) < 8 * states_size < N * H * length**2 / 4
    assert sinks.grad is not None
