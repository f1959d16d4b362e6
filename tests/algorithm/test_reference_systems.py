"""Rows of docs/algorithms.md that name another system: three numbers each, from that system's own formula.

The expected values are computed here in plain floats from the formulas in the sources of verl (core_algos.py), ROLL
and cosmos-rl, on one answer of three tokens. The rows of baselines, norms and weights have such tests beside theirs.
"""

import math

import pytest
import torch

from areal.algorithm.kl import kl_estimate

NEW, OLD, ADVANTAGES = (0.5, 0.3, 0.2), (0.4, 0.4, 0.25), (1.0, -1.0, 2.0)
LOGS = [math.log(p) for p in NEW]
RATIOS = [p / q for p, q in zip(NEW, OLD, strict=True)]
MEAN = math.exp(sum(math.log(r) for r in RATIOS) / 3)


def each(function):
    return [function(a, r, log) for a, r, log in zip(ADVANTAGES, RATIOS, LOGS, strict=True)]


CASES = {
    "ROLL tis": (
        {"policy_loss": "cispo", "eps_clip": -1, "eps_clip_higher": 0},
        each(lambda a, r, log: -min(r, 1.0) * a * log),
    ),
    "ROLL vanilla": ({"policy_loss": "gpg"}, each(lambda a, _, log: -a * log)),
    "cosmos-rl aipo_rho": (
        {"policy_loss": "aipo", "aipo": {"rho": 1.1, "truncation": "objective"}},
        each(lambda a, r, _: -a * min(r, 1.1)),
    ),
    "verl vanilla with dual clip": (
        {"c_clip": 3.0},
        each(lambda a, r, _: min(max(-a * r, -a * min(max(r, 0.8), 1.2)), -a * 3 if a < 0 else math.inf)),
    ),
    "verl cispo": (
        {"policy_loss": "cispo"},
        each(lambda a, r, log: -min(max(r, 0.8), 1.2) * a * log),
    ),
    "verl gspo": (
        {"policy_loss": "gspo", "sequence_level": {"advantage": "token", "gradient": "own", "max_log_ratio": 10.0}},
        each(lambda a, _, __: max(-a * MEAN, -a * min(max(MEAN, 0.8), 1.2))),
    ),
    "verl sapo": (
        {"policy_loss": "sapo"},
        each(lambda a, r, _: -a * 4 / (t := 1.0 if a > 0 else 1.05) / (1 + math.exp(-t * (r - 1)))),
    ),
    "ROLL kimi15": (
        {"policy_loss": "kimi15", "kimi15": {"tau": 0.1, "ratio": "token"}},
        each(lambda a, r, log: -a * log + 0.05 * math.log(r) ** 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_three_losses_equal_the_system(kit, name):
    options, expected = CASES[name]
    options = {key: kit.section(key, **value) if isinstance(value, dict) else value for key, value in options.items()}
    tokens = kit.make_tokens(
        torch.tensor(LOGS, dtype=torch.float64),
        old=torch.tensor(OLD, dtype=torch.float64).log(),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        rollout=torch.zeros(3, dtype=torch.float64),
    )
    assert kit.loss_of(tokens, **options).losses.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda x: x),
        ("k2", lambda x: 0.5 * x * x),
        ("k3", lambda x: math.exp(-x) + x - 1),
        ("abs", abs),
    ],
)
def test_three_kl_estimates_equal_verl(estimator, formula):
    """kl_penalty_forward: kl, mse, low_var_kl and abs of x = log pi - log ref."""
    new, ref = torch.tensor(NEW, dtype=torch.float64).log(), torch.tensor(OLD, dtype=torch.float64).log()
    found = kl_estimate(new, ref, torch.ones(3, dtype=torch.bool), estimator)
    assert found.tolist() == pytest.approx([formula(math.log(r)) for r in RATIOS])
