"""Numbers of other systems: what their own functions return on fixed inputs, compared with the rows of the page.

The lists were recorded by running these functions (float64 on the CPU, torch 2.11), not by working out their formulas:

- verl 0.9.1 (PyPI), verl/trainer/ppo/core_algos.py: compute_policy_loss_*, kl_penalty_forward. The token losses are
  what the function passes to agg_loss. verl/trainer/ppo/rollout_corr_helper.py: compute_rollout_correction_weights.
- AReaL 1.0.4 (PyPI), areal/utils/functional/functional.py: ppo_actor_loss_fn, apply_rejection_sampling,
  reward_overlong_penalty, ppo_critic_loss_fn; areal/trainer/ppo/actor.py: _apply_m2po_masking,
  compute_prox_logp_approximations, and of compute_advantages the statements on reward_bias to reward_clip and
  mask_no_eos_with_zero; areal/utils/data.py: Normalization.
- cosmos-rl 0.4.7 (PyPI), cosmos_rl/policy/trainer/llm_trainer/grpo_trainer.py: compute_loss up to its KL term.
- jingyushen/ROLL 581046ab (a public copy; alibaba/ROLL is not on PyPI, and its stored tree lacks this file),
  roll/pipeline/agentic/agentic_actor_pg_worker.py: the statements of _compute_tis_loss, _compute_topr_loss,
  _compute_vanilla_pg_loss, _compute_kimi15_loss and _compute_cispo_loss without their metrics;
  roll/pipeline/agentic/utils.py: compute_segment_masked_mean.

`test_named_systems` lists which rows of the page these and other tests are for.
"""

from dataclasses import replace

import pytest
import torch

from areal.algorithm.advantage import overlong_penalty, shape_rewards, withhold_unfinished
from areal.algorithm.aggregate import identity_reduce
from areal.algorithm.correction import (
    Spans,
    correct,
    linear_logprobs,
    loglinear_logprobs,
    prox_position,
    second_moment_kept,
)
from areal.algorithm.kl import kl_estimate
from areal.algorithm.normalise import normalise
from areal.algorithm.policy_loss import CHOSEN, drawn_between, highest_covariances, token_covariances, value_loss
from areal.api.config import NormConfig, RolloutCorrectionConfig


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


NEW, OLD, ROLLOUT = numbers(0.5, 0.3, 0.2).log(), numbers(0.4, 0.4, 0.25).log(), numbers(0.45, 0.25, 0.2).log()
ADVANTAGES = (1.0, -1.0, 2.0)
GOOD, BAD = (1.5, 1.5, 1.5), (-1.5, -1.5, -1.5)
EVERY = torch.ones(3, dtype=torch.bool)
SEQUENCE = {"policy_loss": "ppo", "importance_sampling_level": "sequence"}
BY_TOKEN = {"advantage": "token", "max_log_ratio": 10.0}

