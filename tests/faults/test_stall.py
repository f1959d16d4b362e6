"""Real runs without progress for a while: the launcher says why, all stacks are written, and the run continues."""

import re

import pytest

from tests.faults.driver import Run

pytestmark = pytest.mark.slow

START_S = 300.0
LIGHT = "allocation_mode=native:d1+fsdp:d2"


def wait_for_line(run: Run, pattern: str) -> re.Match[str]:
    """The launcher's line that matches."""
    result: list[re.Match[str]] = []

    def is_there() -> bool:
        result[:] = re.finditer(pattern, run.log_path.read_text(), re.MULTILINE)
        return bool(result)

    assert run.wait_for(is_there, START_S), run.log_path.read_text()[-3000:]
    return result[0]


def stacks_of(run: Run, name: str) -> str:
    return (run.folder / "stacks" / f"{name}.txt").read_text()


def test_missing_rewards_and_a_stopped_rank_are_named(make_run, hold):
    """Each is named with the stacks of all processes, and the run continues afterwards.

    The rank is stopped long enough to be named, too short to be killed. The others wait for it in a collective.
    """
    hold.touch()
    run = make_run(
        LIGHT, "evaluator.eval_before_train=false", "total_train_steps=12", "launcher.stall_s=11", "launcher.hang_s=600"
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
    hold.unlink()
    again = r"^areal: progress again, after \d+ s without$"
    run.train_up_to(1)
    pid = run.stop(["trainer-1"])["trainer-1"]
    stopped = rf"^areal: no progress for \d+ s: trainer-1 \(pid {pid}\) has sent no heartbeat for \d+ s; "
    wait_for_line(run, stopped)
    assert re.search(rf"{again}(?s:.*){stopped}", run.log_path.read_text(), re.MULTILINE)
    dumps = stacks_of(run, "trainer-1").count("(most recent call first)")
    run.go_on(["trainer-1"])
    wait_for_line(run, rf"{stopped}(?s:.*){again}")
    run.wait_for_the_end()
    assert run.exit_code == 0, run.log_path.read_text()[-3000:]
    assert run.pids(fresh=True) == {}
    assert stacks_of(run, "trainer-1").count(f"pid {pid}: no progress for") >= 2
    assert stacks_of(run, "trainer-1").count("(most recent call first)") > dumps, "the signal came when it continued"
