"""A user's own advantage estimator, through the stage and in the checks before anything starts."""

from dataclasses import replace

import pytest
import torch

from areal.algorithm.advantage import RETURNS, VALUES
from areal.api.config import PPOActorConfig
from areal.api.config.validate import conflicts
from areal.trainer.actor import PPOActor
from tests.expect import raises_code

MEDIAN = "areal.algorithm.advantage:median_baseline"
TEXT = '''
import torch


def reward_to_go(answers, options):
    """Of one answer."""
    return answers.token_rewards.flip(0).cumsum(0).flip(0)


def batch_mean(answers, options):
    facts = torch.stack([answers.rewards.double().sum(), answers.rewards.new_tensor(answers.num_sequences).double()])
    total, count = answers.reduce(facts).tolist()
    return (answers.rewards - total / max(count, 1))[answers.sequence_index]


def one_per_answer(answers, options):
    return torch.zeros(answers.num_sequences + 1)


def counts(answers, options):
    return answers.sequence_index


def wrong(answers, options):
    return answers.no_such_field


def alone(answers):
    return answers.rewards
'''


@pytest.fixture
def options_of(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TEXT)

    def make(name, **options):
        path = MEDIAN if name == "median" else f"{file}:{name}"
        custom = {"name": "custom", "path": path, "args": {"scale": 2.0}}
        base = {"path": "table", "kl_ctl": 0.0, "adv_estimator": custom}
        return PPOActorConfig(**(base | options))

    return make


def test_it_gives_the_advantages_of_the_tokens(toolbox, options_of):
    # group 0: 1, 0 and 5, median 1; group 4: 2 alone. Tokens without training get 0, whatever it returns
    batch = toolbox.make_batch(
        [[1, 2, 3], [1, 2], [1, 2], [1, 2]], rewards=[1.0, 0.0, 5.0, 2.0], group_ids=[0, 0, 0, 4]
    )
    result = PPOActor(toolbox.TableEngine(), options_of("median")).with_advantages(batch).advantages
    assert result.tolist() == [0, 0, 0, -2.0, 0, 8.0, 0, 0, 0]
    # shaping comes first
    result = PPOActor(toolbox.TableEngine(), options_of("median", reward_scaling=0.5)).with_advantages(batch).advantages
    assert result.tolist() == [0, 0, 0, -1.0, 0, 4.0, 0, 0, 0]


def test_it_reads_the_kl_penalty_in_the_rewards_of_tokens(toolbox, options_of):
    # as in test_actor: k1 of two tokens 0.5 and 0.2, coefficient 0.1, task reward 1
    batch = replace(toolbox.make_batch([[1, 2, 3]], rewards=[1.0]), ref_logprobs=torch.tensor([-2.0, -1.7, 0.0]))
    actor = PPOActor(toolbox.TableEngine(), options_of("reward_to_go", kl_ctl=0.1))
    assert actor.with_advantages(batch).advantages.tolist() == pytest.approx([0.93, 0.98, 0.0])


def test_a_critic_keeps_its_targets(toolbox, options_of):
    """Its values reach the estimator; its targets are those of GAE."""
    batch = toolbox.make_batch([[1, 2, 3]], rewards=[1.0]).with_column(VALUES, torch.tensor([0.25, 0.75, 0.0]))
    result = PPOActor(toolbox.TableEngine(), options_of("median")).with_advantages(batch)
    assert result.columns[RETURNS].tolist() == [1.0, 1.0, 0.0]


def test_it_sums_over_ranks(toolbox, options_of):
    batch = toolbox.make_batch([[1, 2], [1, 2], [1, 2]], rewards=[1.0, 2.0, 6.0])

    group = toolbox.RankGroup(3)
    # Each rank is a process in a run: threads that import the user's file at the same time would see half of it.
    actors = [PPOActor(toolbox.TableEngine(rank=rank, group=group), options_of("batch_mean")) for rank in range(3)]

    def stage(rank):
        ours = toolbox.select(batch, [[0, 2], [], [1]][rank])
        return actors[rank].with_advantages(ours).advantages.tolist()

    assert group.run(stage) == [[-2.0, 0.0, 3.0, 0.0], [], [-1.0, 0.0]]


@pytest.mark.parametrize("name", ["one_per_answer", "counts"])
def test_what_is_no_advantage_is_refused_before_the_first_batch(toolbox, options_of, name):
    with raises_code("algorithm.custom_advantage", name):
        PPOActor(toolbox.TableEngine(), options_of(name))


def test_its_own_error_is_raised_before_the_first_batch(toolbox, options_of):
    with pytest.raises(AttributeError, match="no_such_field"):
        PPOActor(toolbox.TableEngine(), options_of("wrong"))


def test_what_cannot_be_called_is_found_before_anything_starts(options_of):
    def problems(config):
        return {path: text for path, text, *_ in conflicts(config)}

    assert not problems(options_of("median"))
    assert "is required" in problems(options_of("x", adv_estimator="custom"))["adv_estimator.path"]
    assert "batch_mean" in problems(options_of("batch_maen"))["adv_estimator.path"]
    assert "(answers)" in problems(options_of("alone"))["adv_estimator.path"]
