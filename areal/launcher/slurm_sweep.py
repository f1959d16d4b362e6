"""A sweep: one run for each combination of values, as an array of Slurm jobs, followed together."""

import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal.api.config.benchmark import sweep_words
from areal.api.errors import ConfigError
from areal.launcher.slurm_follow import Follower, Slurm, SubmittedJob
from areal.launcher.status import StatusLine
from areal.system.durable import write_atomic
from areal.system.run_paths import RunPaths

_POLL_S = 0.5
_LOOK_S = 3.0
_LOOK_S_PER_JOB = 0.3
"""The controller of Slurm is asked about three jobs per second at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What the command line requests."""

    words: tuple[str, ...]
    """The words that are not about the sweep."""
    overrides: tuple[tuple[str, ...], ...]
    """For each run, its options as key=value; empty = no sweep."""
    at_once: int
    """Maximum number of runs at a time; 0 = no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep, recorded in RUN/slurm/sweep.json of the run whose name the others extend."""

    run_dir: str
    job: str
    log: str


def read_sweep(words: Sequence[str]) -> Sweep:
    """Separate `--sweep KEY=VALUE,VALUE...` and `--at-once N` from the other words. ConfigError when one is wrong."""
    kept: list[str] = []
    axes: list[list[str]] = []
    at_once, rest = 0, iter(words)
    for word in rest:
        if word == "--sweep":
            axes.append(sweep_words(next(rest, "")))
        elif word == "--at-once":
            text = next(rest, "")
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"--at-once {text}: give a number of runs", code="config.bad_override")
            at_once = int(text)
        else:
            kept.append(word)
    overrides = tuple(itertools.product(*axes)) if axes else ()
    return Sweep(words=tuple(kept), overrides=overrides, at_once=at_once)


def write_sweep(paths: RunPaths, runs: Sequence[SweepRun]) -> None:
    """Record the newest sweep below this name; no runs = the newest job is no sweep."""
    write_atomic(paths.slurm / "sweep.json", json.dumps([dataclasses.asdict(run) for run in runs]).encode())


def runs_of_sweep(paths: RunPaths) -> list[SweepRun]:
    """The runs of the newest sweep below this name; empty when there is none."""
    try:
        return [SweepRun(**record) for record in json.loads((paths.slurm / "sweep.json").read_bytes())]
    except FileNotFoundError:
        return []


def follow_sweep(
    slurm: Slurm,
    runs: Sequence[SweepRun],
    line: StatusLine,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Follow all jobs until they have ended; Ctrl-C cancels them. Returns 0 when all completed, else the worst."""
    look_s = max(_LOOK_S, _LOOK_S_PER_JOB * len(runs))
    followers = [
        Follower(
            slurm,
            SubmittedJob(job=run.job, log=run.log),
            RunPaths(Path(run.run_dir)),
            line,
            clock=clock,
            sleep=sleep,
            look_s=look_s,
            is_alone=False,
        )
        for run in runs
    ]
    statuses: dict[int, int] = {}
    was_cancelled = False
    while len(statuses) < len(followers):
        try:
            for index, follower in enumerate(followers):
                if index not in statuses and (status := follower.step()) is not None:
                    statuses[index] = status
            phases = Counter(one.phase for index, one in enumerate(followers) if index not in statuses)
            counts = "".join(f", {count} {phase}" for phase, count in sorted(phases.items()))
            line.show(f"{len(statuses)} of {len(runs)} runs have ended{counts}")
            sleep(_POLL_S)
        except KeyboardInterrupt:
            if was_cancelled:
                break
            was_cancelled = True
            line.say("areal: all jobs of the sweep are being cancelled; Ctrl-C again leaves at once")
            for index, run in enumerate(runs):
                if index not in statuses:
                    slurm.cancel(run.job)
    line.end(None)
    completed = sum(status == 0 for status in statuses.values())
    line.say(f"areal: {completed} of {len(runs)} runs of the sweep completed")
    return 130 if was_cancelled else max(statuses.values())
