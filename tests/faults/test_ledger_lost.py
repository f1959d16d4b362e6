"""Real runs whose newest ledger events are lost: found at once, and continued from a checkpoint the ledger knows."""

import re

import pytest

from tests.attack.ledger import cut, lose_steps, newest, num_trained
from tests.faults.driver import Run
from tests.faults.schedule import EVERYTHING

pytestmark = pytest.mark.slow

LIGHT = ("allocation_mode=native:d1+fsdp:d1", "total_train_steps=14")


def kill_controller_and(run: Run, damage) -> None:
    """Kill the controller and damage the ledger before the launcher can restart it. The trainers live."""
    run.stop(["launcher"])
    run.kill(["controller"])
    damage(run.folder / "ledger")
    run.go_on(["launcher"])


def test_running_trainers_ahead_of_the_ledger_restart_from_a_checkpoint(make_run, prove_all):
    run = make_run(*LIGHT)
    run.train_up_to(8)
    kill_controller_and(run, lambda ledger: lose_steps(ledger, num_trained(ledger) - 1))
    assert run.wait_for_the_end() == 0, run.log_path.read_text()[-3000:]
    assert "[ledger.behind_trainer]" in run.log_path.read_text()
    prove_all(run)


def test_a_checkpoint_ahead_of_the_ledger_is_found_at_start(make_run, prove_all):
    run = make_run(*LIGHT)
    run.train_up_to(8)
    run.kill(EVERYTHING)
    checkpoints = sorted(int(path.name[5:]) for path in (run.folder / "recover").glob("step-*"))
    lose_steps(run.folder / "ledger", checkpoints[-1] - 1)
    run.start()
    assert run.wait_for_the_end() == 0, run.log_path.read_text()[-3000:]
    said = (run.folder / "logs" / "trainer-0.log").read_text()
    assert f"ahead-of-ledger-step-{checkpoints[-1]:06d}" in said
    prove_all(run)


def test_a_truncated_payload_file_ends_the_run_and_names_the_step_to_continue_from(make_run):
    run = make_run(*LIGHT)
    run.train_up_to(8)
    kill_controller_and(run, lambda ledger: cut(newest(ledger, "payload-*.bin"), 100))
    assert run.wait_for_the_end() == 1
    last = run.log_path.read_text()
    assert "[ledger.bad_payload]" in last
    assert re.search(r"step [36]\b", last)
    assert run.left_behind() == []
