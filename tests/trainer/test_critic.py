"""The value model's role over a table model."""

import pytest
import torch

from areal.algorithm.advantage import RETURNS, VALUES
from areal.api.config import PPOActorConfig, PPOCriticConfig
from areal.api.metrics import metric_values
from areal.trainer.actor import PPOActor
from areal.trainer.roles import Critic
from tests.expect import raises_code


def config(**options):
    return PPOCriticConfig(**{"path": "table", "ppo_n_minibatches": 1} | options)


def with_returns(toolbox, critic, batch, **options):
    actor = PPOActor(toolbox.TableEngine(), PPOActorConfig(path="table", kl_ctl=0.0, **options))
    return actor.with_advantages(critic.with_values(batch))


def test_values_are_added(toolbox):
    engine = toolbox.TableEngine(critic=True)
    batch = Critic(engine, config()).with_values(toolbox.make_batch([[1, 2, 3], [4, 0]]))
    expected = engine.table.tolist()
    assert batch.columns[VALUES].tolist() == pytest.approx([expected[1], expected[2], 0, expected[4], 0])


def test_first_gradient_by_hand(toolbox):
    # lambda 1, discount 1: returns are the reward; dl/dV = (V - R) per token over 3 trained tokens
    engine = toolbox.TableEngine(critic=True)
    critic = Critic(engine, config())
    batch = with_returns(toolbox, critic, toolbox.make_batch([[1, 2, 3], [4, 0]], rewards=[2.0, -1.0]))
    assert batch.columns[RETURNS].tolist() == pytest.approx([2, 2, 0, -1, 0])
    values = engine.table.detach().clone()
    metrics = metric_values(critic.update(batch))
    expected = torch.zeros_like(values)
    expected[1], expected[2], expected[4] = (values[1] - 2) / 3, (values[2] - 2) / 3, (values[4] + 1) / 3
    assert torch.allclose(engine.gradients[0], expected, atol=1e-6)
    squared = ((values[1] - 2) ** 2 + (values[2] - 2) ** 2 + (values[4] + 1) ** 2) / 3
    assert metrics["critic/loss"] == pytest.approx(squared.item() / 2, rel=1e-5)
    assert metrics["critic/squared_error"] == pytest.approx(squared.item(), rel=1e-5)
    assert metrics["critic/clip_ratio"] == 0


def test_any_number_of_micro_batches_gives_the_same_gradient(toolbox):
    gradients = []
    for num_micro_batches in (1, 3, 12):
        engine = toolbox.TableEngine(critic=True, num_micro_batches=num_micro_batches)
        critic = Critic(engine, config())
        critic.update(with_returns(toolbox, critic, toolbox.random_batch(1, 11)))
        gradients.append(engine.gradients[0])
    assert all(torch.allclose(g, gradients[0], rtol=0, atol=1e-9) for g in gradients[1:])


def test_every_rank_takes_the_same_steps_and_reports_the_same_names(toolbox):
    group = toolbox.RankGroup(2)
    whole = toolbox.random_batch(2, 6)
    shares = [whole, toolbox.select(whole, [])]

    def rank_main(rank):
        engine = toolbox.TableEngine(critic=True, rank=rank, group=group)
        actor_engine = toolbox.TableEngine(rank=rank, group=group)
        critic = Critic(engine, config(ppo_n_minibatches=2))
        actor = PPOActor(actor_engine, PPOActorConfig(path="table", kl_ctl=0.0))
        return engine, critic.update(actor.with_advantages(critic.with_values(shares[rank])))

    (first, metrics), (second, other) = group.run(rank_main)
    assert len(first.gradients) == len(second.gradients) == 2
    assert torch.equal(first.table, second.table)
    assert metrics.keys() == other.keys()


def test_values_converge_to_the_mean_return(toolbox):
    # after token 1 the return is 1 or 0 with equal frequency: V(1) -> 0.5
    engine = toolbox.TableEngine(critic=True, lr=0.5)
    critic = Critic(engine, config())
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 0.0])
    for _ in range(50):
        critic.update(with_returns(toolbox, critic, batch))
    assert engine.table.detach()[1] == pytest.approx(0.5, abs=1e-3)


def test_steps_out_of_order_are_named(toolbox):
    batch = toolbox.random_batch(3, 2)
    critic = Critic(toolbox.TableEngine(critic=True), config())
    with raises_code("training.stage_missing", "values"):
        critic.update(batch)
    with raises_code("training.stage_missing", "values"):
        Critic(toolbox.TableEngine(), config()).with_values(batch)


def test_masked_garbage_does_not_reach_the_gradient(toolbox):
    engine = toolbox.TableEngine(critic=True)
    critic = Critic(engine, config())
    batch = with_returns(toolbox, critic, toolbox.make_batch([[1, 2, 3]], prompt_length=2, rewards=[1.0]))
    nan = torch.where(batch.loss_mask, 0.0, float("nan"))
    critic.update(
        batch.with_column(VALUES, batch.columns[VALUES] + nan).with_column(RETURNS, batch.columns[RETURNS] + nan)
    )
    assert engine.gradients[0].isfinite().all()
