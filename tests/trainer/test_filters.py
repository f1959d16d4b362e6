"""What the policy loss leaves out: cut answers, uniform groups, contested beginnings."""

from dataclasses import replace

import pytest
import torch

from areal.api.config import PPOActorConfig
from areal.trainer.filters import with_filters


def config(**options):
    return PPOActorConfig(path="table", **options)


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
