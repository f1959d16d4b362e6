"""The proximal policy guessed from versions: the line, its ends, and how far each guess is from the truth."""

import math

import pytest
import torch

from areal.algorithm.correction import approximation_errors, linear_logprobs, loglinear_logprobs, prox_position


def slow_alpha(version, token_version, done, total):
    """Where version k lies between the version of the token and that of the policy in training."""
    if token_version < 0:
        return 0.0
    now = version + done / total
    return 1.0 if now == version else (version - token_version) / (now - token_version)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_position_equals_the_formula(done):
    versions = torch.tensor([7, 6, 5, 0, -1])
    result = prox_position(versions, version=7, progress=done / 4)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([slow_alpha(7, v, done, 4) for v in versions.tolist()])


def test_position_by_hand():
    # half way through update 3: a token of version 2 is 1 behind the proximal policy and 1.5 behind theta; one of
    # version 3 is the proximal policy's own
    result = prox_position(torch.tensor([2, 3, 1, 4]), version=3, progress=0.5)
    assert result.tolist() == pytest.approx([1 / 1.5, 0.0, 2 / 2.5, 0.0])
    # at the start theta is the proximal policy, whatever the token's age. Staleness 1 is not the old policy
    assert prox_position(torch.tensor([2, 3]), version=3, progress=0.0).tolist() == [1.0, 1.0]


def test_guesses_by_hand():
    # old 0.2, theta 0.8, a quarter of the way: 0.2 * 4 ** 0.25 and 0.2 + 0.15
    theta, old = torch.tensor([0.8]).double().log(), torch.tensor([0.2]).double().log()
    quarter = torch.tensor([0.25])
    assert loglinear_logprobs(theta, old, quarter).exp().item() == pytest.approx(0.2 * math.sqrt(2))
    assert linear_logprobs(theta, old, quarter).exp().item() == pytest.approx(0.35)


@pytest.mark.parametrize("guess", [loglinear_logprobs, linear_logprobs])
def test_the_ends_are_exact_and_carry_no_gradient(guess):
    theta = torch.tensor([-1.3, -0.2, -800.0], requires_grad=True)
    old = torch.tensor([-0.7, -2.0, -1.0])
    assert torch.equal(guess(theta, old, torch.ones(3)), theta.detach())
    assert torch.equal(guess(theta, old, torch.zeros(3)), old)
    assert not guess(theta, old, torch.full((3,), 0.5)).requires_grad


def test_what_stands_outside_of_the_mask_is_not_counted():
    nan = float("nan")
    mask = torch.tensor([True, False])
    theta, old, prox = (torch.tensor([value, nan]).double() for value in (math.log(0.8), math.log(0.2), math.log(0.4)))
    errors = approximation_errors(theta, old, prox, torch.tensor([0.5, nan]), mask)
    assert {name: stat.values[stat.mask].item() for name, stat in errors.items()} == pytest.approx(
        {
            "prox_error/loglinear": 0.0,
            "prox_error/loglinear_max": 0.0,
            "prox_error/linear": math.log(0.5 / 0.4),
            "prox_error/linear_max": math.log(0.5 / 0.4),
            "prox_error/rollout": math.log(2),
            "prox_error/rollout_max": math.log(2),
        },
        abs=1e-6,
    )


def test_empty():
    nothing = torch.zeros(0)
    assert prox_position(nothing.long(), version=1, progress=0.5).shape == (0,)
    errors = approximation_errors(nothing, nothing, nothing, nothing, nothing.bool())
    assert all(stat.values.shape == (0,) for stat in errors.values())


def test_a_nan_shows():
    theta, old = torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, float("nan")])
    for guess in (loglinear_logprobs, linear_logprobs):
        assert guess(theta, old, torch.full((2,), 0.5)).isnan().all()