LOSSES = {
    "verl vanilla, clip_ratio_c 3": ({"c_clip": 3.0}, ADVANTAGES, [-1.2, 0.8, -1.6]),
    "verl cispo": ({"policy_loss": "cispo"}, ADVANTAGES, [0.831776616672, -0.963178243461, 2.575100659895]),
    "verl gspo": (
        {"policy_loss": "gspo", "sequence_level": BY_TOKEN | {"gradient": "own"}},
        ADVANTAGES,
        [-0.908560296416, 0.908560296416, -1.817120592832],
    ),
    "verl sapo, tau 1 and 1.05": (
        {"policy_loss": "sapo"},
        ADVANTAGES,
        [-2.248706003543, 1.656187628316, -3.6013280215],
    ),
    "verl dppo_tv, clip_ratio 0.08": (
        {"policy_loss": "dppo", "eps_clip": 0.08},
        ADVANTAGES,
        [0.0, 0.0, 2.575100659895],
    ),
    "verl dppo_kl, clip_ratio 0.02": (
        {"policy_loss": {"name": "dppo", "divergence": "kl"}, "eps_clip": 0.02},
        ADVANTAGES,
        [0.0, 0.0, 2.575100659895],
    ),
    "AReaL ppo": ({}, ADVANTAGES, [-1.2, 0.8, -1.6]),
    "AReaL sequence level": (SEQUENCE, ADVANTAGES, [-0.605706864277] * 3),
    "cosmos-rl aipo_rho 1.1": (
        {"policy_loss": {"name": "aipo", "rho": 1.1, "truncation": "objective"}},
        ADVANTAGES,
        [-1.1, 0.75, -1.6],
    ),
    "cosmos-rl gspo": (
        {"policy_loss": "gspo", "sequence_level": BY_TOKEN},
        ADVANTAGES,
        [-0.908560296416, 0.908560296416, -1.817120592832],
    ),
    "cosmos-rl epsilon_high -1": ({"eps_clip_higher": -1}, ADVANTAGES, [-1.25, 0.8, -1.6]),
    "ROLL tis": (
        {"policy_loss": "cispo", "eps_clip": -1, "eps_clip_higher": 0},
        ADVANTAGES,
        [0.69314718056, -0.902979603244, 2.575100659895],
    ),
    "ROLL vanilla": ({"policy_loss": "gpg"}, ADVANTAGES, [0.69314718056, -1.203972804326, 3.218875824868]),
    "ROLL cispo_use_unified_mask": (
        {"policy_loss": {"name": "cispo", "unified_mask": True}},
        ADVANTAGES,
        [0.0, 0.0, 2.575100659895],
    ),
    "ROLL topr, score 1": (
        {"policy_loss": {"name": "topr", "ratio": "token"}},
        GOOD,
        [1.03972077084, 1.805959206489, 2.414156868651],
    ),
    "ROLL topr, score 0": (
        {"policy_loss": {"name": "topr", "ratio": "token"}},
        BAD,
        [-1.03972077084, -1.354469404867, -1.931325494921],
    ),
    "ROLL kimi15": (
        {"policy_loss": {"name": "kimi15", "tau": 0.1, "ratio": "token"}},
        ADVANTAGES,
        [0.695636832785, -1.199834755585, 3.221365477093],
    ),
}


def losses(kit, tokens, options):
    sections = {
        name: kit.section(name, **value) if isinstance(value, dict) and "name" not in value else value
        for name, value in options.items()
    }
    return kit.loss_of(tokens, **sections).losses.tolist()


@pytest.mark.parametrize("name", LOSSES)
def test_three_losses_equal_the_system(kit, name):
    options, advantages, expected = LOSSES[name]
    tokens = kit.make_tokens(NEW, old=OLD, advantages=numbers(*advantages), rollout=torch.zeros_like(NEW))
    assert losses(kit, tokens, options) == pytest.approx(expected, abs=1e-9)


def test_gmpo_of_three_answers_equals_verl(kit):
    """geo_mean with clip_ratio 0.1; its loss is one number for each answer of two tokens."""
    new, old = numbers(0.5, 0.3, 0.2, 0.6, 0.42, 0.38).log(), numbers(0.4, 0.4, 0.3, 0.5, 0.4, 0.4).log()
    advantages, answer = numbers(1.5, 1.5, -1.0, -1.0, 2.0, 2.0), torch.tensor([0, 0, 1, 1, 2, 2])
    tokens = kit.make_tokens(new, old=old, advantages=advantages, sequence=answer)
    result = losses(kit, tokens, {"policy_loss": "gmpo", "eps_clip": 0.1})
    assert result[::2] == pytest.approx([-1.365641207401, 1.042019620899, -1.997498425569], abs=1e-7)


