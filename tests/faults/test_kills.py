"""Real runs on two servers and two trainer ranks whose processes are killed: what lives on, what comes back."""

import json

import pytest

from tests.faults.driver import Run
from tests.faults.ledger_proof import raw_events
from tests.faults.schedule import EVERYTHING, SERVERS, TRAINERS

pytestmark = pytest.mark.slow

BACK_S = 300.0


def wait_until_back(run: Run, before: dict[str, int], dead: tuple[str, ...]) -> dict[str, int]:
    """Until the dead have successors that are ready; returns all pids."""

    def is_back() -> bool:
        now = run.pids(fresh=True)
        return all(name in now and now[name] != before[name] and run.is_ready(name, now[name]) for name in dead)

    assert run.wait_for(is_back, BACK_S), f"not back: {dead}\n{run.log_path.read_text()[-3000:]}"
    return run.pids(fresh=True)


@pytest.mark.parametrize("dead", [("server-1",), ("controller",), ("trainer-0",), ("trainer-1",)])
def test_what_died_is_started_again_and_nothing_else(make_run, prove_all, dead):
    """A server or the controller dies alone; trainer ranks come back together, nobody else with them."""
    run = make_run("total_train_steps=80")
    run.train_up_to(5)
    before = run.pids(fresh=True)
    assert sorted(before) == sorted(EVERYTHING)
    run.kill(dead)
    back = TRAINERS if dead[0].startswith("trainer") else dead
    after = wait_until_back(run, before, back)
    assert {name for name in EVERYTHING if after[name] != before[name]} == set(back)
    run.wait_for_the_end()
    prove_all(run)
    events = raw_events(run.folder / "ledger")
    assert sum(event["event"] == "started" for event in events) == (2 if dead == ("controller",) else 1)
    assert any(event["event"] == "attached" and event["step"] > 0 for event in events) == (back == TRAINERS)


def test_after_a_kill_of_everything_the_same_command_goes_on(make_run, prove_all):
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


def test_controllers_death_makes_running_episodes_run_again_and_no_other(make_run, prove_all):
    run = make_run()
    run.train_up_to(6)
    run.kill(["controller"])
    at_death = raw_events(run.folder / "ledger")
    run.wait_for_the_end()
    prove_all(run)
    events = raw_events(run.folder / "ledger")
    fated = {event["id"] for event in at_death if event["event"] in ("accepted", "rejected", "failed")}
    again = {event["id"] for event in events if event["event"] == "admitted" and event["attempt"] > 0}
    was_running = {event["id"] for event in at_death if event["event"] == "admitted"} - fated
    assert again == was_running


def test_a_second_launcher_is_refused_and_disturbs_nothing(make_run, prove_all):
    run = make_run()
    run.train_up_to(2)
    second = Run(arguments=run.arguments, folder=run.folder, log_path=run.log_path.with_name("second.log"))
    second.start()
    assert second.wait_for_the_end() == 2
    said = second.log_path.read_text()
    holder = json.loads((run.folder / "launcher.lock").read_text())
    assert run.launcher is not None
    assert holder["pid"] == run.launcher.pid
    assert f"is in use by the launcher with pid {holder['pid']} on host {holder['host']}" in said
    assert "Traceback" not in said
    run.wait_for_the_end()
    prove_all(run)


@pytest.mark.parametrize("hung", [SERVERS[0], "controller", "trainer-1"])
def test_what_hangs_is_found_and_started_again(make_run, prove_all, hung):
    run = make_run("total_train_steps=120")
    run.train_up_to(5)
    before = run.pids(fresh=True)
    run.stop([hung])
    wait_until_back(run, before, TRAINERS if hung.startswith("trainer") else (hung,))
    run.wait_for_the_end()
    prove_all(run)
    assert "hung" in run.log_path.read_text()
