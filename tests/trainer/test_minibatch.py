"""How a batch is gone through: cuts, epochs, their seeds, the stop by KL."""

import random
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from areal.api.config import NormConfig, PPOActorConfig, PPOCriticConfig
from areal.api.metrics import metric_values
from areal.data.balance import balanced_parts
from areal.trainer.actor import PPOActor
from areal.trainer.minibatch import Passes, dealt_parts, reduce_metrics
from areal.trainer.roles import Critic


def actor_of(engine, *, seed=0, frozen_steps=0, **options):
    defaults = {"path": "table", "kl_ctl": 0.0, "recompute_logprob": True, "reward_norm": NormConfig()}
    return PPOActor(engine, PPOActorConfig(**defaults | options), seed=seed, frozen_steps=frozen_steps)


def ready(actor, batch):
    return actor.with_advantages(actor.with_prox_logprobs(batch))


def ids_of(minis):
    return [mini.input_ids.tolist() for mini in minis]


@given(st.lists(st.integers(1, 50), max_size=25), st.integers(1, 6), st.integers(0, 99))
def test_dealing_gives_every_sequence_once_and_balanced_parts(lengths, num_parts, seed):
    parts = dealt_parts(lengths, num_parts, random.Random(seed))
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    tokens = [sum(lengths[i] for i in part) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_dealing_puts_every_sequence_into_every_part_equally_often():
    lengths = [7, 7, 3, 2, 2, 9]
    seen = Counter()
    for seed in range(3000):
        for number, part in enumerate(dealt_parts(lengths, 3, random.Random(seed))):
            seen.update((index, number) for index in part)
    assert all(900 < seen[index, number] < 1100 for index in range(6) for number in range(3))


def test_the_first_epoch_goes_by_lengths_alone(toolbox):
    batch = toolbox.random_batch(0, 17)
    expected = [toolbox.select(batch, part) for part in balanced_parts(batch.sequence_lengths, 4)]
    for seed, step, num_epochs in ((0, 0, 1), (5, 7, 3)):
        passes = Passes(num_minibatches=4, num_epochs=num_epochs, seed=seed, step=step)
        assert ids_of(passes.cut(batch, 0)) == ids_of(expected)


def test_later_epochs_derive_from_seed_step_and_epoch(toolbox):
    batch = toolbox.random_batch(0, 17)

    def cut(seed, step, epoch):
        return ids_of(Passes(num_minibatches=4, num_epochs=9, seed=seed, step=step).cut(batch, epoch))

    first = cut(1, 2, 3)
    assert cut(1, 2, 3) == first
    others = [cut(1, 2, 0), cut(1, 2, 1), cut(1, 3, 3), cut(2, 2, 3), cut(12, 3, 1), cut(1, 23, 1)]
    assert all(other != first for other in others)
    assert others[-1] != others[-2]
    # numbers that must never change: a recorded run could not be replayed any more
    assert dealt_parts([5, 3, 9, 2, 7, 7, 1], 3, random.Random("1/0/1")) == [[0, 4, 6], [1, 2], [3, 5]]


def test_groups_that_share_their_prompt_stay_together_where_there_are_enough(toolbox):
    batch = toolbox.random_batch(0, 17)
    batch = replace(batch, group_ids=torch.tensor([row % 5 for row in range(17)]))
    for epoch in (0, 1):
        parts = Passes(num_minibatches=3, num_epochs=2, keeps_groups=True).rows(batch, epoch)
        assert sorted(row for part in parts for row in part) == list(range(17))
        assert all(part == sorted(part) for part in parts)
        groups = [{row % 5 for row in part} for part in parts]
        assert sorted(group for part in groups for group in part) == list(range(5))
    few = Passes(num_minibatches=6, keeps_groups=True).rows(batch, 0)
    assert few == Passes(num_minibatches=6).rows(batch, 0)


def test_one_minibatch_is_the_batch_itself(toolbox):
    batch = toolbox.random_batch(0, 5)
    assert Passes(num_minibatches=1, num_epochs=2).cut(batch, 1) == [batch]


def test_every_epoch_covers_the_batch_once(toolbox):
    engine, batch = toolbox.TableEngine(lr=0.01), toolbox.random_batch(1, 12)
    actor = actor_of(engine, ppo_n_minibatches=3, ppo_epochs=3, seed=4)
    metrics = actor.update(ready(actor, batch), step=6)
    assert metrics["actor/optimizer_steps"].value == 9
    assert len(engine.gradients) == 9
    rows = sorted(batch.input_ids.tolist())
    epochs = [engine.minibatches[3 * e : 3 * e + 3] for e in range(3)]
    for minis in epochs:
        assert sorted(token for mini in minis for token in mini.input_ids.tolist()) == rows
        assert sum(mini.num_sequences for mini in minis) == 12
    assert len({str(ids_of(minis)) for minis in epochs}) == 3
    expected = Passes(num_minibatches=3, num_epochs=3, seed=4, step=6)
    assert [ids_of(minis) for minis in epochs] == [ids_of(expected.cut(batch, epoch)) for epoch in range(3)]
    again = toolbox.TableEngine(lr=0.01)
    other = actor_of(again, ppo_n_minibatches=3, ppo_epochs=3, seed=4)
    other.update(ready(other, batch), step=6)
    assert torch.equal(again.table, engine.table)  # bitwise: what a replay and a recovery need
    values = metric_values(metrics)
    assert values["actor/epoch_0/approx_kl"] < values["actor/epoch_1/approx_kl"] < values["actor/epoch_2/approx_kl"]
    assert values["actor/epoch_0/approx_kl"] < values["actor/approx_kl"] < values["actor/epoch_2/approx_kl"]


def test_one_epoch_adds_no_metrics(toolbox):
    actor = actor_of(toolbox.TableEngine(), ppo_n_minibatches=2)
    assert not any("epoch" in name for name in actor.update(ready(actor, toolbox.random_batch(1, 4))))


def test_the_critic_has_epochs_too(toolbox):
    engine, batch = toolbox.TableEngine(critic=True, lr=0.1), toolbox.random_batch(1, 12)
    critic = Critic(engine, PPOCriticConfig(path="t", ppo_n_minibatches=2, ppo_epochs=2), seed=3)
    actor = actor_of(toolbox.TableEngine())
    batch = ready(actor, critic.with_values(batch))
    metrics = critic.update(batch, step=5)
    assert metrics["critic/optimizer_steps"].value == len(engine.gradients) == 4
    expected = Passes(num_minibatches=2, num_epochs=2, seed=3, step=5)
    assert ids_of(engine.minibatches) == ids_of(expected.cut(batch, 0)) + ids_of(expected.cut(batch, 1))


def test_ranks_keep_step_through_epochs_with_unequal_shares(toolbox):
    group = toolbox.RankGroup(3)
    shares = [toolbox.random_batch(4, 9), toolbox.random_batch(5, 2), toolbox.select(toolbox.random_batch(6, 2), [])]

    def rank_main(rank):
        engine = toolbox.TableEngine(rank=rank, group=group, lr=0.1)
        actor = actor_of(engine, ppo_n_minibatches=2, ppo_epochs=3)
        metrics = reduce_metrics(actor.update(ready(actor, shares[rank])), engine)
        return engine, metric_values(metrics)

    results = group.run(rank_main)
    for engine, values in results:
        assert len(engine.gradients) == 6
        assert torch.equal(engine.table, results[0][0].table)
        assert values == results[0][1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rest_is_left_out_once_the_policy_has_moved_too_far(toolbox, world_size):
    """Only rank 0 holds tokens: the others stop with it."""
    group = toolbox.RankGroup(world_size)
    batch = toolbox.random_batch(4, 12)

    def rank_main(rank, target_kl):
        engine = toolbox.TableEngine(rank=rank, group=group, lr=3.0)
        actor = actor_of(engine, ppo_n_minibatches=3, ppo_epochs=4, target_kl=target_kl)
        share = batch if rank == 0 else toolbox.select(batch, [])
        metrics = metric_values(reduce_metrics(actor.update(ready(actor, share)), engine))
        return len(engine.gradients), metrics

    free = group.run(lambda rank: rank_main(rank, 1e9))
    assert all((steps, metrics["actor/stopped_by_kl"]) == (12, 0) for steps, metrics in free)
    # the first minibatch is at ratio 1, so the second is the first that can show a distance
    tight = group.run(lambda rank: rank_main(rank, 1e-6))
    assert all((steps, metrics["actor/stopped_by_kl"]) == (2, 1) for steps, metrics in tight)
    assert all(metrics["actor/optimizer_steps"] == 2 for _, metrics in tight)


def test_the_policy_keeps_its_weights_while_the_critic_warms_up(toolbox):
    engine, batch = toolbox.TableEngine(), toolbox.random_batch(4, 8)
    actor = actor_of(engine, frozen_steps=2, ppo_n_minibatches=2)
    before = engine.table.detach().clone()
    for step in (0, 1):
        metrics = actor.update(ready(actor, batch), step=step)
        assert torch.equal(engine.table, before)
        assert (metrics["actor/optimizer_steps"].value, metrics["actor/update_skipped"].value) == (0, 1)
    metrics = actor.update(ready(actor, batch), step=2)
    assert not torch.equal(engine.table, before)
    assert (metrics["actor/optimizer_steps"].value, metrics["actor/update_skipped"].value) == (2, 0)
    # a process that starts in the middle does the same: it is a function of the step
    late = toolbox.TableEngine()
    other = actor_of(late, frozen_steps=2, ppo_n_minibatches=2)
    other.update(ready(other, batch), step=2)
    assert torch.equal(late.table, engine.table)
