"""Evaluations in a training with several answers to each row and several held-out sets."""

import dataclasses

import pytest

from areal.api.config import GenerationHyperparameters
from areal.rollout.evaluation import HeldOutOptions, last_answer_ids
from areal.trainer.serve import held_out_options
from tests.rollout import rollout_kit

REWARDS = {0: [0.0, 1.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 1.0], 2: [1.0] * 4, 7: [0.5] * 4}
"""By row, the reward of each visit."""


class Rewarded(rollout_kit.ScriptedWorkflow):
    async def arun_episode(self, engine, data):
        visit = self.seen.count(data["index"])
        group = await super().arun_episode(engine, data)
        one = dataclasses.replace(group.trajectories[0], reward=REWARDS[data["index"]][visit % 4])
        return dataclasses.replace(group, trajectories=[one])


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
    found = await controller.evaluate(4, "sampled", timeout_s=200.0)
    assert (found["num"], found["failed"], found["hard/num"]) == (8.0, 0.0, 8.0)
    by_hand = {"reward": 0.5, "mean@4": 0.5, "pass@1": 0.5, "pass@2": (1 / 2 + 1) / 2, "pass@4": 1.0, "majority@4": 0.5}
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand)
    assert found["mean@4/stderr"] == pytest.approx(0.25)  # values 1/4 and 3/4
    assert (found["hard/reward"], found["hard/pass@1"], found["hard/majority@4"]) == (0.75, 0.5, 0.5)
    greedy = await controller.evaluate(4, "greedy", timeout_s=200.0)
    assert (greedy["num"], greedy["hard/num"]) == (2.0, 2.0)
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
