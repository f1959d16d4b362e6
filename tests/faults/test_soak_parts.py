"""The soak itself: its schedule is a function of the seed, and its proofs see what is wrong with a ledger."""

import copy
import json
import re
from pathlib import Path

import pytest

from areal.api.data import Trajectory, TrajectoryGroup
from areal.data.prompt_stream import PromptStream
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode
from areal.system.durable import seal_folder
from tests.faults.driver import Run
from tests.faults.ledger_proof import (
    check_episodes,
    check_metrics,
    check_rows,
    check_steps,
    check_versions,
    check_weights,
    first_prompt,
    raw_events,
    seconds_to_training,
)
from tests.faults.schedule import EVERYTHING, Fault, Moment, make_schedule, with_node_losses
from tests.faults.striker import Striker


def test_the_schedule_is_a_function_of_the_seed():
    assert make_schedule(7, 30, hang_s=6.0) == make_schedule(7, 30, hang_s=6.0)
    assert make_schedule(7, 30, hang_s=6.0) != make_schedule(8, 30, hang_s=6.0)
    assert make_schedule(7, 10, hang_s=6.0) == make_schedule(7, 30, hang_s=6.0)[:10]


def test_a_schedule_for_nodes_has_their_losses_and_keeps_its_chains():
    faults = make_schedule(7, 20, hang_s=6.0)
    result = with_node_losses(faults, ("node2", "node3"))
    losses = [i for i, fault in enumerate(result) if fault.action == "power"]
    assert {result[i].targets for i in losses} == {("node2",), ("node3",)}
    assert len(losses) >= 3
    assert [a for i, a in enumerate(result) if i not in losses] == [a for i, a in enumerate(faults) if i not in losses]
    assert not any(faults[i].is_chained or (faults[i + 1 : i + 2] and faults[i + 1].is_chained) for i in losses)


@pytest.mark.parametrize("seed", range(5))
def test_forty_faults_contain_every_kind(seed):
    faults = make_schedule(seed, 40, hang_s=6.0)
    struck = {(fault.action, target) for fault in faults for target in fault.targets if len(fault.targets) < 3}
    roles = {(action, target.partition("-")[0]) for action, target in struck}
    assert {("kill", role) for role in ("server", "controller", "trainer", "launcher")} <= roles
    assert {("stop", role) for role in ("server", "controller", "trainer")} <= roles
    assert {("terminate", role) for role in ("server", "controller", "trainer", "launcher")} <= roles
    assert {("stop_then_go", "launcher"), ("stop_then_go", "trainer"), ("stop_then_kill", "launcher")} <= roles
    moments = {fault.moment.kind for fault in faults}
    assert {"publishing", "checkpointing", "evaluating", "catching_up", "restarting", "training"} <= moments
    assert any(fault.targets == EVERYTHING for fault in faults)
    assert not faults[0].is_chained


@pytest.mark.parametrize("mode", ["xccl", "disk"])
@pytest.mark.parametrize("seed", range(5))
def test_a_short_schedule_contains_stops_and_sigterm(seed, mode):
    actions = [fault.action.partition("_")[0] for fault in make_schedule(seed, 12, hang_s=6.0, mode=mode)]
    assert actions.count("stop") >= 2
    assert actions.count("terminate") >= 1


def test_steps_are_trained_again_after_the_fault_before_a_catching_up():
    faults = make_schedule(3, 200, hang_s=6.0)
    before = [faults[i - 1].moment for i, fault in enumerate(faults) if fault.moment.kind == "catching_up"]
    assert len(before) >= 9
    assert {(moment.kind, moment.loses_steps, moment.delay_s) for moment in before} == {("training", True, 0.0)}


class Training(Run):
    """A run with a checkpoint of each third step; each look sees one more step, and a kill ends it."""

    exit_code = None

    def status(self):
        self.highest_step += 1
        if self.highest_step % 3 == 0:
            checkpoint = self.folder / "recover" / f"step-{self.highest_step:06}"
            checkpoint.mkdir(parents=True)
            seal_folder(checkpoint)
        return {"step": self.highest_step}

    def all_ready(self, names):
        return True

    def kill(self, names):
        self.exit_code = 0
        return dict.fromkeys(names, 1)


@pytest.mark.parametrize(("loses_steps", "struck_at"), [(False, 3), (True, 4)])
def test_a_fault_that_loses_steps_waits_for_a_step_without_checkpoint(tmp_path, loses_steps, struck_at):
    run = Training(arguments=(), folder=tmp_path, log_path=tmp_path / "log")
    striker = Striker(run=run, hang_s=1.0, say=lambda text: None)
    moment = Moment(kind="training", steps=2, loses_steps=loses_steps)
    assert striker.run_to_the_end([Fault(moment=moment, action="kill", targets=("trainer-0",))]) == []
    assert [(blow.step, blow.was_moment) for blow in striker.blows] == [(struck_at, True)]


def test_each_mode_has_its_own_schedule():
    assert make_schedule(7, 30, hang_s=6.0, mode="disk") != make_schedule(7, 30, hang_s=6.0, mode="xccl")


