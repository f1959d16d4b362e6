"""Following a Slurm job, with a Slurm that reports the given states."""

import io
import json

import pytest

from areal.api.errors import LaunchError
from areal.launcher.slurm import Follower, SubmittedJob
from areal.launcher.slurm_job import JobFacts
from areal.launcher.status import StatusLine
from areal.system.run_paths import RunPaths

RUNS = JobFacts(state="RUNNING", nodes="node[1-2]")


class FakeSlurm:
    """Reports the next of `states` at each look; an error is raised; KeyboardInterrupt is a Ctrl-C at that moment."""

    def __init__(self, *states) -> None:
        self.states = list(states)
        self.cancelled: list[str] = []

    def look(self, job):
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return state

    def cancel(self, job):
        self.cancelled.append(job)


@pytest.fixture
def follow(tmp_path):
    def run(slurm, *, from_start=True, log="", seconds_per_look=5.0):
        (tmp_path / "job-7.log").write_text(log)
        stream, now = io.StringIO(), [0.0]

        def sleep(_):
            now[0] += seconds_per_look

        follower = Follower(
            slurm,
            SubmittedJob(job="7", log=str(tmp_path / "job-7.log")),
            RunPaths(tmp_path),
            StatusLine(stream),
            clock=lambda: now[0],
            sleep=sleep,
        )
        return follower.run(from_start=from_start), stream.getvalue()

    return run


def test_a_job_that_waits_runs_and_completes(follow) -> None:
    slurm = FakeSlurm(
        JobFacts(state="PENDING", reason="Priority"), RUNS, JobFacts(state="COMPLETING"), JobFacts(state="COMPLETED")
    )
    status, text = follow(slurm, log="areal: hello\nincomplete")
    assert status == 0
    assert "Priority" in text
    assert "node[1-2]" in text
    assert "areal: hello" in text
    assert "incomplete" not in text


@pytest.mark.parametrize(("facts", "status"), [
    (JobFacts(state="FAILED", exit_code=1), 1),
    (JobFacts(state="FAILED", exit_code=2), 2),
    (JobFacts(state="TIMEOUT", requeue=True), 1),
    (JobFacts(state="CANCELLED"), 130),
])  # fmt: skip
def test_exit_status_of_a_bad_end(follow, facts, status) -> None:
    assert follow(FakeSlurm(RUNS, facts))[0] == status


def test_a_failed_node_is_not_the_end_of_a_job_that_is_requeued(follow) -> None:
    lost = JobFacts(state="NODE_FAIL", requeue=True)
    again = JobFacts(state="RUNNING", restarts=1, nodes="node4")
    slurm = FakeSlurm(RUNS, lost, JobFacts(state="PENDING", restarts=1), again, JobFacts(state="COMPLETED", restarts=1))
    status, text = follow(slurm)
    assert status == 0
    assert "node4" in text


def test_a_failed_node_is_the_end_when_no_requeue_follows(follow) -> None:
    slurm = FakeSlurm(RUNS, *[JobFacts(state="NODE_FAIL", requeue=True)] * 9)
    assert follow(slurm)[0] == 1


def test_a_job_that_can_never_start_is_cancelled(follow) -> None:
    slurm = FakeSlurm(JobFacts(state="PENDING", reason="PartitionTimeLimit"))
    status, text = follow(slurm)
    assert status == 2
    assert slurm.cancelled == ["7"]
    assert "PartitionTimeLimit" in text


def test_interrupt_cancels_the_job_and_follows_it_to_its_end(follow) -> None:
    slurm = FakeSlurm(RUNS, KeyboardInterrupt(), RUNS, JobFacts(state="CANCELLED"))
    assert follow(slurm)[0] == 130
    assert slurm.cancelled == ["7"]


def test_a_second_interrupt_leaves(follow) -> None:
    slurm = FakeSlurm(RUNS, KeyboardInterrupt(), KeyboardInterrupt())
    assert follow(slurm)[0] == 130
    assert slurm.states == []


def test_a_controller_that_does_not_answer_is_asked_again(follow) -> None:
    silent = LaunchError("no answer", code="launch.slurm_silent")
    status, text = follow(FakeSlurm(RUNS, silent, JobFacts(state="COMPLETED")))
    assert status == 0
    assert "no answer" in text


def test_a_forgotten_job_ends_as_its_summary_says(follow, tmp_path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed"}))
    assert follow(FakeSlurm(None))[0] == 0
    (tmp_path / "summary.json").unlink()
    assert follow(FakeSlurm(None))[0] == 1


def test_following_again_shows_only_the_last_lines(follow) -> None:
    log = "".join(f"line {index}.\n" for index in range(50))
    _, text = follow(FakeSlurm(JobFacts(state="COMPLETED")), from_start=False, log=log)
    assert "line 49." in text
    assert "line 39." not in text
