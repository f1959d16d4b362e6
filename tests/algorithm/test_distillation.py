"""A teacher's log-ratios as advantages: by hand, as the gradient of the reverse KL, and with bad input."""

import pytest
import torch

from areal.algorithm.advantage import distilled_advantages
from tests.expect import raises_code

NAN = float("nan")


def test_by_hand():
    # 0.5 * 2 + 3 * (-1 - -1.5) = 2.5; 0.5 * -1 + 3 * (-2 - -1) = -3.5; the masked one is 0
    advantages = distilled_advantages(
        torch.tensor([2.0, -1.0, 7.0]),
        torch.tensor([-1.5, -1.0, NAN]),
        torch.tensor([-1.0, -2.0, NAN]),
        torch.tensor([True, True, False]),
        rl_weight=0.5,
        coef=3.0,
    )
    assert advantages.tolist() == pytest.approx([2.5, -3.5, 0])


def test_its_policy_gradient_is_that_of_the_reverse_kl():
    """Over all tokens of a vocabulary, weighted by pi: -sum pi A grad log pi = grad KL(pi || teacher), exactly."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, dtype=torch.float64, generator=generator).requires_grad_()
    teacher = torch.randn(9, dtype=torch.float64, generator=generator).log_softmax(-1)
    policy = logits.log_softmax(-1)
    everything = torch.ones(9, dtype=torch.bool)
    advantages = distilled_advantages(torch.zeros(9).double(), policy, teacher, everything, rl_weight=0.0, coef=1.0)
    (actual,) = torch.autograd.grad(-(policy.detach().exp() * advantages * policy).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    assert not advantages.requires_grad


def test_log_ratios_are_cut_and_nan_shows_itself():
    result = distilled_advantages(
        torch.zeros(2),
        torch.zeros(2),
        torch.tensor([float("-inf"), NAN]),
        torch.ones(2).bool(),
        rl_weight=1.0,
        coef=1.0,
    )
    assert result[0].item() == -20
    assert result[1].isnan()


def test_shapes_that_would_broadcast_are_refused():
    with raises_code("algorithm.shapes_differ"):
        distilled_advantages(
            torch.zeros(2), torch.zeros(1), torch.zeros(2), torch.ones(2).bool(), rl_weight=1.0, coef=1.0
        )
