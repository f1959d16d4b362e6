"""The clipped value loss: formula, numbers by hand, finite differences, masks."""

import pytest
import torch
from torch.autograd import gradcheck

from areal.algorithm.policy_loss import value_loss


def draw(size, seed):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(3))
    return values, old, returns, torch.rand(size, generator=generator) > 0.3


def test_equals_the_formula():
    values, old, returns, mask = draw(80, 0)
    result = value_loss(values, old, returns, mask, eps_clip=0.5)
    for t in range(80):
        v, o, r = values[t].item(), old[t].item(), returns[t].item()
        moved = o + min(max(v - o, -0.5), 0.5)
        plain, bounded = (v - r) ** 2 / 2, (moved - r) ** 2 / 2
        assert result.losses[t].item() == pytest.approx(max(plain, bounded) if mask[t] else 0.0, abs=1e-12)
        assert result.clipped[t].item() == (bool(mask[t]) and bounded > plain)


def test_by_hand():
    # V 2 from old 0 with clip 0.5: V' = 0.5. R = 2: max(0, 1.125) clipped. R = -1: max(4.5, 1.125) not clipped
    values = torch.tensor([2.0, 2.0])
    result = value_loss(
        values, torch.zeros(2), torch.tensor([2.0, -1.0]), torch.ones(2, dtype=torch.bool), eps_clip=0.5
    )
    assert result.losses.tolist() == [1.125, 4.5]
    assert result.clipped.tolist() == [True, False]


def test_gradient_equals_finite_differences():
    values, old, returns, mask = draw(40, 1)
    values.requires_grad_()
    assert gradcheck(lambda v: value_loss(v, old, returns, mask, eps_clip=0.3).losses, (values,))


@pytest.mark.parametrize("eps_clip", [None, 0.3])
@pytest.mark.parametrize("delta", [None, 0.7])
def test_options_equal_the_formula_and_finite_differences(eps_clip, delta):
    def error(e):
        if delta is None or abs(e) <= delta:
            return e * e / 2
        return delta * (abs(e) - delta / 2)

    values, old, returns, mask = draw(60, 2)
    values = (3 * values).requires_grad_()
    result = value_loss(values, old, returns, mask, eps_clip=eps_clip, huber_delta=delta)
    for t in range(60):
        v, o, r = values[t].item(), old[t].item(), returns[t].item()
        plain = error(v - r)
        bounded = plain if eps_clip is None else error(o + min(max(v - o, -eps_clip), eps_clip) - r)
        assert result.losses[t].item() == pytest.approx(max(plain, bounded) if mask[t] else 0.0, abs=1e-12)
        assert result.clipped[t].item() == (bool(mask[t]) and bounded > plain)
    assert gradcheck(
        lambda v: value_loss(v, old, returns, mask, eps_clip=eps_clip, huber_delta=delta).losses, (values,)
    )


def test_huber_by_hand():
    # delta 2: error 1 -> 0.5; error 3 -> 2 (3 - 1) = 4, slope 2; error -5 -> 2 (5 - 1) = 8, slope -2; error 0 -> 0
    values = torch.tensor([1.0, 3.0, -5.0, 0.0], requires_grad=True)
    zeros = torch.zeros(4)
    result = value_loss(values, zeros, zeros, torch.ones(4, dtype=torch.bool), eps_clip=None, huber_delta=2.0)
    result.losses.sum().backward()
    assert result.losses.tolist() == [0.5, 4, 8, 0]
    assert values.grad.tolist() == [1, 2, -2, 0]
    assert not result.clipped.any()


@pytest.mark.parametrize("delta", [None, 1.0])
def test_bad_numbers_inside_show_and_outside_do_not_matter(delta):
    for bad in (float("nan"), float("inf")):
        values = torch.tensor([bad, 1.0], requires_grad=True)
        zeros = torch.zeros(2)
        seen = value_loss(values, zeros, zeros, torch.tensor([True, True]), eps_clip=None, huber_delta=delta).losses
        assert not seen[0].isfinite()
        hidden = value_loss(values, zeros, zeros, torch.tensor([False, True]), eps_clip=None, huber_delta=delta).losses
        hidden.sum().backward()
        assert hidden.tolist() == [0, 0.5]
        assert values.grad.tolist() == [0, 1]


def test_masked_garbage_reaches_neither_loss_nor_gradient():
    nan = float("nan")
    values = torch.tensor([nan, 1.0], requires_grad=True)
    mask = torch.tensor([False, True])
    result = value_loss(values, torch.tensor([nan, 1.0]), torch.tensor([nan, 0.0]), mask, eps_clip=0.5)
    result.losses.sum().backward()
    assert result.losses.tolist() == [0, 0.5]
    assert values.grad.tolist() == [0, 1]


def test_trained_nan_shows_and_empty_is_empty():
    subject = torch.ones(1, dtype=torch.bool)
    assert value_loss(torch.tensor([float("nan")]), torch.zeros(1), torch.zeros(1), subject, eps_clip=1).losses.isnan()
    nothing = torch.zeros(0)
    assert value_loss(nothing, nothing, nothing, nothing.bool(), eps_clip=1.0).losses.tolist() == []