def test_clip_cov_and_kl_cov_equal_verl(kit):
    """clip_cov: ratio 1, box (0.1, 5), clip_ratio 0.9. kl_cov: ratio 0.34, coefficient 1. No token passes the clip."""
    advantages, draws = numbers(*ADVANTAGES), torch.zeros(3, dtype=torch.int64)
    covariances = token_covariances(advantages, NEW, EVERY, reduce=identity_reduce)
    chosen = drawn_between(covariances, draws, EVERY, low=0.1, high=5.0, ratio=1.0, reduce=identity_reduce)
    tokens = kit.make_tokens(NEW, old=OLD, advantages=advantages, chosen=chosen)
    assert losses(kit, tokens, {"policy_loss": "clip_cov", "eps_clip": 0.9}) == pytest.approx([0.0, 0.75, -1.6])
    chosen = highest_covariances(covariances, draws, EVERY, ratio=0.34, reduce=identity_reduce)
    result = losses(kit, replace(tokens, columns={CHOSEN: chosen}), {"policy_loss": {"name": "kl_cov", "coef": 1.0}})
    assert result == pytest.approx([-1.026856448686, 0.75, -1.6])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.223143551314, -0.287682072452, -0.223143551314]),
        ("k2", [0.024896522247, 0.041380487405, 0.024896522247]),
        ("k3", [0.023143551314, 0.045651260882, 0.026856448686]),
        ("abs", [0.223143551314, 0.287682072452, 0.223143551314]),
    ],
)
def test_three_kl_estimates_equal_verl(estimator, expected):
    """kl_penalty_forward: kl, mse, low_var_kl and abs."""
    assert kl_estimate(NEW, OLD, EVERY, estimator).tolist() == pytest.approx(expected, abs=1e-9)


TWO_ANSWERS = numbers(1.5, 0.5, 1.2, 0.6, 3.0, 0.9).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upper": 1.4}, [1.4, 0.5, 1.2, 0.6, 1.4, 0.9]),
        ({"upper": 1.4, "level": "sequence"}, [0.9] * 3 + [1.4] * 3),
        ({"mode": "mask", "lower": 0.7, "upper": 1.4}, [0.0, 0.0, 1.2, 0.0, 0.0, 0.9]),
        (
            {"upper": 1.4, "level": "sequence", "batch_normalize": True, "normalize_by": "units"},
            [0.782608698261] * 3 + [1.217391308406] * 3,
        ),
    ],
)
def test_weights_equal_verl(options, expected):
    """rollout_is token and sequence, rollout_is_threshold 1.4 and "0.7_1.4", rollout_is_batch_normalize."""
    spans = Spans(torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    actual = correct(TWO_ANSWERS, torch.zeros_like(TWO_ANSWERS), spans, RolloutCorrectionConfig(**options))
    assert actual.weights.tolist() == pytest.approx(expected, abs=1e-7)


def test_segment_means_equal_roll():
    ratios, mask = numbers(1.5, 0.5, 9.0, 2.0, 0.8, 0.7), torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    options = RolloutCorrectionConfig(level="segment_mean", upper=10.0)
    spans = Spans(mask, torch.zeros(6, dtype=torch.int64), 1)
    result = correct(ratios.log(), torch.zeros_like(ratios), spans, options).weights[mask]
    assert result.tolist() == pytest.approx([0.866025403784] * 2 + [1.03849882037] * 3, abs=1e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "clamp", "lower": 0.9, "upper": 1.2}, [0.9, 1.2, 1.2]),
        ({"mode": "mask", "lower": 0.5, "upper": 1.3}, [0.888888888889, 0.0, 1.25]),
    ],
)
def test_weights_equal_areal(options, expected):
    """apply_rejection_sampling of the ratio by token, actions clamp and mask; cosmos-rl's cap is such a mask."""
    spans = Spans(EVERY, torch.zeros(3, dtype=torch.int64), 1)
    actual = correct(OLD, ROLLOUT, spans, RolloutCorrectionConfig(**options))
    assert actual.weights.tolist() == pytest.approx(expected, abs=1e-6)


def test_behav_imp_weight_cap_equals_cosmos_rl(kit):
    tokens = kit.make_tokens(NEW, old=OLD, advantages=numbers(*ADVANTAGES), rollout=ROLLOUT)
    spans = Spans(EVERY, tokens.sequence_index, 1)
    options = RolloutCorrectionConfig(mode="mask", lower=0.0, upper=1.3)
    result = numbers(*losses(kit, tokens, {"c_clip": 3.0})) * correct(OLD, ROLLOUT, spans, options).weights
    assert result.tolist() == pytest.approx([-1.066666666667, 0.0, -2.0])