def whole_run() -> list[dict]:
    """Two steps of two episodes, a controller's death between them, one rejected and one failed."""

    def admitted(number, attempt=0, version=0):
        return {"event": "admitted", "id": number, "attempt": attempt, "version": version}

    def accepted(number, version):
        return {"event": "accepted", "id": number, "min_version": version, "max_version": version}

    return [
        {"event": "started"},
        {"event": "attached", "step": 0, "version": 0},
        *(admitted(number) for number in range(5)),
        accepted(0, 0),
        accepted(2, 0),
        {"event": "rejected", "id": 1, "reason": "filter"},
        {"event": "batched", "step": 0, "version": 0, "ids": [0, 2]},
        {"event": "published", "version": 1},
        {"event": "consumed", "step": 0, "version": 1, "weights": "aa", "at": 10.0},
        {"event": "started"},
        admitted(3, attempt=1, version=1),
        admitted(4, attempt=1, version=1),
        accepted(3, 1),
        {"event": "failed", "id": 4, "reason": "RewardError"},
        admitted(5, version=1),
        accepted(5, 1),
        {"event": "batched", "step": 1, "version": 1, "ids": [3, 5]},
        {"event": "attached", "step": 0, "version": 0},
        {"event": "trained_again", "step": 0, "version": 1, "weights": "aa", "at": 20.0},
        {"event": "published", "version": 2},
        {"event": "consumed", "step": 1, "version": 2, "weights": "bb", "at": 30.0},
        admitted(6, version=2),
    ]


def all_problems(events) -> list[str]:
    return check_episodes(events).problems + check_steps(events) + check_weights(events)[1] + check_versions(events)


def test_a_run_that_lost_nothing_has_no_problems():
    events = whole_run()
    assert all_problems(events) == []
    counts = check_episodes(events)
    assert (counts.admitted, counts.trained, counts.rejected, counts.failed, counts.running) == (7, 4, 1, 1, 1)
    assert (counts.lost, counts.twice, counts.waiting, counts.batched) == (0, 0, 0, 0)
    assert check_weights(events)[0] == 1
    assert seconds_to_training(events, 12.0) == (8.0, 18.0)


def test_an_interrupted_episode_is_lost_only_if_a_new_one_starts_before_it():
    events = [*whole_run(), {"event": "started"}]
    assert all_problems(events) == []
    assert check_episodes(events).running == 1
    new = {"event": "admitted", "id": 7, "attempt": 0, "version": 2}
    assert "episodes [6] were admitted, have no fate" in " ; ".join(all_problems([*events, new]))
    again = {"event": "admitted", "id": 6, "attempt": 1, "version": 2}
    assert all_problems([*events, again, new]) == []


def changed(change) -> list[dict]:
    events = copy.deepcopy(whole_run())
    change(events)
    return events


def find(events, kind, **fields):
    return next(e for e in events if e["event"] == kind and all(e[name] == value for name, value in fields.items()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.remove(find(e, "admitted", id=2)), "rows were skipped"),
        (lambda e: e.remove(find(e, "rejected")), r"episodes \[1\] were admitted, have no fate"),
        (lambda e: e.remove(find(e, "admitted", id=3, attempt=1)), None),  # accepted all the same: not lost
        (lambda e: find(e, "admitted", id=3, attempt=1).update(attempt=2), "attempt 2 follows 0"),
        (lambda e: e.insert(9, find(e, "accepted", id=0)), "more than one fate"),
        (lambda e: find(e, "batched", step=1)["ids"].append(0), "episode 0 is in 2 batches"),
        (lambda e: find(e, "batched", step=1)["ids"].append(4), r"in a batch, but it was \['failed'\]"),
        (lambda e: e.remove(find(e, "consumed", step=0)), "consumed"),
        (lambda e: e.append(find(e, "consumed", step=1)), "consumed"),
        (lambda e: e.remove(find(e, "attached", step=0)) or e.remove(find(e, "attached", step=0)), "trained_again"),
        (lambda e: find(e, "trained_again").update(weights="ab"), "gave weights ab, the first time aa"),
        (lambda e: find(e, "accepted", id=2).update(max_version=2), "has tokens of version 2"),
        (lambda e: find(e, "batched", step=1).update(version=0), "holds later tokens"),
    ],
)
def test_each_violation_is_found(change, said):
    problems = " ; ".join(all_problems(changed(change)))
    if said is None:
        assert problems == ""
    else:
        assert re.search(said, problems), problems


async def test_prompts_are_read_from_real_payloads(tmp_path):
    ledger = Ledger.open(tmp_path)
    ledger.start(lambda error: None)
    rows = PromptStream([{"prompt": str(n)} for n in range(4)], seed=1, batch_size=2)
    ledger.started(rows, total_steps=2)
    ledger.attached(step=0, version=0)
    for number in range(2):
        assert ledger.admit(version=0) == number
        prompt = [10 + number, 11, 12]
        trajectory = Trajectory(
            token_ids=[*prompt, 5, 6],
            loss_mask=[0, 0, 0, 1, 1],
            rollout_logprobs=[0.0] * 5,
            output_versions=[-1, -1, -1, 0, 0],
            reward=1.0,
            finished=True,
        )
        episode = encode_episode(number, TrajectoryGroup(trajectories=[trajectory, trajectory]))
        ledger.accept(number, episode, stats={}, seconds=0.0, replicas=[], num_interruptions=0)
    await ledger.close()
    events = raw_events(tmp_path)
    assert [first_prompt(tmp_path, e["payload"]) for e in events if e["event"] == "accepted"] == [
        [10, 11, 12],
        [11, 11, 12],
    ]
    assert check_rows(events, tmp_path, str, lambda k: str([10 + k, 11, 12])) == []
    assert len(check_rows(events, tmp_path, str, lambda k: str([10, 11, 12]))) == 1


def test_each_step_must_be_in_the_metrics_once(tmp_path):
    def problems(steps):
        path = Path(tmp_path / "metrics.jsonl")
        path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
        return check_metrics(path, 3)

    assert problems([0, 1, 2, 3]) == []
    assert "missing [2]" in problems([0, 1, 3])[0]
    assert "more than once [2]" in problems([0, 1, 2, 2, 3])[0]
