"""VAPO's advantages: a lambda of its own for the critic's targets, and one that grows with the answer."""

import pytest
import torch

from areal.algorithm.advantage import RETURNS, VALUES, adaptive_lambda, generalised_advantages
from areal.api.config import PPOActorConfig
from areal.api.config.schema import options_without_effect
from areal.trainer.actor import PPOActor


def config(**options):
    return PPOActorConfig(**{"path": "table", "kl_ctl": 0.0, "discount": 0.9} | options)


def by_formula(batch, discount, lambda_of):
    """GAE from the last trained token to the first; lambda_of(n) of n trained tokens. (advantages, targets)"""
    advantages, targets = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for s in range(batch.num_sequences):
        rows = [t for t in range(batch.num_tokens) if batch.sequence_index[t] == s and batch.loss_mask[t]]
        after, running = 0.0, 0.0
        for t in reversed(rows):
            reward = batch.rewards[s].item() if t == rows[-1] else 0.0
            value = batch.columns[VALUES][t].item()
            running = reward + discount * after - value + discount * lambda_of(len(rows)) * running
            advantages[t], targets[t], after = running, running + value, value
    return advantages, targets


@pytest.mark.parametrize(
    ("options", "critic_lambda", "policy", "critic"),
    [
        ({"gae_lambda": 0.8}, None, lambda n: 0.8, lambda n: 0.8),
        ({"gae_lambda": 0.8}, 1.0, lambda n: 0.8, lambda n: 1.0),
        ({"gae_length_alpha": 0.5}, 1.0, lambda n: max(0.0, 1 - 1 / (0.5 * n)), lambda n: 1.0),
        ({"gae_length_alpha": 0.5}, None, lambda n: max(0.0, 1 - 1 / (0.5 * n)), lambda n: max(0.0, 1 - 1 / (0.5 * n))),
    ],
)
def test_advantages_and_targets_equal_the_formula(toolbox, options, critic_lambda, policy, critic):
    batch = toolbox.random_batch(2, 12)
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(4))
    batch = batch.with_column(VALUES, torch.where(batch.loss_mask, values, 0.0))
    actor = PPOActor(toolbox.TableEngine(), config(**options), critic_lambda=critic_lambda)
    result = actor.with_advantages(batch)
    assert result.advantages.tolist() == pytest.approx(by_formula(batch, 0.9, policy)[0], abs=1e-5)
    assert result.columns[RETURNS].tolist() == pytest.approx(by_formula(batch, 0.9, critic)[1], abs=1e-5)
    # and of each sequence alone, as of all together
    for s in range(batch.num_sequences):
        alone = actor.with_advantages(toolbox.select(batch, [s]))
        assert torch.equal(alone.advantages, result.advantages[batch.sequence_index == s])
        assert torch.equal(alone.columns[RETURNS], result.columns[RETURNS][batch.sequence_index == s])


def test_by_hand(toolbox):
    # values 1, 2; reward 3; discount 1. Targets with lambda 1: the reward. Policy, n = 2, alpha 1: lambda 1/2:
    # A_2 = 3 - 2 = 1; A_1 = (2 - 1) + 1/2 = 1.5
    batch = toolbox.make_batch([[1, 2, 3]], rewards=[3.0]).with_column(VALUES, torch.tensor([1.0, 2.0, 0.0]))
    actor = PPOActor(toolbox.TableEngine(), config(discount=1.0, gae_length_alpha=1.0), critic_lambda=1.0)
    result = actor.with_advantages(batch)
    assert result.advantages.tolist() == [1.5, 1.0, 0.0]
    assert result.columns[RETURNS].tolist() == [3.0, 3.0, 0.0]


def test_lambda_by_hand():
    assert adaptive_lambda(torch.tensor([0, 10, 20, 40, 400]), 0.05).tolist() == pytest.approx([0, 0, 0, 0.5, 0.95])


def test_without_a_critic_there_are_no_targets(toolbox):
    actor = PPOActor(toolbox.TableEngine(), config(gae_length_alpha=0.5))
    assert RETURNS not in actor.with_advantages(toolbox.random_batch(0, 3)).columns
    empty = actor.with_advantages(toolbox.select(toolbox.random_batch(0, 3), []))
    assert empty.advantages.tolist() == []


def test_one_lambda_for_all_equals_one_each():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(9, generator=generator)
    mask, index = torch.ones(9, dtype=torch.bool), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2])
    subject = generalised_advantages(rewards, None, mask, index, 3, discount=0.9, gae_lambda=0.7)
    each = generalised_advantages(
        rewards, None, mask, index, 3, discount=0.9, gae_lambda=torch.full((3,), 0.7, dtype=torch.float64)
    )
    assert torch.allclose(subject.advantages, each.advantages, atol=1e-6)


def test_what_has_no_effect_is_listed(toolbox):
    def unused(**options):
        return [item.path for item in options_without_effect(config(**options))]

    assert unused(gae_lambda=0.9, gae_length_alpha=0.1) == ["gae_lambda"]
    assert unused(adv_estimator="reinforce", gae_length_alpha=0.1) == ["gae_length_alpha"]
    assert unused(gae_length_alpha=0.05) == []
    batch = toolbox.make_batch([[1, 2, 3]], rewards=[1.0])
    plain, inputs = (
        PPOActor(toolbox.TableEngine(), config(adv_estimator="reinforce", **options)).with_advantages(batch)
        for options in ({}, {"gae_length_alpha": 0.1})
    )
    assert torch.equal(plain.advantages, inputs.advantages)
