"""The blockwise head against a softmax over all logits in float64, by hand, by finite differences; what it costs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal.api.batch import OutputSpec
from areal.engine.linear_logprobs import VocabPart, clamped_entropy, linear_logprobs
from areal.engine.mesh import TrainerMesh

T, H, V = 13, 5, 29
EVERYTHING = OutputSpec(entropy_grad=True, entropy_clamp=0.3, candidates=4)


def inputs(dtype=torch.float64, *, tokens=T, width=H, vocabulary=V, seed=0):
    """hidden, weight, bias with gradients, and labels."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
    made = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return *made, torch.randint(0, vocabulary, (tokens,), generator=g)


def slow(hidden, weight, bias, labels, temperature=1.0, clamp=0.0, ids=None, softcap=None):
    """Token by token, from all logits: log-probability, entropy, entropy of the most likely part, candidates."""
    rows = []
    each = torch.as_tensor(temperature, dtype=hidden.dtype).expand(hidden.shape[0])
    for t in range(hidden.shape[0]):
        logits = weight @ hidden[t] + bias
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / each[t]
        logprobs = logits - torch.logsumexp(logits, 0)
        stay = torch.sort(logits, descending=True).values[: len(logits) - int(len(logits) * clamp)]
        part = stay - torch.logsumexp(stay, 0)
        chosen = logprobs if ids is None else torch.stack([logprobs[i] for i in ids[t]])
        rows.append((logprobs[labels[t]], -(logprobs.exp() * logprobs).sum(), -(part.exp() * part).sum(), chosen))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def fields(result):
    return [result.logprobs, result.entropy, result.clamped_entropy, result.candidate_logprobs]


def weighted(tensors, seed=3):
    g = torch.Generator().manual_seed(seed)
    return sum((values * torch.randn(values.shape, generator=g, dtype=values.dtype)).sum() for values in tensors)


