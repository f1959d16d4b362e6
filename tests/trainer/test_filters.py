"""What the policy loss leaves out: cut answers, uniform groups, contested beginnings."""

from dataclasses import replace

import pytest
import torch

from areal.api.config import NormConfig, PPOActorConfig
from areal.trainer.actor import FILTERED, PPOActor, with_filters


def config(**options):
    return PPOActorConfig(path="table", **options)


GROUP_MEAN = NormConfig(mean_level="group", std_level=None)


def values(metrics):
    return {name.removeprefix("filter/"): metric.value for name, metric in metrics.items()}


def kept_of(batch):
    """Trained answer tokens left in each sequence."""
    return [int(batch.trained[batch.sequence_index == s].sum()) for s in range(batch.num_sequences)]


@pytest.fixture
def batch(toolbox):
    # groups 4 (mixed rewards), 9 (all 1), 2 (one answer), interleaved; answers of 3, 1, 2, 2, 1 tokens
    return toolbox.make_batch(
        [[1, 2, 3, 4], [1, 2], [5, 0, 1], [1, 2, 3], [5, 2]],
        rewards=[1.0, 1.0, 1.0, 0.0, 1.0],
        group_ids=[4, 9, 2, 4, 9],
        finished=[True, True, False, True, False],
    )


def test_no_filter_changes_nothing(batch):
    result, metrics = with_filters(batch, config())
    assert result is batch
    assert metrics == {}


def test_truncated_answers_are_removed_by_their_flag(batch):
    result, metrics = with_filters(batch, config(mask_truncated=True))
    assert kept_of(result) == [3, 1, 0, 2, 0]
    assert torch.equal(result.loss_mask, batch.loss_mask)
    assert values(metrics) == {"truncated_tokens": 3, "truncated_sequences": 2, "kept_tokens": 6}


def test_uniform_groups_are_removed_by_id(batch):
    result, metrics = with_filters(batch, config(dynamic_sampling=True))
    assert kept_of(result) == [3, 0, 0, 2, 0]
    assert values(metrics) == {"uniform_group_tokens": 4, "uniform_group_sequences": 3, "kept_tokens": 5}


def test_contested_prefixes_are_removed(batch):
    # group 4 shares [2, 3] after the prompt [1]; it is the whole answer of the second, which therefore stays
    result, metrics = with_filters(batch, config(shared_prefix_min_tokens=2))
    assert kept_of(result) == [1, 1, 2, 2, 1]
    assert result.trained[:4].tolist() == [False, False, True, False]
    assert values(metrics) == {"shared_prefix_tokens": 2, "shared_prefix_sequences": 1, "kept_tokens": 7}
    assert kept_of(with_filters(batch, config(shared_prefix_min_tokens=3))[0]) == [3, 1, 2, 2, 1]


def test_a_token_counts_for_the_first_filter_that_takes_it(batch):
    options = config(mask_truncated=True, dynamic_sampling=True, shared_prefix_min_tokens=2)
    result, metrics = with_filters(batch, options)
    assert kept_of(result) == [1, 0, 0, 2, 0]
    assert values(metrics) == {
        "truncated_tokens": 3, "truncated_sequences": 2, "uniform_group_tokens": 1, "uniform_group_sequences": 1,
        "shared_prefix_tokens": 2, "shared_prefix_sequences": 1, "kept_tokens": 3,
    }  # fmt: skip
    assert sum(value for name, value in values(metrics).items() if name.endswith("tokens")) == batch.loss_mask.sum()


def test_removed_tokens_stay_removed(batch):
    before = batch.loss_mask.clone()
    before[0] = False
    result, metrics = with_filters(replace(batch, policy_mask=before), config(mask_truncated=True))
    assert kept_of(result) == [2, 1, 0, 2, 0]
    assert values(metrics)["kept_tokens"] == 5


def test_an_empty_share_reports_the_same_names(toolbox, batch):
    options = config(mask_truncated=True, dynamic_sampling=True, shared_prefix_min_tokens=2)
    result, metrics = with_filters(toolbox.select(batch, []), options)
    assert result.trained.tolist() == []
    assert metrics.keys() == with_filters(batch, options)[1].keys()
    assert set(values(metrics).values()) == {0}


@pytest.mark.parametrize("shares_first_pass", [False, True])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_an_update_computes_the_answers_that_are_left(toolbox, batch, num_minibatches, shares_first_pass):
    """With the gradient that it has when it computes all, of which the others have weight 0."""
    options = {"ppo_n_minibatches": num_minibatches, "use_decoupled_loss": True, "reward_norm": GROUP_MEAN}
    engines = []
    for is_removed in (True, False):
        engine = toolbox.TableEngine()
        actor = PPOActor(engine, config(dynamic_sampling=True, **options), shares_first_pass=shares_first_pass)
        filtered, _ = actor.with_filters(batch)
        assert filtered.columns[FILTERED].tolist() == [False, True, True, False, True]
        if not is_removed:
            filtered = filtered.without(FILTERED)
        actor.update(actor.with_advantages(actor.with_correction(actor.with_prox_logprobs(filtered))[0]))
        engines.append(engine)
    computed, everything = ([mini.num_sequences for mini in engine.minibatches] for engine in engines)
    assert sum(computed) == 2
    if num_minibatches == 1:  # several minibatches are cut differently
        assert everything == [5]
        assert torch.equal(engines[0].table, engines[1].table)


def test_an_update_of_removed_answers_alone_is_skipped(toolbox):
    batch = toolbox.make_batch([[1, 2], [1, 3]], rewards=[1.0, 1.0], group_ids=[4, 4])
    engine = toolbox.TableEngine()
    actor = PPOActor(engine, config(dynamic_sampling=True))
    before = engine.table.clone()
    metrics = actor.update(actor.with_advantages(actor.with_filters(batch)[0]))
    assert metrics["actor/update_skipped"].value == 1.0
    assert torch.equal(engine.table, before)
