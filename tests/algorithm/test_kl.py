"""KL estimators against their formulas, against exact divergences and their gradients, and at the edges."""

import math

import pytest
import torch

from areal.algorithm.kl import KL_LIMIT, distribution_kl, kl_estimate
from tests.expect import raises_code

FORMULAS = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x, "abs": abs}
EVERY = [*FORMULAS, *(f"{name}+" for name in FORMULAS)]
P = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
Q = torch.tensor([0.2, 0.35, 0.45], dtype=torch.float64)
ALL = torch.ones(3, dtype=torch.bool)
NAN, INF = float("nan"), float("inf")


def tokens(seed, *, num=50):
    """Policy, reference, mask."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (torch.randn(num, dtype=torch.float64, generator=generator) for _ in range(2))
    return policy, ref, torch.rand(num, generator=generator) > 0.3


@pytest.mark.parametrize("estimator", EVERY)
def test_equals_the_formula(estimator):
    policy, ref, mask = tokens(0)
    expected = [
        FORMULAS[estimator.removesuffix("+")](p - r) if m else 0.0
        for p, r, m in zip(policy.tolist(), ref.tolist(), mask.tolist(), strict=True)
    ]
    assert kl_estimate(policy, ref, mask, estimator, limit=None).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("base", [None, torch.tensor([-1.2, -0.1, -9.0], dtype=torch.float64)])
@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradient_equals_finite_differences(estimator, base):
    policy = torch.tensor([-1.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.7, -2.0, -3.5], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, mask, estimator, base_logprobs=base), (policy,))


def test_by_hand():
    # x = log 0.5 - log 0.25 = log 2: k1 0.693147, k2 0.240227, k3 = 1/2 - 1 + log 2 = 0.193147, abs as k1
    policy, ref, mask = torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([True])
    result = [kl_estimate(policy, ref, mask, name).item() for name in FORMULAS]
    assert result == pytest.approx([0.693147, 0.240227, 0.193147, 0.693147], abs=1e-6)
    assert kl_estimate(ref, policy, mask, "abs").item() == pytest.approx(0.693147, abs=1e-6)
    # sampled from a policy that gave 0.4: everything times 0.5 / 0.4
    corrected = kl_estimate(policy, ref, mask, "k3", base_logprobs=torch.tensor([0.4]).log())
    assert corrected.item() == pytest.approx(1.25 * 0.193147, abs=1e-6)


@pytest.mark.parametrize("estimator", [name for name in EVERY if name.endswith("+")])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(estimator):
    """Even where the cut of the estimate would stop its own gradient, up to the cut of the log-ratio."""
    policy = torch.tensor([0.3, -1.0, 0.0, 6.0, -7.0, 25.0], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.zeros(6, dtype=torch.float64), torch.tensor([True] * 6)
    result = kl_estimate(policy, ref, mask, estimator)
    plain = kl_estimate(policy.detach(), ref, mask, estimator.removesuffix("+"))
    assert torch.equal(result, plain)
    result.sum().backward()
    assert policy.grad.tolist() == pytest.approx([0.3, -1.0, 0.0, 6.0, -7.0, 0.0])


def mean_gradient(estimator, *, sampled_from=P, corrected=False):
    """Gradient, with respect to the logits of P, of the mean estimate over tokens sampled from a distribution."""
    logits = P.log().clone().requires_grad_()
    base = sampled_from.log() if corrected else None
    estimate = kl_estimate(logits.log_softmax(-1), Q.log(), ALL, estimator, base_logprobs=base, limit=None)
    (sampled_from * estimate).sum().backward()
    return logits.grad


def gradient_of(divergence):
    """Gradient of a function of the whole distribution with respect to the same logits."""
    logits = P.log().clone().requires_grad_()
    divergence(logits.softmax(-1)).backward()
    return logits.grad


EXACT = {
    "reverse": lambda p: (p * (p / Q).log()).sum(),
    "forward": lambda p: (Q * (Q / p).log()).sum(),
    "variation": lambda p: (p - Q).abs().sum(),
    "nothing": lambda p: 0.0 * p.sum(),
}


@pytest.mark.parametrize(
    ("estimator", "direction"),
    [("k1", "nothing"), ("k2", "reverse"), ("k3", "forward"), ("abs", "variation")]
    + [(name, "reverse") for name in EVERY if name.endswith("+")],
)
def test_what_the_mean_gradient_of_each_estimator_leads_to(estimator, direction):
    """On policy only k2 and the + forms descend KL(pi || ref); what docs/algorithms.md says of the others."""
    assert torch.allclose(mean_gradient(estimator), gradient_of(EXACT[direction]), atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_correction_makes_value_and_gradient_right_whoever_sampled(estimator):
    other = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    for sampled_from in (P, other):
        result = mean_gradient(estimator, sampled_from=sampled_from, corrected=True)
        assert torch.allclose(result, gradient_of(EXACT["reverse"]), atol=1e-12)
        estimate = kl_estimate(P.log(), Q.log(), ALL, estimator, base_logprobs=sampled_from.log())
        assert (sampled_from * estimate).sum().item() == pytest.approx(EXACT["reverse"](P).item(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_is_unbiased_under_the_policy(estimator):
    """The probability-weighted sum over a whole vocabulary is the exact KL(p || q)."""
    estimate = kl_estimate(P.log(), Q.log(), ALL, estimator)
    assert (P * estimate).sum().item() == pytest.approx(EXACT["reverse"](P).item(), abs=1e-12)


def test_limits():
    far, near, mask = torch.tensor([-50.0, 50.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool)
    assert kl_estimate(far, near, mask, "k1").tolist() == [-10, 10]
    assert kl_estimate(far, near, mask, "k2").tolist() == [10, 10]
    assert kl_estimate(far, near, mask, "k3").tolist() == [10, 10]
    assert kl_estimate(far, near, mask, "abs").tolist() == [10, 10]
    assert kl_estimate(far, near, mask, "k1", limit=None).tolist() == [-20, 20]  # the cut of the log-ratio remains
    # the product with the correction is what is cut: 0.5^2 / 2 * e^5 = 18.6
    once = torch.ones(1, dtype=torch.bool)
    result = kl_estimate(torch.tensor([0.5]), torch.zeros(1), once, "k2", base_logprobs=torch.tensor([-4.5]))
    assert result.tolist() == [10]


@pytest.mark.parametrize("estimator", EVERY)
def test_masked_numbers_are_ignored_and_trained_nan_shows(estimator):
    policy = torch.tensor([NAN, -1.0, NAN, INF, -INF], requires_grad=True)
    ref = torch.tensor([0.0, -1.0, 0.0, 0.0, NAN])
    mask = torch.tensor([False, True, True, False, False])
    result = kl_estimate(policy, ref, mask, estimator)
    assert result[[0, 1, 3, 4]].tolist() == [0, 0, 0, 0]
    assert result[2].isnan()
    result[[0, 1, 3, 4]].sum().backward()
    assert policy.grad[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("estimator", EVERY)
def test_an_infinite_log_probability_counts_as_a_large_one(estimator):
    policy = torch.tensor([-INF], requires_grad=True)
    result = kl_estimate(policy, torch.zeros(1), torch.ones(1, dtype=torch.bool), estimator)
    assert result.abs().item() == 10
    result.sum().backward()
    assert policy.grad.item() == 0


def test_nothing_and_all_masked():
    empty = torch.zeros(0)
    assert kl_estimate(empty, empty, torch.zeros(0, dtype=torch.bool)).shape == (0,)
    assert kl_estimate(torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["k4", "full", "k1++"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=name[:2]):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), name)


# --- of whole distributions


def distributions(seed, *, positions=7, vocabulary=9, spread=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    pair = (spread * torch.randn(positions, vocabulary, dtype=torch.float64, generator=generator) for _ in range(2))
    return [logits.log_softmax(-1).to(dtype) for logits in pair]


def slow_kl(policy, ref):
    """Sums over tokens, in Python floats."""
    return [
        sum(math.exp(p) * (p - r) for p, r in zip(row, other, strict=True))
        for row, other in zip(policy.tolist(), ref.tolist(), strict=True)
    ]


def top_of(policy, ref, k):
    chosen = policy.topk(k, dim=-1).indices
    return policy.gather(-1, chosen), ref.gather(-1, chosen)


def rows(tensor):
    return torch.ones(tensor.shape[0], dtype=torch.bool)


def test_whole_vocabulary_equals_the_sum_over_it():
    policy, ref = distributions(1)
    result = distribution_kl(policy, ref, rows(policy), is_whole=True, limit=None)
    assert result.tolist() == pytest.approx(slow_kl(policy, ref), abs=1e-12)


def test_distributions_by_hand():
    # 0.6 log 3 + 0.3 log (6 / 7) + 0.1 log (2 / 9) = 0.659167 - 0.046245 - 0.150408
    # top 1: 0.6 log 3 + 0.4 log (0.4 / 0.8)
    subject = P.log().unsqueeze(0), Q.log().unsqueeze(0)
    mask = torch.tensor([True])
    assert distribution_kl(*subject, mask, is_whole=True).item() == pytest.approx(0.462514, abs=1e-6)
    first = subject[0][:, :1], subject[1][:, :1]
    assert distribution_kl(*first, mask, is_whole=False).item() == pytest.approx(0.659167 - 0.277259, abs=1e-6)


@pytest.mark.parametrize(
    ("spread", "dtype", "rounding"),
    [
        (0.1, torch.float64, 1e-12),
        (2.0, torch.float64, 1e-12),
        (8.0, torch.float64, 1e-6),  # a rest of 1e-14 is no more than digits
        (0.1, torch.float32, 1e-6),
        (2.0, torch.float32, 1e-4),
    ],
)
def test_more_tokens_never_lower_the_bound_and_all_of_them_reach_it(spread, dtype, rounding):
    """0 <= KL over top 1 <= top 2 <= ... <= the divergence; top V is the divergence."""
    for seed in range(20):
        policy, ref = distributions(seed, spread=spread, dtype=dtype)
        exact = distribution_kl(policy, ref, rows(policy), is_whole=True, limit=None)
        previous = torch.zeros_like(exact)
        for k in range(1, policy.shape[-1] + 1):
            result = distribution_kl(*top_of(policy, ref, k), rows(policy), is_whole=False, limit=None)
            assert (result >= previous - rounding).all()
            assert (result <= exact + rounding).all()
            previous = result
        assert torch.allclose(previous, exact, atol=rounding)


@pytest.mark.parametrize("is_whole", [True, False])
def test_gradient_of_distributions_equals_finite_differences(is_whole):
    policy, ref = distributions(3, positions=3, vocabulary=6)
    logits = policy.clone().requires_grad_()
    chosen = policy.topk(6 if is_whole else 3, dim=-1).indices
    mask = torch.tensor([True, True, False])

    def divergence(inputs):
        taken = inputs.log_softmax(-1).gather(-1, chosen)
        return distribution_kl(taken, ref.gather(-1, chosen), mask, is_whole=is_whole)

    assert torch.autograd.gradcheck(divergence, (logits,))


@pytest.mark.parametrize("is_whole", [True, False])
def test_blocks_of_any_size_give_the_same_value_and_gradient(is_whole, monkeypatch):
    policy, ref = distributions(5)
    chosen = policy.topk(9 if is_whole else 4, dim=-1).indices
    mask = torch.arange(7) != 3
    actual = []
    for numbers in (2**26, 27, 1):
        monkeypatch.setattr("areal.algorithm.kl.MAX_NUMBERS", numbers)
        logits = policy.clone().requires_grad_()
        taken = logits.log_softmax(-1).gather(-1, chosen)
        result = distribution_kl(taken, ref.gather(-1, chosen), mask, is_whole=is_whole)
        (result * torch.arange(7)).sum().backward()
        actual.append((result.detach(), logits.grad))
    for result, gradient in actual[1:]:
        assert torch.allclose(result, actual[0][0], rtol=0, atol=1e-15)
        assert torch.allclose(gradient, actual[0][1], rtol=0, atol=1e-15)
    assert distribution_kl(policy[:0], ref[:0], mask[:0], is_whole=is_whole).shape == (0,)


def test_certainty_is_safe():
    """The k tokens hold everything, in one model or in both: no log of 0, no gradient without an end."""
    sure = torch.tensor([[0.0, -40.0, -INF]]).requires_grad_()
    unsure = torch.tensor([[-0.7, -0.8, -3.3]])
    mask = torch.tensor([True])
    for ref in (sure.detach(), unsure):
        for is_whole in (True, False):
            sure.grad = None
            result = distribution_kl(sure, ref, mask, is_whole=is_whole)
            assert 0 <= result.item() < KL_LIMIT
            result.sum().backward()
            assert sure.grad.isfinite().all()
    assert distribution_kl(sure, sure, mask, is_whole=False).item() == 0
    assert distribution_kl(unsure, sure.detach(), mask, is_whole=True, limit=None).item() < 20


def test_a_token_impossible_in_the_reference_alone_counts_as_a_log_ratio_of_20():
    half = torch.tensor([[0.5, 0.5]]).log()
    ref = torch.tensor([[0.0, -INF]])
    result = distribution_kl(half, ref, torch.tensor([True]), is_whole=True, limit=None)
    assert result.item() == pytest.approx(0.5 * 20 + 0.5 * math.log(0.5))
    assert distribution_kl(half, ref, torch.tensor([True]), is_whole=True).item() == pytest.approx(9.653426, abs=1e-5)
    assert distribution_kl(half, ref - 30, torch.tensor([True]), is_whole=True).item() == KL_LIMIT


@pytest.mark.parametrize("is_whole", [True, False])
def test_masked_rows_reach_neither_value_nor_gradient_and_trained_nan_shows(is_whole):
    bad = torch.tensor([[NAN, INF], [-0.5, -1.5], [NAN, -1.0], [-INF, -INF]], requires_grad=True)
    ref = torch.tensor([[NAN, 0.0], [-0.6, -1.4], [-1.0, -1.0], [NAN, NAN]])
    result = distribution_kl(bad, ref, torch.tensor([False, True, True, False]), is_whole=is_whole)
    assert result[[0, 3]].tolist() == [0, 0]
    assert result[1].isfinite()
    assert result[2].isnan()
    result[[0, 1, 3]].sum().backward()
    assert bad.grad[[0, 1, 3]].isfinite().all()


def test_distributions_of_unequal_shapes_are_refused():
    with raises_code("algorithm.shapes_differ"):
        distribution_kl(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, dtype=torch.bool), is_whole=True)
    with raises_code("algorithm.shapes_differ"):
        distribution_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3, dtype=torch.bool), is_whole=True)
