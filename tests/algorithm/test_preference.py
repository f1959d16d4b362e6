"""Losses of pairs and numbers of whole sequences, against the papers' formulas in slow float64 Python."""

import math
import re

import pytest
import torch

from areal.algorithm.preference import (
    bradley_terry_losses,
    centering_losses,
    dpo_losses,
    ipo_losses,
    last_of_each,
    pair_places,
    preference_accuracy,
    preference_log_ratios,
)
from tests.expect import raises_code

FAR = 800.0
"""exp overflows float64 from 709 on."""


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def random_pairs(count=6, seed=0, spread=3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(count, dtype=torch.float64, generator=generator) for _ in range(4)]


def slope(function, values: torch.Tensor, step=1e-6) -> torch.Tensor:
    """Central differences of the sum of `function`, element by element."""
    result = torch.zeros_like(values)
    for i in range(values.numel()):
        moved = torch.zeros_like(values)
        moved[i] = step
        result[i] = (function(values + moved).sum() - function(values - moved).sum()) / (2 * step)
    return result


def gradient(function, values: torch.Tensor) -> torch.Tensor:
    values = values.clone().requires_grad_()
    function(values).sum().backward()
    return values.grad


# --- Bradley-Terry ---------------------------------------------------------------------------------------------------


def test_bradley_terry_follows_its_formula():
    chosen, rejected, margins, _ = random_pairs()
    expected = [
        -log_sigmoid(c - r - m) for c, r, m in zip(*[x.tolist() for x in (chosen, rejected, margins)], strict=True)
    ]
    assert bradley_terry_losses(chosen, rejected, margins).tolist() == pytest.approx(expected, abs=1e-12)


def test_bradley_terry_by_hand():
    """Scores 2 and 1: -log sigmoid(1) = log(1 + 1/e) = 0.313262; with margin 1 both are even: log 2."""
    result = bradley_terry_losses(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert result.tolist() == pytest.approx([0.3132617, 0.6931472])


def test_the_two_scores_move_apart():
    chosen, rejected, margins, _ = random_pairs()
    up = gradient(lambda x: bradley_terry_losses(x, rejected, margins), chosen)
    down = gradient(lambda x: bradley_terry_losses(chosen, x, margins), rejected)
    torch.testing.assert_close(up, slope(lambda x: bradley_terry_losses(x, rejected, margins), chosen))
    assert torch.all(up < 0)
    torch.testing.assert_close(down, -up)


def test_centering_follows_its_formula_and_is_least_at_opposite_scores():
    chosen, rejected, *_ = random_pairs()
    expected = [(c + r) ** 2 for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert centering_losses(chosen, rejected).tolist() == pytest.approx(expected)
    assert centering_losses(torch.tensor([1.5]), torch.tensor([-1.5])).item() == 0.0
    assert centering_losses(torch.tensor([1.0]), torch.tensor([2.0])).item() == 9.0
    actual = gradient(lambda x: centering_losses(x, rejected), chosen)
    torch.testing.assert_close(actual, slope(lambda x: centering_losses(x, rejected), chosen))


# --- DPO and IPO -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_follows_equation_7_with_smoothed_labels(beta, smoothing):
    chosen, rejected, ref_chosen, ref_rejected = random_pairs()
    actual = dpo_losses(
        preference_log_ratios(chosen, rejected, ref_chosen, ref_rejected), beta=beta, label_smoothing=smoothing
    )
    for i in range(chosen.numel()):
        h = beta * (chosen[i] - ref_chosen[i]).item() - beta * (rejected[i] - ref_rejected[i]).item()
        expected = -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)
        assert actual[i].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_ipo_follows_equation_17(tau):
    chosen, rejected, ref_chosen, ref_rejected = random_pairs()
    result = ipo_losses(preference_log_ratios(chosen, rejected, ref_chosen, ref_rejected), beta=tau)
    for i in range(chosen.numel()):
        # h = log( pi(w) ref(l) / (pi(l) ref(w)) )
        ratio = math.exp(chosen[i]) * math.exp(ref_rejected[i]) / (math.exp(rejected[i]) * math.exp(ref_chosen[i]))
        assert result[i].item() == pytest.approx((math.log(ratio) - 1 / (2 * tau)) ** 2, abs=1e-10)


def test_dpo_and_ipo_by_hand():
    """Policy -1 and -3, reference -2 and -2: log-ratio (1) - (-1) = 2.

    DPO, beta 0.5: -log sigmoid(1) = 0.313262; smoothed by 0.1: 0.9 * 0.313262 + 0.1 * 1.313262 = 0.413262.
    IPO, tau 0.5: (2 - 1)^2 = 1; tau 0.25: (2 - 2)^2 = 0.
    """
    two = preference_log_ratios(*[torch.tensor([x]) for x in (-1.0, -3.0, -2.0, -2.0)])
    assert two.tolist() == [2.0]
    assert dpo_losses(two, beta=0.5).item() == pytest.approx(0.3132617)
    assert dpo_losses(two, beta=0.5, label_smoothing=0.1).item() == pytest.approx(0.4132617)
    assert ipo_losses(two, beta=0.5).item() == 1.0
    assert ipo_losses(two, beta=0.25).item() == 0.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: dpo_losses(x, beta=0.3),
        lambda x: dpo_losses(x, beta=0.3, label_smoothing=0.2),
        lambda x: ipo_losses(x, beta=0.3),
    ],
    ids=["sigmoid", "smoothed", "ipo"],
)
def test_gradients_agree_with_differences(loss):
    values = torch.tensor([-5.0, -0.4, 0.0, 0.7, 9.0], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss, values), slope(loss, values), rtol=1e-6, atol=1e-7)


