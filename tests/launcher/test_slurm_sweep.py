"""The runs of a sweep, and following all of them."""

import io

import pytest

from areal.api.config.experiment import read_sweep
from areal.launcher.slurm import SweepRun, follow_sweep, runs_of_sweep, write_sweep
from areal.launcher.slurm_job import JobFacts
from areal.launcher.status import StatusLine
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

RUNS, ENDED = JobFacts(state="RUNNING", nodes="node1"), JobFacts(state="COMPLETED")


def test_every_combination_of_the_values_is_a_run() -> None:
    words = ["--config", "c.yaml", "--sweep", "lr=1,2", "--sweep", "stop={a: 1, b: 2},[3,4]", "--parallel", "3"]
    sweep = read_sweep(words)
    assert sweep.words == ("--config", "c.yaml")
    assert sweep.parallel == 3
    assert sweep.overrides == (
        ("lr=1", "stop={a: 1, b: 2}"), ("lr=1", "stop=[3,4]"), ("lr=2", "stop={a: 1, b: 2}"), ("lr=2", "stop=[3,4]")
    )  # fmt: skip


def test_words_without_a_sweep_are_kept() -> None:
    sweep = read_sweep(["--config", "c.yaml", "seed=1"])
    assert (sweep.words, sweep.overrides, sweep.parallel) == (("--config", "c.yaml", "seed=1"), (), 0)


@pytest.mark.parametrize(
    "words",
    [["--sweep"], ["--sweep", "lr"], ["--sweep", "lr="], ["--parallel"], ["--parallel", "0"], ["--parallel", "x"]],
)
def test_bad_words_of_a_sweep_are_refused(words) -> None:
    with raises_code("config.bad_override"):
        read_sweep(words)


class FakeSlurm:
    """Reports for each job the next of its states; the last one stays. KeyboardInterrupt is a Ctrl-C at that moment."""

    def __init__(self, **states) -> None:
        self.states = {job: list(item) for job, item in states.items()}
        self.cancelled: list[str] = []

    def look(self, job):
        state = self.states[job].pop(0) if len(self.states[job]) > 1 else self.states[job][0]
        if isinstance(state, BaseException):
            raise state
        return state

    def cancel(self, job):
        self.cancelled.append(job)
        self.states[job] = [JobFacts(state="CANCELLED")]


def follow(tmp_path, **states):
    runs = [SweepRun(run_dir=str(tmp_path / job), job=job, log="") for job in states]
    slurm, now, stream = FakeSlurm(**states), [0.0], io.StringIO()

    def sleep(_):
        now[0] += 5.0

    status = follow_sweep(slurm, runs, StatusLine(stream), clock=lambda: now[0], sleep=sleep)
    return status, stream.getvalue(), slurm


def test_a_sweep_ends_when_all_its_jobs_have_ended(tmp_path) -> None:
    status, text, _ = follow(tmp_path, a=[RUNS, ENDED], b=[JobFacts(state="PENDING"), RUNS, RUNS, ENDED])
    assert status == 0
    assert "2 of 2" in text


def test_one_failed_run_is_the_status_of_the_sweep_and_the_others_go_to_their_end(tmp_path) -> None:
    status, text, _ = follow(tmp_path, a=[JobFacts(state="TIMEOUT")], b=[RUNS, RUNS, ENDED])
    assert status == 1
    assert "TIMEOUT" in text
    assert "1 of 2" in text


def test_interrupt_cancels_all_jobs_that_have_not_ended(tmp_path) -> None:
    status, _, slurm = follow(tmp_path, a=[ENDED], b=[RUNS, RUNS, KeyboardInterrupt(), RUNS], c=[RUNS])
    assert status == 130
    assert slurm.cancelled == ["b", "c"]


def test_the_newest_sweep_is_recorded(tmp_path) -> None:
    paths = RunPaths(tmp_path)
    paths.slurm.mkdir()
    assert runs_of_sweep(paths) == []
    runs = [SweepRun(run_dir="/r/t_0", job="7_0", log="/l")]
    write_sweep(paths, runs)
    assert runs_of_sweep(paths) == runs
    write_sweep(paths, [])
    assert runs_of_sweep(paths) == []