@pytest.mark.parametrize("max_logits", [None, 1, 7, 50, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
@pytest.mark.parametrize("whole_vocabulary", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_a_softmax_over_all_logits(monkeypatch, max_logits, temperature, whole_vocabulary, softcap):
    monkeypatch.setattr("areal.engine.linear_logprobs.MAX_BLOCK_TOKENS", 5)
    hidden, weight, bias, labels = inputs()
    if temperature == "each":
        temperature = torch.linspace(0.4, 1.7, len(labels), dtype=torch.float64)
    ids = None if whole_vocabulary else torch.randint(0, V, (T, 4))  # with repetitions
    spec = OutputSpec(entropy_grad=True, entropy_clamp=0.3, candidates=0)
    for clamp in (0.0, 0.3):
        spec = OutputSpec(entropy_grad=True, entropy_clamp=clamp, candidates=0)
        actual = linear_logprobs(
            hidden, weight, bias, labels, temperature=temperature, outputs=spec, candidate_ids=ids,
            max_logits=max_logits, softcap=softcap,
        )  # fmt: skip
        expected = slow(hidden, weight, bias, labels, temperature, clamp, ids, softcap)
        if clamp == 0.0:
            assert actual.clamped_entropy is None
        mine, theirs = ([v for v in values if v is not None] for values in (fields(actual), expected))
        theirs = theirs if clamp else [theirs[0], theirs[1], theirs[3]]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad(weighted(values), (hidden, weight, bias)) for values in (mine, theirs)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("max_logits", [None, 1, 7, 50])
@pytest.mark.parametrize("clamp", [0.0, 0.3])
def test_squared_sums_equal_those_of_all_probabilities(max_logits, clamp):
    hidden, weight, bias, labels = inputs()
    valid = torch.arange(T) != 3
    spec = OutputSpec(squared_sums=True, entropy_clamp=clamp)
    actual = linear_logprobs(
        hidden, weight, bias, labels, temperature=0.7, outputs=spec, valid=valid, max_logits=max_logits
    )
    expected = ((hidden @ weight.T + bias) / 0.7).softmax(-1).square().sum(-1).masked_fill(~valid, 0.0)
    torch.testing.assert_close(actual.squared_sums, expected.detach(), rtol=0, atol=1e-12)
    assert not actual.squared_sums.requires_grad
    plain = linear_logprobs(hidden, weight, bias, labels, temperature=0.7, valid=valid)
    assert plain.squared_sums is None
    actual.logprobs.sum().backward()  # one output more does not disturb the others


@pytest.mark.parametrize("max_logits", [None, 40])
@pytest.mark.parametrize("output", range(4))
def test_gradients_by_finite_differences(max_logits, output):
    hidden, weight, bias, labels = inputs(tokens=4, width=3, vocabulary=11)
    ids = torch.tensor([[0, 5], [10, 10], [3, 2], [1, 4]])

    def requested_output(h, w, b):
        return fields(
            linear_logprobs(
                h, w, b, labels, temperature=1.3, outputs=EVERYTHING, candidate_ids=ids, max_logits=max_logits
            )
        )[output]

    assert torch.autograd.gradcheck(requested_output, (hidden, weight, bias), eps=1e-6, atol=1e-7)


def by_hand(logits, **options):
    """One token whose logits are the weight itself."""
    weight = torch.tensor(logits, dtype=torch.float64).unsqueeze(1).requires_grad_()
    hidden = torch.ones(1, 1, dtype=torch.float64)
    return weight, linear_logprobs(hidden, weight, None, torch.tensor([0]), **options)


def test_two_tokens_by_hand():
    weight, result = by_hand([math.log(3.0), 0.0], outputs=OutputSpec(entropy_grad=True))
    assert result.logprobs.item() == pytest.approx(math.log(0.75))
    assert result.entropy.item() == pytest.approx(0.5623351446)
    (grad,) = torch.autograd.grad(result.logprobs, weight, retain_graph=True)
    assert grad.flatten().tolist() == pytest.approx([0.25, -0.25])
    (grad,) = torch.autograd.grad(result.entropy, weight)  # -p (log p + H) = -0.75 (0.5623 - 0.2877)
    assert grad.flatten().tolist() == pytest.approx([-0.2059898041, 0.2059898041])


def test_the_bound_of_the_clamp_lies_between_logits():
    """Of 3, 1, 1, 0 two or three stay: limits half way to the next, so that rounding puts nothing on the other side."""
    low, high, _, part, _ = clamped_entropy(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), 2, VocabPart(4)).flatten().tolist()
    assert (low, high, part) == (0.5, 2.0, 0.5)
    low, high, _, part, _ = clamped_entropy(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), 1, VocabPart(4)).flatten().tolist()
    assert (low, high, part) == (0.5, 2.0, 1.0)
    low, high, _, part, _ = clamped_entropy(torch.tensor([[1.0, 1.0, 1.0, 1.0]]), 1, VocabPart(4)).flatten().tolist()
    assert (low, high, part) == (-math.inf, math.inf, 0.75)


def test_large_logits_lose_nothing_in_their_difference():
    hidden, weight = torch.ones(1, 1), torch.tensor([[1000.0], [990.0]])
    actual = linear_logprobs(hidden, weight, None, torch.tensor([0]), outputs=OutputSpec(candidates=1), max_logits=1)
    expected = -math.log1p(math.exp(-10.0))  # -4.5e-5, less than the distance of float32 numbers at 1000
    assert actual.logprobs.item() == pytest.approx(expected, rel=1e-3)
    assert actual.candidate_logprobs.item() == pytest.approx(expected, rel=1e-3)
    assert actual.entropy.item() == pytest.approx(-expected + 10 * math.exp(-10.0), rel=1e-3)


def test_clamped_entropy_by_hand():
    spec = OutputSpec(entropy_clamp=0.5)
    logits = [math.log(6.0), 0.0, math.log(3.0), 0.0]
    weight, actual = by_hand(logits, outputs=spec)
    expected = math.log(3.0) - 2 / 3 * math.log(2.0)  # of 2/3 and 1/3
    assert actual.clamped_entropy.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(actual.clamped_entropy, weight)
    slope = 2 / 3 * (math.log(2 / 3) + expected)
    assert grad.flatten().tolist() == pytest.approx([-slope, 0.0, slope, 0.0])


@pytest.mark.parametrize("max_logits", [None, 7])
@pytest.mark.parametrize("clamp", [0.1, 0.3, 0.6, 0.9])
def test_clamped_entropy_among_many_equal_logits(max_logits, clamp):
    """Logits of a few values, as bfloat16 makes them; the gradient is the mean over all choices among the last ones."""
    g = torch.Generator().manual_seed(2)
    weight = torch.randint(0, 4, (V, 1), generator=g).double().requires_grad_()
    hidden, labels = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    spec = OutputSpec(entropy_clamp=clamp)
    actual = linear_logprobs(hidden, weight, None, labels, outputs=spec, max_logits=max_logits).clamped_entropy
    (grad,) = torch.autograd.grad(actual.sum(), weight)
    wanted, num_orders = torch.zeros_like(grad), 100
    for seed in range(num_orders):
        noise = 1e-9 * torch.randn(V, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        shaken = (weight.detach() + noise).requires_grad_()
        expected = slow(hidden, shaken, torch.zeros(V, dtype=torch.float64), labels, clamp=clamp)[2]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
        wanted += torch.autograd.grad(expected.sum(), shaken)[0] / num_orders
    torch.testing.assert_close(grad, wanted, rtol=0, atol=0.04)
    for value in range(4):  # equal tokens, equal gradients
        same = grad[weight == value]
        assert same.numel() == 0 or (same - same[0]).abs().max() < 1e-12


def test_tokens_of_equal_logits_share_the_place_that_is_left():
    """Of the weights 2, 1, 1 one goes: 2/3 and 1/3 stay, and no gradient says which."""
    weight, actual = by_hand([math.log(2.0), 0.0, 0.0], outputs=OutputSpec(entropy_clamp=0.34))
    expected = math.log(3.0) - 2 / 3 * math.log(2.0)
    assert actual.clamped_entropy.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(actual.clamped_entropy, weight)
    slope = 2 / 3 * (math.log(2 / 3) + expected)
    assert grad.flatten().tolist() == pytest.approx([-slope, slope / 2, slope / 2])


@pytest.mark.parametrize("max_logits", [None, 3, 30])
def test_the_most_likely_tokens_are_found_across_blocks(max_logits):
    hidden, weight, bias, labels = inputs()
    spec = OutputSpec(candidates=4)
    result = linear_logprobs(hidden, weight, bias, labels, outputs=spec, max_logits=max_logits)
    best = torch.log_softmax(hidden @ weight.T + bias, -1).topk(4, -1)
    assert torch.equal(result.candidate_ids, best.indices)
    torch.testing.assert_close(result.candidate_logprobs, best.values, rtol=0, atol=1e-12)
    again = linear_logprobs(hidden, weight, bias, labels, outputs=spec, candidate_ids=result.candidate_ids)
    assert torch.equal(again.candidate_ids, result.candidate_ids)
    valid = torch.arange(T) != 2
    some = linear_logprobs(hidden, weight, bias, labels, outputs=spec, valid=valid, max_logits=max_logits)
    assert some.candidate_ids.tolist() == (best.indices * valid.unsqueeze(1)).tolist()
    grads = [torch.autograd.grad(weighted([part.candidate_logprobs]), weight)[0] for part in (result, again)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_more_candidates_than_tokens_are_all_of_them():
    hidden, weight, bias, labels = inputs(vocabulary=3)
    result = linear_logprobs(hidden, weight, bias, labels, outputs=OutputSpec(candidates=9))
    assert result.candidate_ids.sort(-1).values.tolist() == [[0, 1, 2]] * T


def test_only_requested_outputs_are_computed():
    hidden, weight, bias, labels = inputs()
    result = linear_logprobs(hidden, weight, bias, labels, candidate_ids=torch.zeros(T, 2, dtype=torch.int64))
    assert fields(result)[2:] == [None, None]
    assert result.candidate_ids is None
    assert result.logprobs.requires_grad
    assert not result.entropy.requires_grad


@pytest.mark.parametrize("max_logits", [None, 20])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_invalid_tokens_have_no_effect(max_logits, bad):
    hidden, weight, bias, labels = inputs()
    valid = torch.arange(T) % 3 != 1
    broken = torch.where(valid.unsqueeze(1), hidden.detach(), bad).requires_grad_()
    ids = torch.randint(0, V, (T, 4))
    grads = []
    for states in (broken, hidden):
        result = linear_logprobs(
            states, weight, bias, labels, outputs=EVERYTHING, candidate_ids=ids, valid=valid, max_logits=max_logits
        )
        for values in (*fields(result), result.candidate_ids):
            assert values[~valid].count_nonzero() == 0
            assert values[valid].isfinite().all()
        upstream = [torch.where(valid.reshape(-1, *[1] * (v.ndim - 1)), 0.5, math.nan) * v for v in fields(result)]
        total = sum(torch.where(valid.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0).sum() for v in upstream)
        grads.append(torch.autograd.grad(total, (states, weight, bias)))
    for mine, theirs in zip(*grads, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_logits", [None, 20])
def test_nan_of_a_valid_token_stays_at_its_position(max_logits):
    hidden, weight, bias, labels = inputs()
    broken = hidden.detach().clone()
    broken[4, 2] = math.nan
    broken.requires_grad_()
    result = linear_logprobs(broken, weight, bias, labels, outputs=EVERYTHING, max_logits=max_logits)
    for values in fields(result):
        is_bad = values.isnan().reshape(T, -1).any(1)
        assert is_bad.nonzero().flatten().tolist() == [4]
    grad = torch.autograd.grad(result.logprobs[4] + result.logprobs[5], (broken, weight))
    assert grad[0][4].isnan().all()
    assert grad[0][5].isfinite().all()
    assert grad[1].isnan().all()
    upstream = torch.full((T,), math.nan, dtype=torch.float64)
    fine = linear_logprobs(hidden, weight, bias, labels, max_logits=max_logits)
    assert torch.autograd.grad(fine.logprobs, hidden, upstream)[0].isnan().all()


@pytest.mark.parametrize("scale", [1e-30, 300.0])
def test_certain_and_uniform_distributions(scale):
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.no_grad():
        weight *= scale
        bias *= scale
    actual = linear_logprobs(hidden, weight, bias, labels, outputs=EVERYTHING, max_logits=30)
    expected = slow(*(v.detach().double() for v in (hidden, weight, bias)), labels, 1.0, 0.3, actual.candidate_ids)
    for mine, theirs in zip(fields(actual), expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=2e-6 * max(scale, 1.0))
    assert all(g.isfinite().all() for g in torch.autograd.grad(weighted(fields(actual)), (hidden, weight, bias)))


def test_no_tokens_and_no_gradient_give_zeros():
    hidden, weight, bias, labels = inputs(tokens=0)
    result = linear_logprobs(hidden, weight, bias, labels, outputs=EVERYTHING)
    assert [tuple(v.shape) for v in fields(result)] == [(0,), (0,), (0,), (0, 4)]
    (grad,) = torch.autograd.grad(result.logprobs.sum(), weight)
    assert torch.equal(grad, torch.zeros_like(weight))  # a gradient all the same: FSDP reduces it
    hidden, weight, bias, labels = inputs()
    grads = torch.autograd.grad(linear_logprobs(hidden, weight, bias, labels).logprobs.sum() * 0.0, (hidden, weight))
    assert [g.count_nonzero().item() for g in grads] == [0, 0]


def test_frozen_heads_and_frozen_states():
    hidden, weight, bias, labels = inputs()
    expected = torch.autograd.grad(linear_logprobs(hidden, weight, bias, labels).logprobs.sum(), (hidden, weight, bias))
    for states, head, part in ((hidden, weight.detach(), bias.detach()), (hidden.detach(), weight, bias)):
        total = linear_logprobs(states, head, part, labels, max_logits=20).logprobs.sum()
        wanted = [v for v in (states, head, part) if v.requires_grad]
        for mine, theirs in zip(
            torch.autograd.grad(total, wanted), expected[:1] if len(wanted) == 1 else expected[1:], strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert not linear_logprobs(hidden, weight, bias, labels).logprobs.requires_grad


@pytest.mark.parametrize("block_tokens", [256, 8])
def test_bfloat16_is_rounded_where_a_linear_layer_rounds(monkeypatch, block_tokens):
    """As close to float64 as autograd over all logits at once, which rounds the weight's gradient once as well."""
    monkeypatch.setattr("areal.engine.linear_logprobs.MAX_BLOCK_TOKENS", block_tokens)
    hidden, weight, bias, labels = inputs(torch.bfloat16, tokens=256, width=32, vocabulary=300)
    outputs, up = OutputSpec(entropy_grad=True), torch.randn(256)

    def grads(logprobs, entropy, leaves):
        total = (logprobs * up).sum() + 0.3 * (entropy * up).sum()
        return [g.double() for g in torch.autograd.grad(total, leaves)]

    leaves = [v.detach().double().requires_grad_() for v in (hidden, weight, bias)]
    exact = grads(*slow(*leaves, labels)[:2], leaves)
    result = linear_logprobs(hidden, weight, bias, labels, outputs=outputs, max_logits=2**11)
    mine = torch.autograd.grad((result.logprobs * up).sum() + 0.3 * (result.entropy * up).sum(), (hidden, weight, bias))
    assert [g.dtype for g in mine] == [torch.bfloat16] * 3
    logprobs = F.linear(hidden, weight, bias).float().log_softmax(-1)
    theirs = grads(
        logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), (hidden, weight, bias)
    )
    torch.testing.assert_close(result.logprobs, logprobs.gather(1, labels[:, None])[:, 0], rtol=0, atol=2e-6)
    errors = [
        [((g.double() - e).norm() / e.norm()).item() for g, e in zip(each, exact, strict=True)]
        for each in (mine, theirs)
    ]
    assert max(errors[0]) < 0.012
    assert errors[0][1] < 1.05 * errors[1][1]


class Sizes(TorchDispatchMode):
    """Largest tensor that any operation makes, and the sum over all."""

    largest = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and value._base is None:
                self.largest, self.total = max(self.largest, value.numel()), self.total + value.numel()
        return result


def test_all_logits_never_exist_at_once():
    hidden, weight, bias, labels = inputs(tokens=200, width=2, vocabulary=300)
    with Sizes() as sizes:
        result = linear_logprobs(hidden, weight, bias, labels, outputs=EVERYTHING, max_logits=1000)
        weighted(fields(result)).backward()
    assert sizes.largest <= 1000 + 200
    assert sizes.total > 200 * 300


def backward_work(up, outputs, use_entropy=False):
    hidden, weight, bias, labels = inputs(tokens=100, width=2, vocabulary=300)
    result = linear_logprobs(hidden, weight, bias, labels, outputs=outputs, max_logits=3000)
    total = (result.logprobs * up).sum() + (result.entropy.sum() if use_entropy else 0.0)
    with Sizes() as sizes:
        total.backward()
    return sizes.total


def test_the_backward_pass_works_for_what_has_a_gradient_only():
    every, few = torch.ones(100, dtype=torch.float64), (torch.arange(100) % 10 == 0).double()
    plain = backward_work(every, OutputSpec())
    assert backward_work(few, OutputSpec()) < 0.2 * plain
    assert backward_work(every, OutputSpec(entropy_grad=True)) < 1.01 * plain
    assert backward_work(every, OutputSpec(entropy_grad=True), use_entropy=True) > 1.2 * plain


def test_the_same_call_gives_the_same_bits():
    hidden, weight, bias, labels = inputs(torch.float32, tokens=50, width=16, vocabulary=400)

    def once():
        result = linear_logprobs(hidden, weight, bias, labels, outputs=EVERYTHING, max_logits=2000)
        return [*fields(result), *torch.autograd.grad(weighted(fields(result)), (hidden, weight, bias))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_a_sharded_weight_is_refused():
    hidden, weight, _, labels = inputs()
    sharded = distribute_tensor(weight.detach(), TrainerMesh.open(None).device_mesh())
    with pytest.raises(RuntimeError, match="weight"):
        linear_logprobs(hidden, sharded, None, labels)


@pytest.mark.parametrize("options", [{"entropy_clamp": 1.0}, {"entropy_clamp": -0.1}, {"candidates": -1}])
def test_outputs_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OutputSpec(**options)
