"""What follows a step: cadences, exports, checkpoints, evaluations, the early end, on one rank and on two."""

import json
import threading
from pathlib import Path

import pytest
import torch

from areal.api.config import EvaluatorConfig, GRPOConfig, PPOActorConfig, RecoverConfig, SaverConfig, TrainDatasetConfig
from areal.api.metrics import Metric
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.progress import TrainingLength
from areal.trainer.recover import RecoverStore
from tests.fake_ranks import FakeRanks


class Engine:
    """What AfterStep and its parts call of a TrainEngine; ranks are threads."""

    def __init__(self, group, rank):
        self._group, self._rank = group, rank
        self.may_write = threading.Event()
        self.may_write.set()

    def all_reduce(self, values, op="sum"):
        return self._group.all_reduce(self._rank, values, op)

    def save(self, path: Path, *, with_optimizer):
        if self._rank == 0:
            path.mkdir(parents=True)
        self.all_reduce(torch.zeros(1))

    def stage(self, *, copies):
        return self

    def write(self, folder):
        assert self.may_write.wait(100)
        return {}

    def load(self, path: Path):
        return None


class Records:
    """A tracker."""

    def __init__(self):
        self.lines = []

    def log(self, step, values):
        self.lines.append((step, values))

    def flush(self):
        self.num_flushed = len(self.lines)

    def close(self):
        return None


LENGTH = TrainingLength(steps_per_epoch=2, total_steps=6)


def make(toolbox_group, rank, folder, hooks, first_step=1, **sections):
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=TrainDatasetConfig(path="x.jsonl", batch_size=4),
        actor=PPOActorConfig(path="m"),
        **sections,
    )
    engines, ranks = {"actor": Engine(toolbox_group, rank)}, FakeRanks(rank, toolbox_group)
    records = Records()
    recover = RecoverStore(folder / "recover", config.recover, engines, ranks, committed=hooks.committed)
    after = AfterStep(
        config,
        engines,
        ranks,
        paths=RunPaths(folder),
        recover=recover,
        trackers=[records] if rank == 0 else [],
        hooks=hooks,
        first_step=first_step,
    )
    return after, recover, engines, records


def no_hooks(evaluate=None, goal_reached=lambda values: False):
    return StepHooks(evaluate=evaluate, goal_reached=goal_reached, committed=lambda step, path: None)


def run(after, steps):
    """Steps done until the end."""
    for step in steps:
        if after(LENGTH.info(step), {"x": Metric(1.0)}, {}):
            return step + 1
    return steps.stop


def test_the_last_step_is_exported_and_evaluated_without_any_cadence(toolbox, tmp_path):
    asked = []
    hooks = no_hooks(evaluate=lambda done: asked.append(done) or {"eval/sampled/reward": 0.5})
    after, _, _, records = make(toolbox.RankGroup(1), 0, tmp_path, hooks, recover=RecoverConfig(mode="disabled"))
    assert run(after, range(6)) == 6
    assert asked == [6]
    assert [path.name for path in (tmp_path / "checkpoints" / "actor").iterdir()] == ["step-000006"]
    assert [step for step, _ in records.lines] == [1, 2, 3, 4, 5, 6]
    assert records.lines[-1][1]["eval/sampled/reward"] == 0.5
    assert not (tmp_path / "recover").exists()


def test_every_rank_evaluates_and_all_end_when_rank_0_has_reached_the_goal(toolbox, tmp_path):
    """A rank that waited in a collective for another rank's evaluation would run into its time limit."""
    group = toolbox.RankGroup(2)
    asked = {0: [], 1: []}

    def rank_run(rank):
        hooks = no_hooks(
            evaluate=lambda done: asked[rank].append(done) or {"eval/greedy/reward": done / 6},
            goal_reached=lambda values: rank == 0 and values["eval/greedy/reward"] >= 0.6,
        )
        evaluator = EvaluatorConfig(freq_steps=2, modes=["greedy"])
        return run(make(group, rank, tmp_path, hooks, evaluator=evaluator)[0], range(6))

    assert group.run(rank_run) == [4, 4]
    assert asked == {0: [2, 4], 1: [2, 4]}
    assert [path.name for path in (tmp_path / "checkpoints" / "actor").iterdir()] == ["step-000004"]


