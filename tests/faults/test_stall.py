"""Real runs without progress for a while: the launcher says why, all stacks are written, and the run continues."""

import re

import pytest

from tests.faults.driver import Run

pytestmark = pytest.mark.slow

START_S, END_S = 300.0, 300.0
LIGHT = "allocation_mode=native:d1+fsdp:d2"
REWARD = '''"""A reward that waits for somebody to make a file."""

import pathlib
import time


def after_the_sign(prompt, completion, prompt_ids, completion_ids, **row):
    while not pathlib.Path(__file__).with_name("sign").exists():
        time.sleep(0.02)
    return completion.count("1") / 8
'''


def wait_for_line(run: Run, pattern: str) -> re.Match[str]:
    """The launcher's line that matches."""
    found: list[re.Match[str]] = []

    def is_there() -> bool:
        found[:] = re.finditer(pattern, run.log_path.read_text(), re.MULTILINE)
        return bool(found)

    assert run.wait_for(is_there, START_S), run.log_path.read_text()[-3000:]
    return found[0]


def wait_for_the_end(run: Run) -> None:
    assert run.launcher is not None
    run.launcher.wait(timeout=END_S)
    assert run.exit_code == 0, run.log_path.read_text()[-3000:]


def stacks_of(run: Run, name: str) -> str:
    return (run.folder / "stacks" / f"{name}.txt").read_text()


def test_rewards_that_do_not_come_are_told_of(make_run, tmp_path):
    (tmp_path / "late.py").write_text(REWARD)
    run = make_run(
        LIGHT,
        f"reward_fn={tmp_path}/late.py:after_the_sign",
        "reward.timeout_s=600",
        "evaluator.eval_before_train=false",
        "total_train_steps=3",
        "launcher.stall_s=3",
    )
    told = wait_for_line(
        run,
        r"^areal: no progress for \d+ s: (\d+) episodes run without a request to a server: they wait for rewards "
        r"or in workflow code; the controller has waited \d+ s for batch 0: 0 of 8 episodes accepted, (\d+) running"
        r"(?:, and no episode starts because .*)?; "
        r"each of trainer-0 and trainer-1 has waited \d+ s for batch 0\. Stacks of all processes: (.*)$",
    )
    assert told[1] == told[2] == "24", "(2 + 0 + 1) x 8"
    assert told[3] == str(run.folder / "stacks")
    assert run.wait_for(lambda: "and 20 more" in stacks_of(run, "controller"), 20.0)
    assert re.search(r"episode-0, .* and 20 more: .*areal/reward/pool\.py:\d+ ", stacks_of(run, "controller"))
    assert "in next_batch" in stacks_of(run, "trainer-0")
    for name in ("controller", "server-0", "trainer-0", "trainer-1"):
        assert f"pid {run.pids()[name]}: no progress for" in stacks_of(run, name)
        assert "(most recent call first)" in stacks_of(run, name)
    (tmp_path / "sign").touch()
    wait_for_line(run, r"^areal: progress again, after \d+ s without$")
    wait_for_the_end(run)


def test_a_rank_that_is_stopped_is_named_first_and_goes_on_unharmed(make_run):
    """Long enough for a word, too short to be killed for. The others wait for it in a collective, and are signalled."""
    run = make_run(
        LIGHT, "total_train_steps=12", "evaluator.eval_before_train=false", "launcher.stall_s=11", "launcher.hang_s=600"
    )

    def trains() -> bool:
        run.status()
        return run.highest_step >= 1

    assert run.wait_for(trains, START_S)
    pid = run.stop(["trainer-1"])["trainer-1"]
    wait_for_line(run, rf"^areal: no progress for \d+ s: trainer-1 \(pid {pid}\) has sent no heartbeat for \d+ s; ")
    run.go_on(["trainer-1"])
    wait_for_line(run, r"^areal: progress again, after \d+ s without$")
    wait_for_the_end(run)
    assert run.pids(fresh=True) == {}
    assert f"pid {pid}: no progress for 11 s" in stacks_of(run, "trainer-1")
    assert "(most recent call first)" in stacks_of(run, "trainer-1"), "the signal came when it went on"
