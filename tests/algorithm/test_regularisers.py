"""Entropy bonus, its adaptive coefficient, likelihood of good answers: formulas, numbers by hand, masks, gradients."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from areal.algorithm.policy_loss import adapted_entropy_coef, entropy_loss, positive_mask, positive_nll
from areal.api.config import AdaptiveEntropyConfig
from tests.expect import raises_code

INF, NAN = float("inf"), float("nan")
BAND = AdaptiveEntropyConfig(entropy_low=0.2, entropy_high=0.5, coef_lr=0.1, coef_low=0.01, coef_high=0.08)


def test_the_bonus_is_minus_the_entropy_of_trained_tokens():
    entropy = torch.tensor([0.5, NAN, 2.0], requires_grad=True)
    losses = entropy_loss(entropy, torch.tensor([True, False, True]))
    losses.sum().backward()
    assert losses.tolist() == [-0.5, 0.0, -2.0]
    assert entropy.grad.tolist() == [-1, 0, -1]
    assert entropy_loss(entropy, torch.ones(3, dtype=torch.bool))[1].isnan()


def test_a_bonus_without_gradient_is_refused_where_one_is_recorded():
    mask = torch.ones(2, dtype=torch.bool)
    with raises_code("training.stage_missing"):
        entropy_loss(torch.zeros(2), mask)
    with torch.no_grad():
        assert entropy_loss(torch.ones(2), mask).tolist() == [-1, -1]
    assert entropy_loss(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).tolist() == []


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.04, 0.1, 0.05),  # 0.1 below the band: + 0.1 * 0.1
        (0.04, 0.7, 0.02),  # 0.2 above: - 0.1 * 0.2
        (0.04, 0.2, 0.04),  # at the borders and inside nothing moves
        (0.04, 0.35, 0.04),
        (0.04, 0.5, 0.04),
        (0.075, 0.0, 0.08),  # would be 0.095
        (0.04, 3.0, 0.01),  # would be -0.21
        (0.04, NAN, 0.04),  # nothing was trained on
        (0.04, INF, 0.04),
    ],
)
def test_the_coefficient_follows_the_entropy_by_hand(coef, entropy, expected):
    assert adapted_entropy_coef(coef, entropy, BAND) == pytest.approx(expected, abs=1e-12)


def test_the_coefficient_equals_the_formula():
    generator = torch.Generator().manual_seed(0)
    coef = 0.05
    for entropy in torch.rand(50, generator=generator, dtype=torch.float64).tolist():
        change = 0.0
        if entropy < 0.2:
            change = 0.1 * (0.2 - entropy)
        elif entropy > 0.5:
            change = -0.1 * (entropy - 0.5)
        wanted = sorted([0.01, coef + change, 0.08])[1]
        coef = adapted_entropy_coef(coef, entropy, BAND)
        assert coef == pytest.approx(wanted, abs=1e-15)


def test_likelihood_by_hand():
    # sequence 0 is good, 1 has reward 0, 2 is good without trained tokens, 3 is bad
    logprobs = torch.tensor([-0.5, -2.0, -9.0, -1.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 0, 0, 1, 2, 3])
    mask = torch.tensor([True, True, False, True, False, True])
    rewards = torch.tensor([0.5, 0.0, 1.0, -1.0])
    good = positive_mask(rewards, mask, index)
    losses = positive_nll(logprobs, good)
    assert losses.tolist() == [0.5, 2.0, 0, 0, 0, 0]
    assert good.tolist() == [True, True, False, False, False, False]
    losses.sum().backward()
    assert logprobs.grad.tolist() == [-1, -1, 0, 0, 0, 0]


def test_likelihood_equals_the_formula_and_finite_differences():
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(30, generator=generator, dtype=torch.float64).requires_grad_()
    index = torch.randint(0, 6, (30,), generator=generator).sort().values
    rewards = torch.randint(-1, 2, (6,), generator=generator).float()
    mask = torch.rand(30, generator=generator) > 0.4
    chosen = positive_mask(rewards, mask, index)
    losses = positive_nll(logprobs, chosen)
    for t in range(30):
        good = mask[t] and rewards[int(index[t])] > 0
        assert losses[t].item() == pytest.approx(-logprobs[t].item() if good else 0.0)
    leaf = logprobs.detach().requires_grad_()
    assert gradcheck(lambda x: positive_nll(x, chosen), (leaf,))


def test_likelihood_with_bad_numbers_and_without_tokens():
    logprobs = torch.tensor([NAN, -1.0, -INF], requires_grad=True)
    index = torch.tensor([0, 0, 1])
    good = positive_mask(torch.tensor([1.0, 0.0]), torch.tensor([False, True, True]), index)
    losses = positive_nll(logprobs, good)
    losses.sum().backward()
    assert losses.tolist() == [0, 1, 0]
    assert logprobs.grad.tolist() == [0, -1, 0]
    inside = positive_nll(logprobs, torch.ones(3, dtype=torch.bool))
    assert math.isnan(inside[0].item())
    assert math.isinf(inside[2].item())
    nothing, no_index = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert positive_nll(nothing, positive_mask(nothing, nothing.bool(), no_index)).tolist() == []
    with raises_code("algorithm.shapes_differ"):
        positive_nll(nothing, torch.ones(1, dtype=torch.bool))


def test_a_reward_that_is_no_number_makes_no_answer_good():
    assert not positive_mask(torch.tensor([NAN]), torch.tensor([True]), torch.tensor([0])).any()
