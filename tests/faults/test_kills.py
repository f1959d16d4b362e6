"""Real runs on two servers and two trainer ranks whose processes are killed or hang: what lives on, what comes back."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.faults.driver import Run
from tests.faults.ledger_proof import Event, raw_events
from tests.faults.schedule import EVERYTHING, SERVERS, TRAINERS

pytestmark = pytest.mark.slow

BACK_S = 300.0


def recovers(run: Run, hold: Path, before: dict[str, int], struck: str) -> None:
    """Only the process that was hit, or both ranks, are started again; then the run continues.

    Rewards wait meanwhile: a run of few steps cannot end before its processes are back.
    """
    hold.touch()
    back = TRAINERS if struck in TRAINERS else (struck,)

    def is_back() -> bool:
        now = run.pids(fresh=True)
        return all(name in now and now[name] != before[name] and run.is_ready(name, now[name]) for name in back)

    assert run.wait_for(is_back, BACK_S), f"not back: {back}\n{run.log_path.read_text()[-3000:]}"
    after = run.pids(fresh=True)
    assert {name for name in EVERYTHING if after[name] != before[name]} == set(back)
    hold.unlink()
    run.train_up_to(run.highest_step + 3)


def is_refused_a_second_launcher(run: Run) -> None:
    """Another launcher for the same run ends with a line that names the first one, which is not disturbed."""
    before = run.pids(fresh=True)
    second = Run(arguments=run.arguments, folder=run.folder, log_path=run.log_path.with_name("second.log"))
    second.start()
    assert second.wait_for_the_end() == 2
    said = second.log_path.read_text()
    holder = json.loads((run.folder / "launcher.lock").read_text())
    assert run.launcher is not None
    assert holder["pid"] == run.launcher.pid
    assert f"is in use by the launcher with pid {holder['pid']} on host {holder['host']}" in said
    assert "Traceback" not in said
    assert run.pids(fresh=True) == before


def ran_again(events: Iterable[Event]) -> set[int]:
    return {event["id"] for event in events if event["event"] == "admitted" and event["attempt"] > 0}


def were_running(events: list[Event]) -> set[int]:
    fated = {event["id"] for event in events if event["event"] in ("accepted", "rejected", "failed")}
    return {event["id"] for event in events if event["event"] == "admitted"} - fated


def test_only_the_dead_process_is_restarted(make_run, hold, prove_all):
    """A server or the controller is restarted alone, trainer ranks are restarted together.

    Only the death of the controller makes episodes run again: those that were running.
    """
    run = make_run("total_train_steps=60")
    run.train_up_to(5)
    is_refused_a_second_launcher(run)
    at_death: list[Event] = []
    for dead in ("server-1", "controller", "trainer-0", "trainer-1"):
        before = run.pids(fresh=True)
        assert sorted(before) == sorted(EVERYTHING)
        run.kill([dead])
        if dead == "controller":
            at_death = raw_events(run.folder / "ledger")
        recovers(run, hold, before, dead)
    run.wait_for_the_end()
    prove_all(run)
    events = raw_events(run.folder / "ledger")
    assert [event["event"] for event in events].count("started") == 2, "by the first controller and by the second"
    steps = [event["step"] for event in events if event["event"] == "attached"]
    assert steps[0] == 0
    later = [step for step in steps if step > 0]  # rank 1 is recorded too where it is the first
    assert later == sorted(later)
    assert len(set(later)) == 2, "the ranks attach again after the death of a rank only"
    assert ran_again(events) == were_running(at_death)


def test_a_hung_process_is_found_and_restarted(make_run, hold, prove_all):
    run = make_run("total_train_steps=60")
    run.train_up_to(5)
    for hung in (SERVERS[0], "controller", "trainer-1"):
        before = run.pids(fresh=True)
        run.stop([hung])
        recovers(run, hold, before, hung)
    run.wait_for_the_end()
    prove_all(run)
    restarts = json.loads((run.folder / "summary.json").read_text())["restarts"]
    assert {name: ["hung" in cause for cause in causes] for name, causes in restarts.items()} == {
        SERVERS[0]: [True],
        "controller": [True],
        "trainers": [True],
    }


def test_after_a_kill_of_all_processes_the_same_command_continues(make_run, prove_all):
    run = make_run()
    for step in (4, 8):
        run.train_up_to(step)
        run.kill(EVERYTHING)
        run.start()
    run.wait_for_the_end()
    prove_all(run)
    attached: list[int] = []  # by launch; at the very first, both ranks may tell the ledger
    for event in raw_events(run.folder / "ledger"):
        if event["event"] == "started":
            attached.append(-1)
        elif event["event"] == "attached":
            attached[-1] = event["step"]
    assert len(attached) == 3
    assert attached[0] == 0
    assert attached[1] >= 3
    assert attached[2] >= 6


def test_what_ran_at_a_kill_waits_for_a_start_that_needs_it(make_run, hold, prove_all):
    """The second start needs no new step, so it starts no episode. The third starts those of the first one first."""
    run = make_run()
    run.train_up_to(5)
    hold.touch()
    ledger, words = run.folder / "ledger", run.arguments
    assert run.wait_for(lambda: (run.status() or {}).get("awaited", "").startswith("batch "), BACK_S)
    run.kill(EVERYTHING)
    hold.unlink()
    interrupted = were_running(raw_events(ledger))
    assert interrupted
    for more in (0, 4):
        num_events = len(raw_events(ledger))
        steps = sum(event["event"] == "consumed" for event in raw_events(ledger)) + more
        run.arguments = [*words, f"total_train_steps={steps}"]
        run.start()
        run.wait_for_the_end()
        prove_all(run)
        started = [event["id"] for event in raw_events(ledger)[num_events:] if event["event"] == "admitted"]
        assert set(started[: len(interrupted)]) == (interrupted if more else set())


@pytest.mark.parametrize(
    "overrides",
    [
        ("allocation_mode=native:d2+fsdp:t2",),
        ("allocation_mode=native:d2+fsdp:c2",),
        ("actor.lora={rank: 4, alpha: 16}", "actor.optimizer.lr=1e-2"),
        ("actor.lora={rank: 4, alpha: 16}", "actor.optimizer.lr=1e-2", "allocation_mode=native:d2+fsdp:t2"),
        pytest.param(("allocation_mode=native:d2+megatron:t2",), marks=pytest.mark.megatron),
        pytest.param(("allocation_mode=native:d2+megatron:p2",), marks=pytest.mark.megatron),
    ],
    ids=["t2", "c2", "lora", "lora-t2", "megatron-t2", "megatron-p2"],
)
def test_ranks_of_every_mesh_continue_after_a_kill(make_run, hold, prove_all, overrides):
    """The proof trains the recorded batches again, and gets the same weights."""
    run = make_run("total_train_steps=12", *overrides)
    run.train_up_to(5)
    before = run.pids(fresh=True)
    run.kill(["trainer-1"])
    recovers(run, hold, before, "trainer-1")
    run.wait_for_the_end()
    prove_all(run)