def test_smoothed_labels_have_their_least_loss_where_the_model_believes_them():
    """sigmoid(h) = 1 - e: beyond it the loss rises again, unlike the plain one."""
    best = math.log(0.8 / 0.2)
    at = torch.tensor([best - 0.1, best, best + 0.1], dtype=torch.float64)
    losses = dpo_losses(at, beta=1.0, label_smoothing=0.2)
    assert losses[1] < losses[0]
    assert losses[1] < losses[2]


def test_far_pairs_stay_finite_in_value_and_gradient():
    far = torch.tensor([-FAR, FAR], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    for loss in (
        lambda x: bradley_terry_losses(x, zero, zero),
        lambda x: dpo_losses(x, beta=1.0),
        lambda x: dpo_losses(x, beta=1.0, label_smoothing=0.3),
    ):
        assert torch.isfinite(loss(far)).all()
        assert torch.isfinite(gradient(loss, far)).all()
    assert dpo_losses(far, beta=1.0).tolist() == pytest.approx([FAR, 0.0])


def test_an_infinite_log_ratio_is_certainty_and_nan_shows_itself():
    infinite = torch.tensor([math.inf, -math.inf])
    assert dpo_losses(infinite, beta=0.1).tolist() == [0.0, math.inf]
    nan = torch.tensor([math.nan])
    zero = torch.zeros(1)
    for loss in (dpo_losses(nan, beta=0.1), ipo_losses(nan, beta=0.1), bradley_terry_losses(nan, zero, zero)):
        assert loss.isnan().all()


def test_no_pairs_give_no_losses():
    nothing = torch.zeros(0)
    assert dpo_losses(nothing, beta=0.1).shape == (0,)
    assert bradley_terry_losses(nothing, nothing, nothing).shape == (0,)


def test_accuracy_counts_ties_half():
    result = preference_accuracy(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert result.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: bradley_terry_losses(a, b, a),
        lambda a, b: centering_losses(a, b),
        lambda a, b: preference_log_ratios(a, a, a, b),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call):
    with raises_code("algorithm.shapes_differ"):
        call(torch.zeros(1), torch.zeros(2))


def test_the_last_of_each_sequence():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert last_of_each(values, torch.tensor([0, 1, 4], dtype=torch.int32)).tolist() == [1.0, 4.0]
    assert last_of_each(torch.zeros(0), torch.tensor([0], dtype=torch.int32)).shape == (0,)


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_are_found_in_any_order():
    """Sequences 4, 1, 5, 0 of the batch lie at 0, 1, 2, 3: pairs (0, 1) and (4, 5)."""
    result = pair_places([4, 1, 5, 0])
    assert (result.chosen.tolist(), result.rejected.tolist()) == ([3, 0], [1, 2])
    nothing = pair_places([])
    assert (nothing.chosen.tolist(), nothing.rejected.tolist()) == ([], [])


@pytest.mark.parametrize("cut", [[0], [1], [0, 1, 2], [1, 2], [0, 3], [0, 0], [0, 1, 1]])
def test_a_pair_without_its_partner_is_refused(cut):
    with pytest.raises(ValueError, match=re.escape(str(sorted(cut)))):
        pair_places(cut)