def test_a_ratio_without_rejected_tokens_equals_areal(kit):
    """drop_from_ratio: ppo_actor_loss_fn, sequence level, rejection_sampling mask of the ratio in [0.5, 1.3]."""
    spans = Spans(EVERY, torch.zeros(3, dtype=torch.int64), 1)
    actual = correct(OLD, ROLLOUT, spans, RolloutCorrectionConfig(mode="mask", lower=0.5, upper=1.3))
    tokens = kit.make_tokens(NEW, old=OLD, advantages=numbers(*GOOD), mask=actual.kept)
    result = numbers(*losses(kit, tokens, SEQUENCE)) * actual.weights
    assert result.tolist() == pytest.approx([-1.33333325386, 0.0, -1.875], abs=1e-6)
    assert float(result.sum() / 3) == pytest.approx(-1.069444417953, abs=1e-6)  # the denominator keeps the token


@pytest.mark.parametrize(("threshold", "expected"), [(0.03, [True, False, False]), (0.1, [True, True, True])])
def test_kept_tokens_equal_areal_m2po(threshold, expected):
    assert second_moment_kept(OLD - ROLLOUT, EVERY, threshold, reduce=identity_reduce).tolist() == expected


def test_guesses_of_the_proximal_policy_equal_areal():
    """compute_prox_logp_approximations at current_version 5: a policy of version 4 whose update is complete."""
    alpha = prox_position(torch.tensor([2, 1, 3]), version=4, progress=1.0)
    expected = [-0.767528359898, -1.132052286213, -1.497866136777]
    assert loglinear_logprobs(NEW, OLD, alpha).tolist() == pytest.approx(expected, abs=1e-6)
    expected = [-0.762140047575, -1.123930096345, -1.491654876333]
    assert linear_logprobs(NEW, OLD, alpha).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("mean", "std", "leave1out", "expected"),
    [
        ("group", "batch", False, [-0.866010427475, 0.866010427475, -0.866010427475, 0.866010427475]),
        ("group", "group", False, [-0.707096755505, 0.707096755505, -0.707096755505, 0.707096755505]),
        ("group", None, True, [-1.0, 1.0, -1.0, 1.0]),
        ("batch", "batch", False, [-0.947898626328, -0.775553405285, 0.775553405285, 0.947898626328]),
    ],
)
def test_norms_equal_areal(mean, std, leave1out, expected):
    """Normalization with group_size 2, eps 1e-5: its std is about the mean that was subtracted."""
    config = NormConfig(
        mean_level=mean, std_level=std, mean_leave1out=leave1out, std_about="subtracted" if std else None, eps=1e-5
    )
    actual = normalise(numbers(0.0, 1.0, 10.0, 11.0), config, torch.tensor([0, 0, 1, 1]))
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_shaped_rewards_equal_areal():
    """Bias -0.5, scale 2, clip 1.5; overlong_tokens 4 of 10, factor 0.5; the second of three answers is truncated."""
    assert shape_rewards(numbers(0.0, 1.0, 3.0), bias=-0.5, scale=2.0, clip=1.5).tolist() == [-1.0, 1.0, 1.5]
    penalty = overlong_penalty(torch.tensor([5, 7, 10]), max_tokens=10, tail_tokens=4, factor=0.5)
    assert (1.0 + penalty).tolist() == [1.0, 0.875, 0.5]
    assert withhold_unfinished(numbers(0.5, 2.0, -1.0), torch.tensor([True, False, True])).tolist() == [0.5, 0.0, -1.0]


@pytest.mark.parametrize(("delta", "expected"), [(10.0, [2.205, 0.605, 90.0]), (None, [2.205, 0.605, 98.0])])
def test_critic_losses_equal_areal(delta, expected):
    """ppo_critic_loss_fn, value_eps_clip 0.4, huber (delta 10) and mse."""
    values, old, returns = numbers(1.0, 2.0, 15.0), numbers(0.5, 2.5, 1.0), numbers(3.0, 1.0, 1.0)
    actual = value_loss(values, old, returns, EVERY, eps_clip=0.4, huber_delta=delta)
    assert actual.losses.tolist() == pytest.approx(expected, abs=1e-6)
