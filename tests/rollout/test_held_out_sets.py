"""Evaluations in a training: single episodes, several answers to each row, several held-out sets."""

import dataclasses

import pytest

from areal.api.config import GenerationHyperparameters
from areal.api.data import TrajectoryGroup
from areal.ledger.payload import TrajectoryError, encode_episode
from areal.rollout.evaluation import HeldOutOptions, evaluate_episode, last_answer_ids
from areal.trainer.serve import held_out_options
from tests.rollout import rollout_kit
from tests.rollout.test_episodes import GOOD

REWARDS = {0: [0.0, 1.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 1.0], 2: [1.0] * 4, 7: [0.5] * 4}
"""By row, the reward of each visit."""


class Rewarded(rollout_kit.ScriptedWorkflow):
    async def arun_episode(self, engine, data):
        visit = self.seen.count(data["index"])
        group = await super().arun_episode(engine, data)
        subject = dataclasses.replace(group.trajectories[0], reward=REWARDS[data["index"]][visit % 4])
        return dataclasses.replace(group, trajectories=[subject])


async def test_metrics_of_several_answers_and_sets_by_hand():
    workflow = Rewarded()
    controller = rollout_kit.make_controller(
        rollout_kit.memory_ledger(),
        fleet=rollout_kit.FakeFleet(version=4),
        eval_sets={"": [{"index": 0}, {"index": 1}], "hard": [{"index": 7}, {"index": 2}]},
        eval_workflows={"sampled": workflow, "greedy": workflow},
        eval_options=HeldOutOptions(num_samples=4, answer_of=lambda group: str(group.trajectories[-1].reward)),
    )
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=4, version=4)
    result = await controller.evaluate(4, "sampled", timeout_s=200.0)
    assert (result["num"], result["failed"], result["hard/num"]) == (8.0, 0.0, 8.0)
    by_hand = {"reward": 0.5, "mean@4": 0.5, "pass@1": 0.5, "pass@2": (1 / 2 + 1) / 2, "pass@4": 1.0, "majority@4": 0.5}
    assert {name: result[name] for name in by_hand} == pytest.approx(by_hand)
    assert result["mean@4/stderr"] == result["reward/stderr"] == pytest.approx(0.25)  # values 1/4 and 3/4
    assert (result["hard/reward"], result["hard/pass@1"], result["hard/majority@4"]) == (0.75, 0.5, 0.5)
    greedy = await controller.evaluate(4, "greedy", timeout_s=200.0)
    assert (greedy["num"], greedy["hard/num"]) == (2.0, 2.0)
    assert greedy["hard/reward/stderr"] == 0.25
    assert "mean@1" not in greedy
    assert "pass@1" not in greedy
    await controller.close()


def test_the_last_answer_of_a_dialogue():
    group = rollout_kit.TrajectoryGroup(
        trajectories=[
            rollout_kit.Trajectory(
                token_ids=[1, 2, 3, 4, 5, 6, 7],
                loss_mask=[0, 1, 0, 0, 1, 1, 0],
                rollout_logprobs=[0.0] * 7,
                output_versions=[0] * 7,
                reward=0.0,
                finished=True,
            )
        ]
    )
    assert last_answer_ids(group) == [5, 6]


def test_options_that_cannot_work():
    config = rollout_kit.make_config()
    assert held_out_options(config).num_samples == 1  # loads no tokenizer
    greedy = dataclasses.replace(
        config,
        gconfig=GenerationHyperparameters(greedy=True),
        evaluator=dataclasses.replace(config.evaluator, n_samples=2, sets={"hard": "h.jsonl", "a/b": "x.jsonl"}),
    )
    assert {"evaluator.n_samples", "evaluator.sets"} <= {path for path, *_ in greedy.problems()}
    assert [path for path, *_ in greedy.evaluator.problems()] == ["sets"]


class Fixed(rollout_kit.ScriptedWorkflow):
    """Each episode has the same result."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    async def arun_episode(self, engine, data):
        return self.group


async def evaluated(group):
    return await evaluate_episode(None, Fixed(group), {}, count_answer=lambda response: None)


async def test_an_episode_has_the_mean_reward_and_length_of_its_sessions():
    longer = {"token_ids": [5] * 4, "loss_mask": [0, 1, 1, 1], "rollout_logprobs": [0.0] * 4}
    second = dataclasses.replace(GOOD, session=0, output_versions=[-1, 3, 3, 3], **longer)
    rows = [dataclasses.replace(GOOD, session=0), second, dataclasses.replace(GOOD, reward=2.0, session=1)]
    episode = await evaluated(TrajectoryGroup(trajectories=rows))
    assert (episode.reward, episode.num_generated) == (1.25, 3.5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([], "trajectory_lengths"),
        ([{"loss_mask": [0, 1]}], "trajectory_lengths"),
        ([{}, {"reward": float("nan")}], "not_finite"),
        ([{"reward": "high"}], "wrong_type"),
    ],
)
async def test_an_episode_is_refused_as_one_of_training_is(changes, code):
    group = TrajectoryGroup(trajectories=[dataclasses.replace(GOOD, **change) for change in changes])
    with pytest.raises(TrajectoryError) as of_evaluation:
        await evaluated(group)
    with pytest.raises(TrajectoryError) as of_training:
        encode_episode(0, group)
    assert of_evaluation.value.code == of_training.value.code == f"workflow.{code}"
