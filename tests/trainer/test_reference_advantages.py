"""Numbers of other systems for advantages: what their own functions return, compared with the whole stage.

Recorded by running (float64 on the CPU, torch 2.13): verl 0.9.1 (PyPI), verl/trainer/ppo/core_algos.py
compute_*_advantage; cosmos-rl 0.4.7 (PyPI), cosmos_rl/dispatcher/algo/grpo.py GRPO.compute_advantage, where 0.4.7
computes in float32; AReaL 1.0.4 (PyPI), areal/trainer/ppo/actor.py PPOActor._compute_advantages (float32).

Five answers of 3, 2, 4, 1 and 2 tokens, the first three to one prompt, rewards 1, 0, 5, 20 and 32. The rewards are
spread so that the epsilon of a divisor (verl 1e-6 or 1e-8, ours 1e-5) stays below the tolerance.
"""

from dataclasses import replace

import pytest
import torch

from areal.api.config import NormConfig, PPOActorConfig
from areal.api.data import BASELINE, reward_part
from areal.trainer.actor import PPOActor

LENGTHS, REWARDS, GROUPS = [3, 2, 4, 1, 2], [1.0, 0.0, 5.0, 20.0, 32.0], [0, 0, 0, 1, 1]
GREEDY = [0.5, 1.0, 2.0, 3.0, 4.0]
SCORES = {"exact": [1.0, 0.0, 5.0, 20.0, 32.0], "length": [3.0, 1.0, 2.0, 40.0, 10.0]}


def five_answers(toolbox):
    batch = toolbox.make_batch([[1] * (n + 1) for n in LENGTHS], rewards=REWARDS, group_ids=GROUPS)
    parts = {reward_part(name): torch.tensor(scores) for name, scores in SCORES.items()}
    return replace(batch, columns={BASELINE: torch.tensor(GREEDY), **parts})


def advantages(toolbox, batch, **options):
    """Of the trained tokens."""
    config = PPOActorConfig(path="table", **({"kl_ctl": 0.0, "reward_clip": 100.0} | options))
    actor = PPOActor(toolbox.TableEngine(), config)
    return actor.with_advantages(batch).advantages[batch.loss_mask].tolist()


def repeated(values):
    """One number for each answer, at each of its tokens."""
    return [value for value, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


def group_norm(**options):
    return {"reward_norm": NormConfig(mean_level="group", std_level="group", **options)}


VERL = {
    "grpo": (group_norm(eps=1e-6), [-0.377964330152, -0.755928660304, 1.133892990456, -0.707106697853, 0.707106697853]),
    "grpo, norm_adv_by_std_in_grpo false": ({"adv_estimator": "dr_grpo"}, [-1.0, -2.0, 3.0, -6.0, 6.0]),
    "rloo": ({"adv_estimator": "rloo"}, [-1.5, -3.0, 4.5, -12.0, 12.0]),
    "opo": ({"adv_estimator": "opo"}, [-1.555555555556, -2.555555555556, 2.444444444444, -8.0, 4.0]),
    "grpo_passk, norm_adv_by_std_in_grpo false": ({"adv_estimator": "grpo_passk"}, [0.0, 0.0, 4.0, 0.0, 12.0]),
    "grpo_passk": (
        {"adv_estimator": {"name": "grpo_passk", "std": True}},
        [0.0, 0.0, 1.511857320609, 0.0, 1.414213395706],
    ),
    "reinforce_plus_plus_baseline": (
        {"adv_estimator": "reinforce_plus_plus_baseline"},
        [-0.528060599488, -0.803570477591, 0.573978912926, -1.905609990005, 1.400508547237],
    ),
    "remax": ({"adv_estimator": "remax"}, [0.5, -1.0, 3.0, 17.0, 28.0]),
    "gdpo, weights 10 and 20": (
        {"adv_estimator": {"name": "gdpo", "weights": {"exact": 10.0, "length": 20.0}}},
        [0.837338960891, -1.864471344816, 0.536088264231, 0.272701779926, -0.600064514128],
    ),
}


@pytest.mark.parametrize("name", VERL)
def test_advantages_equal_verl(toolbox, name):
    options, expected = VERL[name]
    actual = advantages(toolbox, five_answers(toolbox), **options)
    assert actual == pytest.approx(repeated(expected), abs=1e-5)


def test_discounted_token_advantages_equal_verl(toolbox):
    """reinforce_plus_plus with gamma 0.9."""
    expected = [-0.652403721122, -0.644659631223, -0.636055086891, -0.722100530213, -0.722100530213, -0.408464889303]
    expected += [-0.373616484758, -0.334896035263, -0.291873313601, 0.998808336234, 1.756008237471, 2.031353656103]
    actual = advantages(toolbox, five_answers(toolbox), adv_estimator="reinforce_plus_plus", discount=0.9)
    assert actual == pytest.approx(expected, abs=1e-5)


def test_population_std_equals_cosmos_rl(toolbox):
    actual = advantages(toolbox, five_answers(toolbox), **group_norm(std_unbiased=False, eps=1e-6))
    expected = [-0.462909847498, -0.925819694996, 1.388729572296, -0.999999821186, 0.999999821186]
    assert actual == pytest.approx(repeated(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [2.143841028214, 2.255412817001, 2.111571788788]),
        ("k2", [1.954413175583, 1.966861486435, 1.987551689148]),
        ("k3", [1.952174425125, 1.963746190071, 1.986571788788]),
    ],
)
def test_a_kl_penalty_in_the_reward_equals_areal(toolbox, estimator, expected):
    """Reward 2, kl_ctl 0.5; probabilities 0.5, 0.3, 0.2 of the policy and 0.4, 0.4, 0.25 of the reference."""
    policy, reference = (torch.tensor([*row, 1.0]).log() for row in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.25]))
    batch = toolbox.make_batch([[1, 2, 3, 4]], rewards=[2.0], rollout=policy.tolist())
    batch = replace(batch, ref_logprobs=reference)
    assert advantages(toolbox, batch, kl_ctl=0.5, kl_estimator=estimator) == pytest.approx(expected, abs=1e-6)
