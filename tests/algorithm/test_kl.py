"""KL estimators against their formulas, against exact divergences, and at the edges."""

import math

import pytest
import torch

from areal.algorithm.kl import kl_estimate

FORMULAS = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
}


@pytest.mark.parametrize("estimator", FORMULAS)
def test_equals_the_formula(estimator):
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, dtype=torch.float64, generator=generator)
    ref = torch.randn(50, dtype=torch.float64, generator=generator)
    mask = torch.rand(50, generator=generator) > 0.3
    expected = [
        FORMULAS[estimator](p - r) if m else 0.0
        for p, r, m in zip(policy.tolist(), ref.tolist(), mask.tolist(), strict=True)
    ]
    assert kl_estimate(policy, ref, mask, estimator, limit=None).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradient_equals_finite_differences(estimator):
    policy = torch.tensor([-1.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.7, -2.0, -3.5], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, mask, estimator), (policy,))


def test_by_hand():
    # x = log 0.5 - log 0.25 = log 2: k1 0.693147, k2 0.240227, k3 = 1/2 - 1 + log 2 = 0.193147
    policy, ref, mask = torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), torch.tensor([True])
    found = [kl_estimate(policy, ref, mask, name).item() for name in ("k1", "k2", "k3")]
    assert found == pytest.approx([0.693147, 0.240227, 0.193147], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_is_unbiased_under_the_policy(estimator):
    """The probability-weighted sum over a whole vocabulary is the exact KL(p || q)."""
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    estimate = kl_estimate(p.log(), q.log(), torch.ones(3, dtype=torch.bool), estimator)
    assert (p * estimate).sum().item() == pytest.approx(exact.item(), abs=1e-12)


def test_limits():
    far, near, mask = torch.tensor([-50.0, 50.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool)
    assert kl_estimate(far, near, mask, "k1").tolist() == [-10, 10]
    assert kl_estimate(far, near, mask, "k2").tolist() == [10, 10]
    assert kl_estimate(far, near, mask, "k3").tolist() == [10, 10]
    assert kl_estimate(far, near, mask, "k1", limit=None).tolist() == [-20, 20]  # the cut of the log-ratio remains


def test_masked_numbers_are_ignored_and_trained_nan_shows():
    nan = float("nan")
    result = kl_estimate(
        torch.tensor([nan, -1.0, nan]), torch.tensor([0.0, -1.0, 0.0]), torch.tensor([False, True, True])
    )
    assert result[:2].tolist() == [0, 0]
    assert result[2].isnan()


def test_unknown_name():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "k4")