def test_a_checkpoint_remembers_what_fired_with_it(toolbox, tmp_path, monkeypatch):
    """Otherwise a recovered run would export, evaluate and save again at its first step."""
    now_s = 0.0
    monkeypatch.setattr("areal.trainer.after_step.time.monotonic", lambda: now_s)
    group = toolbox.RankGroup(1)
    sections = {"recover": RecoverConfig(mode="auto", freq_secs=100), "saver": SaverConfig(freq_secs=100)}
    after, recover, _, _ = make(group, 0, tmp_path, no_hooks(), **sections)
    for step in range(3):
        now_s += 60.0
        after(LENGTH.info(step), {}, {})
    recover.finish()
    newest = recover.start_from(after_failure=False)
    assert newest is not None
    assert newest.name == "step-000002"
    point = recover.load(newest)
    assert point.cadence_s == {"save": 120.0, "recover": 120.0, "evaluate": 0.0}
    again, _, _, _ = make(group, 0, tmp_path, no_hooks(), **sections)
    again.continue_from(point)
    now_s += 10.0
    again(LENGTH.info(2), {}, {})
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == ["step-000002"]


def test_exports_from_before_a_recovery_do_not_push_out_new_ones(toolbox, tmp_path):
    old = tmp_path / "checkpoints" / "actor"
    for name in ("step-000004", "step-000005"):
        (old / name).mkdir(parents=True)
    sections = {"saver": SaverConfig(freq_steps=1, keep_last=2)}
    after, _, _, _ = make(toolbox.RankGroup(1), 0, tmp_path, no_hooks(), **sections)
    run(after, range(2))
    assert sorted(path.name for path in old.iterdir()) == ["step-000001", "step-000002", "step-000004", "step-000005"]
    run(after, range(2, 3))
    assert sorted(path.name for path in old.iterdir()) == ["step-000002", "step-000003", "step-000004", "step-000005"]


def test_the_end_is_a_recovery_point_and_says_that_nothing_is_left(toolbox, tmp_path):
    """So the same command again on a finished run trains nothing."""
    group, recovery = toolbox.RankGroup(1), RecoverConfig(mode="auto", freq_steps=100)
    hooks = no_hooks(
        evaluate=lambda done: {"eval/greedy/reward": done / 6},
        goal_reached=lambda values: values["eval/greedy/reward"] >= 0.5,
    )
    evaluator = EvaluatorConfig(freq_steps=3, modes=["greedy"], stop_at={"greedy": 0.5})
    after, recover, _, records = make(group, 0, tmp_path / "goal", hooks, evaluator=evaluator, recover=recovery)
    assert run(after, range(6)) == 3
    assert records.num_flushed == 3
    point = recover.load(recover.start_from(after_failure=False))
    assert (point.step, point.goal_reached) == (3, {"greedy": 0.5})
    assert point.ends(after._config)
    higher = EvaluatorConfig(freq_steps=3, modes=["greedy"], stop_at={"greedy": 0.9})
    other, _, _, _ = make(group, 0, tmp_path / "other", hooks, evaluator=higher, recover=recovery)
    assert not point.ends(other._config)

    after, recover, _, _ = make(group, 0, tmp_path / "last", no_hooks(), recover=recovery)
    run(after, range(6))
    point = recover.load(recover.start_from(after_failure=False))
    assert (point.step, point.goal_reached) == (6, {})
    assert not point.ends(after._config)  # more steps may be asked for


def test_files_of_a_killed_export_are_removed_at_the_next_start(toolbox, tmp_path):
    role = tmp_path / "checkpoints" / "actor"
    for name in ("step-000001", ".step-000002.writing", ".step-000001.old", ".step-000000.removed"):
        (role / name).mkdir(parents=True)
    make(toolbox.RankGroup(1), 0, tmp_path, no_hooks())
    assert [path.name for path in role.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("rank_of_clock", [0, 1])
def test_ranks_whose_clocks_differ_save_together(toolbox, tmp_path, rank_of_clock):
    group = toolbox.RankGroup(2)

    def rank_run(rank):
        sections = {"recover": RecoverConfig(mode="auto", freq_secs=10)}
        after, _, _, _ = make(group, rank, tmp_path, no_hooks(), **sections)
        if rank == rank_of_clock:
            after._began_s -= 60.0
        after(LENGTH.info(0), {}, {})
        after.close()

    group.run(rank_run)
    assert [path.name for path in (tmp_path / "recover").iterdir()] == ["step-000001"]


def test_a_requested_checkpoint_follows_the_step(toolbox, tmp_path):
    sections = {"recover": RecoverConfig(mode="auto", freq_steps=100)}
    after, _, _, _ = make(toolbox.RankGroup(1), 0, tmp_path, no_hooks(), **sections)
    run(after, range(1))
    assert not (tmp_path / "recover" / "step-000001").exists()
    RunPaths(tmp_path).requests.mkdir()
    RunPaths(tmp_path).checkpoint_request.touch()
    run(after, range(1, 2))
    assert (tmp_path / "recover" / "step-000002").exists()
    RunPaths(tmp_path).checkpoint_request.unlink()
    run(after, range(2, 3))
    assert not (tmp_path / "recover" / "step-000003").exists()


def test_a_checkpoint_is_reported_after_it_is_complete_at_the_next_step(toolbox, tmp_path):
    """So nothing that the ledger releases refers to a checkpoint that is not complete."""
    reported: list[tuple[int, bool]] = []
    hooks = StepHooks(evaluate=None, committed=lambda step, path: reported.append((step, path.is_dir())))
    sections = {"recover": RecoverConfig(mode="auto", freq_steps=2)}
    after, recover, engines, _ = make(toolbox.RankGroup(1), 0, tmp_path, hooks, **sections)
    engines["actor"].may_write.clear()
    run(after, range(3))
    assert (reported, recover.is_writing) == ([], True)
    engines["actor"].may_write.set()
    run(after, range(3, 6))
    assert reported == [(2, True), (4, True), (6, True)]
    after.close()


def test_a_requested_checkpoint_and_one_without_async_save_are_complete_when_the_step_ends(toolbox, tmp_path):
    reported: list[int] = []
    hooks = StepHooks(evaluate=None, committed=lambda step, path: reported.append(step))
    config = RecoverConfig(mode="auto", freq_steps=1, async_save=False)
    after, _, _, _ = make(toolbox.RankGroup(1), 0, tmp_path / "waits", hooks, recover=config)
    run(after, range(2))
    assert reported == [1, 2]
    config = RecoverConfig(mode="auto", freq_steps=3)
    after, _, _, _ = make(toolbox.RankGroup(1), 0, tmp_path / "asked", hooks, recover=config)
    RunPaths(tmp_path / "asked").requests.mkdir(parents=True)
    RunPaths(tmp_path / "asked").checkpoint_request.touch()
    run(after, range(1))
    assert reported == [1, 2, 1]


class Background:
    """Evaluations in the background whose reward is their step / 10; they end after `lasts` further steps."""

    def __init__(self, lasts=1, missed=()):
        self.lasts, self.missed, self.begun, self.polls, self.waited = lasts, missed, [], 0, []

    def begin(self, steps_done):
        self.begun.append(steps_done)
        self.polls = 0
        return True

    def is_running(self, steps_done):
        self.polls += 1
        return self.polls < self.lasts

    def result(self, steps_done):
        self.waited += [steps_done] if self.polls < self.lasts else []
        if steps_done in self.missed:
            return None
        return {"eval/version": float(steps_done), "eval/greedy/reward": steps_done / 10}


def background_run(toolbox, folder, background, *, goal=2.0, steps=range(6), **sections):
    asked = []
    hooks = StepHooks(
        evaluate=lambda done: asked.append(done) or {"eval/version": float(done), "eval/greedy/reward": done / 10},
        background=background,
        goal_reached=lambda values: values["eval/greedy/reward"] >= goal,
    )
    evaluator = EvaluatorConfig(freq_steps=2, modes=["greedy"])
    made = make(toolbox.RankGroup(1), 0, folder, hooks, evaluator=evaluator, **sections)
    return run(made[0], steps), asked, made


def evaluated(records):
    return {step: values["eval/version"] for step, values in records.lines if "eval/version" in values}


@pytest.mark.parametrize(
    ("lasts", "lines", "waited"),
    [
        (1, {3: 2.0, 5: 4.0, 6: 6.0}, []),
        (2, {4: 2.0, 6: 6.0}, []),
        (9, {4: 2.0, 6: 6.0}, [2, 4]),  # the next evaluation and the end of the run wait for it
    ],
)
def test_a_result_arrives_at_a_later_step_with_its_version(toolbox, tmp_path, lasts, lines, waited):
    background = Background(lasts)
    done, asked, (_, _, _, records) = background_run(toolbox, tmp_path, background)
    assert (done, asked, background.begun) == (6, [6], [2, 4])  # that of the last step blocks
    assert evaluated(records) == lines
    assert background.waited == waited


def test_a_goal_ends_the_run_when_its_result_arrives(toolbox, tmp_path):
    done, asked, (_, _, _, records) = background_run(toolbox, tmp_path, Background(), goal=0.2)
    assert (done, asked, evaluated(records)) == (3, [], {3: 2.0})
    assert [path.name for path in (tmp_path / "checkpoints" / "actor").iterdir()] == ["step-000003"]


def test_a_lost_evaluation_is_one_of_the_newest_version(toolbox, tmp_path):
    done, asked, (_, _, _, records) = background_run(toolbox, tmp_path, Background(missed=[2]))
    assert (done, asked, evaluated(records)) == (6, [3, 6], {3: 3.0, 5: 4.0, 6: 6.0})


def test_the_best_export_is_that_of_the_evaluated_version(toolbox, tmp_path):
    """Its score arrives one step after the export, and beside the export of another version."""
    saver = SaverConfig(freq_steps=1, keep_last=1, keep_best="eval/greedy/reward", best_is="lowest")
    background_run(toolbox, tmp_path, Background(), saver=saver)
    assert json.loads((tmp_path / "checkpoints" / "scores.json").read_bytes()) == {"2": 0.2, "4": 0.4, "6": 0.6}
    exports = sorted(path.name for path in (tmp_path / "checkpoints" / "actor").iterdir())
    assert exports == ["step-000002", "step-000006"]


@pytest.mark.parametrize("start", [2, 3])
def test_a_checkpoint_remembers_an_evaluation_without_a_result(toolbox, tmp_path, start):
    first = Background(lasts=9)
    sections = {"recover": RecoverConfig(mode="auto", freq_steps=1, freq_secs=None)}
    _, _, (after, recover, _, _) = background_run(toolbox, tmp_path, first, steps=range(start), **sections)
    recover.finish()
    point = recover.load(recover.start_from(after_failure=False))
    assert (point.step, point.evaluating) == (start, 2)
    again = Background()
    hooks = StepHooks(evaluate=lambda done: {}, background=again)
    evaluator = EvaluatorConfig(freq_steps=2, modes=["greedy"])
    after, _, _, records = make(
        toolbox.RankGroup(1), 0, tmp_path, hooks, first_step=start + 1, evaluator=evaluator, **sections
    )
    after.continue_from(point)
    after.continue_evaluation()
    assert again.begun == ([2] if start == 2 else [])  # else the controller still has it, or it is lost
    run(after, range(start, 5))
    assert evaluated(records)[start + 1] == 2.0
