"""The Slurm launcher of `areal run`: runs a configuration as one job of Slurm, and follows the job."""

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.api.config import BaseExperimentConfig
from areal.api.config.experiment import read_sweep
from areal.api.config.load import save_config
from areal.api.config.redaction import is_secret
from areal.api.errors import ConfigError, LaunchError
from areal.launcher.backend import Cluster
from areal.launcher.job import parse_env_vars
from areal.launcher.local import Launch, checked_plan, launch, read_command_line
from areal.launcher.logs import FollowedLog
from areal.launcher.node_link import check_containers
from areal.launcher.nodes import NodeCluster
from areal.launcher.preflight import check_run_folder, make_run_folder, newest_checkpoint
from areal.launcher.result import help_if_asked
from areal.launcher.slurm_job import (
    JobFacts,
    JobsCluster,
    Meaning,
    Resources,
    SlurmClient,
    component_script,
    components_of,
    gpu_hours,
    greatest,
    is_requeued,
    machines_of,
    meaning_of,
    node_of,
    resources_of,
    run_script,
)
from areal.launcher.status import StatusLine, has_saved, trained_steps
from areal.system.durable import write_atomic
from areal.system.process import ERROR_PREFIX, run_main
from areal.system.run_paths import RunPaths

# ----------------------------------------------------------------------------------------------------------------------
# Follows a Slurm job: shows why it waits, the lines of its run while it runs, and why it ended.

_POLL_S = 0.5
_LOOK_S = 3.0  # Seconds between two questions to the controller of Slurm, which all users share.
_REQUEUE_S = 15.0  # Seconds after which a job that Slurm may put back into the queue has ended for certain.
_SHOWN_LINES = 10
_STATUS = re.compile(r"step \d+/|waiting \d+ s for ")


class Slurm(Protocol):
    """What a follower needs of Slurm. `SlurmClient` implements it."""

    def look(self, job: str) -> JobFacts | None: ...
    def cancel(self, job: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """The newest job of a run, recorded in RUN/slurm/job.json."""

    job: str
    log: str

    @classmethod
    def read(cls, paths: RunPaths) -> "SubmittedJob | None":
        try:
            return cls(**json.loads((paths.slurm / "job.json").read_bytes()))
        except FileNotFoundError:
            return None


class Follower:
    """Follows one job until it ends. Ctrl-C cancels the job; a closed terminal leaves it."""

    def __init__(
        self,
        slurm: Slurm,
        submitted: SubmittedJob,
        paths: RunPaths,
        line: StatusLine,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        look_s: float = _LOOK_S,
        is_alone: bool = True,
    ) -> None:
        """`is_alone`: show also the log and the status of the job."""
        self._slurm = slurm
        self._job = submitted.job
        self._log = Path(submitted.log)
        self._paths = paths
        self._line = line
        self._clock = clock
        self._sleep = sleep
        self._look_s = look_s
        self._is_alone = is_alone
        self.phase = "pending"
        self._lines = FollowedLog(self._log)
        self._allocation: int | None = None  # Restarts of the job when it was last seen running.
        self._ended_s: float | None = None
        self._due_s = float("-inf")  # When the controller is asked next.

    def run(self, *, from_start: bool) -> int:
        """Returns the exit status: 0 completed, 1 failed, 2 could not start, 130 cancelled.

        `from_start`: show the whole log, else only its last lines.
        """
        if not from_start and self._log.exists():
            kept = self._new_lines()[-_SHOWN_LINES:]
            for text in kept:
                self._line.say(text)
        was_cancelled = False
        while True:
            try:
                if (status := self.step()) is not None:
                    return status
                self._sleep(_POLL_S)
            except KeyboardInterrupt:
                if was_cancelled:
                    self._line.end(None)
                    return 130
                was_cancelled = True
                self._line.say(f"areal: job {self._job} is being cancelled; Ctrl-C again leaves at once")
                self._slurm.cancel(self._job)

    def step(self) -> int | None:
        """Show what is new. The exit status once the job has ended."""
        self._show_log()
        now_s = self._clock()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._look_s
        try:
            facts = self._slurm.look(self._job)
        except LaunchError as error:
            self._show_status(f"job {self._job}: {error}")
            return None
        if facts is None:
            return self._forgotten()
        return self._show(facts, meaning_of(facts), now_s)

    def _show(self, facts: JobFacts, meaning: Meaning, now_s: float) -> int | None:
        self.phase = meaning.phase
        if meaning.phase != "ended":
            self._ended_s = None
        if meaning.never_starts:
            self._slurm.cancel(self._job)
            self._line.end(None)
            self._line.say(f"areal: error: job {self._job} can never start and was cancelled: {meaning.cause}")
            return 2
        if meaning.phase == "pending":
            if self._allocation is not None:
                self._allocation = None
                self._line.say(f"areal: job {self._job} is in the queue again (restart {facts.restarts})")
            self._show_status(f"job {self._job} is pending{f': {meaning.cause}' if meaning.cause else ''}")
        elif meaning.phase == "running" and self._allocation != facts.restarts:
            self._allocation = facts.restarts
            again = f", restart {facts.restarts}" if facts.restarts else ""
            self._line.say(f"areal: job {self._job} runs on {facts.nodes or 'its nodes'}{again}")
        elif meaning.phase == "ended":
            self._ended_s = now_s if self._ended_s is None else self._ended_s
            if not meaning.requeues or now_s - self._ended_s >= _REQUEUE_S:
                return self._ended(facts, meaning)
        return None

    def _ended(self, facts: JobFacts, meaning: Meaning) -> int:
        self._show_log()
        self._line.end(None)
        if meaning.outcome == "completed":
            self._line.say(f"areal: job {self._job} completed: {self._paths.root}")
            return 0
        self._line.say(f"areal: error: job {self._job}: {meaning.cause} (log: {self._log})")
        if meaning.outcome == "cancelled":
            return 130
        return facts.exit_code if facts.exit_code in (2, 130) else 1

    def _forgotten(self) -> int:
        """The end of a job that Slurm does not know any more, as far as the run folder shows it."""
        self._show_log()
        self._line.end(None)
        try:
            status = json.loads(self._paths.summary.read_bytes())["status"]
        except (OSError, ValueError, KeyError):
            status = "unknown"
        self._line.say(f"areal: Slurm does not know job {self._job} any more; {self._paths.summary} says: {status}")
        return {"completed": 0, "interrupted": 130}.get(status, 1)

    def _show_status(self, text: str) -> None:
        if self._is_alone:
            self._line.show(text)

    def _show_log(self) -> None:
        if not self._is_alone:
            return
        for text in self._new_lines():
            (self._line.show if _STATUS.match(text) else self._line.say)(text)

    def _new_lines(self) -> list[str]:
        """The complete lines that the job has written since the last call, without empty ones."""
        return [text for text in self._lines.new_lines(is_last=False) if text.strip()]


# ----------------------------------------------------------------------------------------------------------------------
# The launcher inside a Slurm job: its nodes, and what happens at the end of its time or after the loss of a node.

_MARGIN_S = 10.0
_REQUEUE_LIMIT_S = 120.0
_CLOSE_POLL_S = 0.2
_LOST_NODE = re.compile(r"\[launch\.node_(lost|unreachable)\]")


class TimeLimit:
    """Saves and ends the run when SIGUSR1 announces the end of the job's time."""

    def __init__(
        self, paths: RunPaths, *, save_limit_s: float, end: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """`save_limit_s`: how long the trainers may take to save. `end` ends the run."""
        self._paths = paths
        self._save_limit_s = save_limit_s
        self._end = end
        self._say = say
        self._announced = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="time limit", daemon=True)

        self.was_announced = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGUSR1 while the block runs, also one that the script held back. Afterwards `was_announced` says
        whether it came."""
        before = signal.signal(signal.SIGUSR1, lambda *_: self._announced.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        self._thread.start()
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)
            self._closing.set()
            self._announced.set()
            self._thread.join()

    def _wait(self) -> None:
        self._announced.wait()
        if self._closing.is_set():
            return
        self.was_announced = True
        wanted, deadline_s = trained_steps(self._paths) or 1, time.monotonic() + self._save_limit_s
        self._say("areal: the time of the job ends soon: the run saves after this step, and goes back into the queue")
        self._paths.checkpoint_request.parent.mkdir(parents=True, exist_ok=True)
        self._paths.checkpoint_request.touch()
        while not has_saved(self._paths, wanted) and time.monotonic() < deadline_s:
            if self._closing.wait(_CLOSE_POLL_S):  # the run has ended by itself
                return
        saved = newest_checkpoint(self._paths)
        if not has_saved(self._paths, wanted):
            name = saved.name if saved else "the beginning"
            self._say(f"areal: no step ended within {self._save_limit_s:.0f} s: the run will continue from {name}")
        else:
            self._say(f"areal: the run is saved as {saved.name if saved else ''}")
        self._end()


def may_requeue(config: BaseExperimentConfig, *, has_progress: bool, restarts: int) -> bool:
    """Whether the run recovers in a new allocation, and this one made progress or few did not (`recover.retries`)."""
    return is_requeued(config) and (has_progress or restarts < config.recover.retries)


def run_inside(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the configuration on the nodes of this job. Returns the exit status; requeues the job where that helps."""
    slurm, job = SlurmClient(), _job_of(environ)
    restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    words = [word for word in words if word != "--overwrite" or not restarts]  # for the first allocation only
    request = read_command_line(words, launcher="slurm")
    config, paths = request.config, RunPaths.of(request.config)
    names = slurm.hostnames(environ["SLURM_JOB_NODELIST"])
    if restarts:
        _say(f"areal: job {job} starts again on {', '.join(names)} (restart {restarts})")
    cluster = _cluster(slurm, config, job, names, environ)
    limit = TimeLimit(
        paths,
        save_limit_s=max(1.0, config.launcher.slurm.signal_s - config.launcher.stop_grace_s - _MARGIN_S),
        end=lambda: os.kill(os.getpid(), signal.SIGTERM),
        say=_say,
    )
    first = newest_checkpoint(paths)
    paths.summary.unlink(missing_ok=True)  # of an earlier allocation: a launch that fails early writes none
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the nodes are closed if it comes before the start
    with limit.watched():
        try:
            code = launch(request, cluster)
        except KeyboardInterrupt:
            code = 130
    reason = "" if code == 0 else _requeue_reason(slurm, job, limit, code, paths)
    if not reason:
        return code
    if not may_requeue(config, has_progress=newest_checkpoint(paths) != first, restarts=restarts):
        _say(f"{ERROR_PREFIX}{reason}, and the run made no progress in {restarts + 1} allocations (recover.retries)")
        return 1
    _say(f"areal: {reason}: job {job} goes back into the queue")
    slurm.requeue(job)
    time.sleep(_REQUEUE_LIMIT_S)  # Slurm ends this process
    raise LaunchError(f"job {job} still runs {_REQUEUE_LIMIT_S:.0f} s after its requeue", code="launch.slurm_silent")


def _job_of(environ: Mapping[str, str]) -> str:
    """The id of this job. The last job of an array has, as SLURM_JOB_ID, the id of the array."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else environ["SLURM_JOB_ID"]


def _cluster(
    slurm: SlurmClient, config: BaseExperimentConfig, job: str, names: Sequence[str], environ: Mapping[str, str]
) -> Cluster:
    if config.launcher.slurm.separate_jobs:
        return JobsCluster(slurm, config, main_job=job, main_node=names[0], environ=environ, say=_say)
    cpus = int(environ["SLURM_CPUS_PER_TASK"])
    nodes = [node_of(name, name, config.launcher, role=None, cpus=cpus, environ=environ) for name in names]
    return NodeCluster(nodes, config.cluster)


def _requeue_reason(slurm: SlurmClient, job: str, limit: TimeLimit, code: int, paths: RunPaths) -> str:
    """Why the run should continue in a new allocation; empty when it should not."""
    if limit.was_announced:
        return "the time of the job ends"
    if code == 130 and (facts := slurm.look(job)) is not None and facts.is_preempted:
        return "a job of higher priority takes the nodes"
    return "a node of the job is lost" if code == 1 and _LOST_NODE.search(_cause(paths.summary)) else ""


def _cause(summary: Path) -> str:
    try:
        return str(json.loads(summary.read_bytes())["cause"])
    except (OSError, ValueError, KeyError):
        return ""


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# ----------------------------------------------------------------------------------------------------------------------
# A sweep: one run for each combination of values, as an array of Slurm jobs, followed together.

_LOOK_S_PER_JOB = 0.3  # The controller of Slurm is asked about three jobs per second at most.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep, recorded in RUN/slurm/sweep.json of the run whose name the others extend."""

    run_dir: str
    job: str
    log: str


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
            phases = Counter(follower.phase for index, follower in enumerate(followers) if index not in statuses)
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


USAGE = """usage: areal run --launcher slurm [SCRIPT.py] --config FILE.yaml
                 [key.sub=value ...] [--sweep KEY=A,B ... [--parallel N]]
                 [--detach]
       areal run --launcher slurm --attach RUN

Submits a configuration as one job of cluster.n_nodes nodes, from a login node,
and follows it. The options of the job are in launcher.slurm. The working
directory, cluster.fileroot and the Python environment must be at the same path
on all nodes. Ctrl-C cancels the job; a closed terminal does not.

  --detach       prints the id of the job and does not follow it
  --attach RUN   follows the job of a run folder again
  --sweep KEY=A,B
                 submits an array of jobs: one run, named TRIAL_0, TRIAL_1, ...,
                 for each combination of the values; repeatable
  --parallel N    maximum number of runs of a sweep at the same time
  --dry-run      prints the plan and the job script, and submits nothing
"""


def submit(requests: Sequence[Launch], paths: RunPaths, *, at_once: int, detach: bool) -> int:
    """Submit the job of a run, or an array of jobs for the runs of a sweep, and follow it. Returns the exit status.

    `paths`: of the run, or of the sweep.
    """
    line, slurm, first = StatusLine(), SlurmClient(), requests[0]
    runs = [RunPaths.of(request.config) for request in requests]
    is_sweep = runs != [paths]
    for request in requests:
        options = request.config.launcher.slurm
        check_containers(options, has_srun=True, has_shared_agents=not options.separate_jobs)
    plans = [checked_plan(request, machines_of(request.config), line) for request in requests]
    needs = greatest([resources_of(plan, request.config) for plan, request in zip(plans, requests, strict=True)])
    exclude = slurm.excluded(first.config.launcher)
    script = run_script(
        first.config,
        needs,
        folder=paths.slurm,
        script=first.script,
        exclude=exclude,
        runs=[run.root for run in runs] if is_sweep else (),
        at_once=at_once,
    )
    if first.dry_run:
        sys.stdout.write(_dry_run_text(first, needs, script, exclude))
        return 0
    if first.as_json:
        message = "--json prints the plan of --dry-run; the facts of a run are printed by `areal watch RUN --json`"
        raise ConfigError(message, code="config.bad_override")
    _check_grace(first.config, slurm.kill_wait_s())
    variables = dict[str, str]()
    for request, run in zip(requests, runs, strict=True):
        make_run_folder(run)
        check_run_folder(request.config, run)
        _refuse_second_job(slurm, run)
        run.slurm.mkdir(exist_ok=True)
        variables |= _secret_variables(request.config)
        file = run.slurm / "config.yaml"
        variables |= save_config(request.config, file, extra=request.extras, numbers=request.numbers)
    paths.slurm.mkdir(parents=True, exist_ok=True)
    file = paths.slurm / "job.sh"
    write_atomic(file, script.encode(), mode=0o700)
    job = slurm.submit(file, {**os.environ, **variables}, str(needs))
    jobs = [f"{job}_{index}" for index in range(len(runs))] if is_sweep else [job]
    members = [
        SweepRun(run_dir=str(run.root), job=job, log=str(paths.slurm / f"job-{job}.log"))
        for run, job in zip(runs, jobs, strict=True)
    ]
    for run, member in zip(runs, members, strict=True):
        submitted = SubmittedJob(job=member.job, log=member.log)
        write_atomic(run.slurm / "job.json", json.dumps(dataclasses.asdict(submitted)).encode())
    write_sweep(paths, members if is_sweep else [])
    line.say(f"areal: job {job} is submitted: {file}, log {', '.join(member.log for member in members)}")
    if detach:
        sys.stdout.write(f"{job}\n")
        return 0
    return _follow(slurm, paths, line, from_start=True)


def _secret_variables(config: BaseExperimentConfig) -> dict[str, str]:
    """Variables of the processes that are in no file: they reach the job through its environment."""
    options = config.launcher
    lists = [parse_env_vars(text) for text in (options.inference_server_env_vars, options.trainer_env_vars)]
    return {name: value for variables in lists for name, value in variables.items() if is_secret(name, value)}


def _dry_run_text(request: Launch, needs: Resources, script: str, exclude: str) -> str:
    """GPU hours and scripts; for --json one line after those of the plans."""
    config, folder = request.config, RunPaths.of(request.config).slurm
    others = components_of(config)[1:] if config.launcher.slurm.separate_jobs else []
    hours = gpu_hours([needs, *(component.needs for component in others)], config.launcher.slurm.time_limit)
    most = "unknown without launcher.slurm.time_limit" if hours is None else f"at most {hours:g} until the time limit"
    texts = [
        component_script(config, component, folder=folder, main_job="JOB", exclude=exclude) for component in others
    ]
    if request.as_json:
        return json.dumps({"max_gpu_hours": hours, "job_scripts": [script, *texts]}) + "\n"
    return f"GPU hours: {most}\n" + "\n".join(f"job script:\n{text}" for text in (script, *texts))


def _check_grace(config: BaseExperimentConfig, kill_wait_s: float | None) -> None:
    """ConfigError when Slurm kills the launcher before it has ended its processes."""
    grace_s = config.launcher.stop_grace_s
    if kill_wait_s is not None and grace_s >= kill_wait_s:
        reason = f"this Slurm kills a job {kill_wait_s:g} s after SIGTERM (KillWait of scontrol show config)"
        message = f"launcher.stop_grace_s={grace_s:g}, but {reason}: use a smaller value"
        raise ConfigError(message, code="launch.slurm_kill_wait")


def _refuse_second_job(slurm: SlurmClient, paths: RunPaths) -> None:
    """LaunchError while an earlier job of the run has not ended."""
    earlier = SubmittedJob.read(paths)
    facts = slurm.look(earlier.job) if earlier else None
    if earlier and facts and meaning_of(facts).phase != "ended":
        advice = f"follow it (--attach {paths.root}), cancel it (scancel {earlier.job}) or change trial_name"
        message = f"job {earlier.job} of {paths.root} has not ended ({facts.state}): {advice}"
        raise LaunchError(message, code="launch.run_in_use")


def _follow(slurm: SlurmClient, paths: RunPaths, line: StatusLine, *, from_start: bool) -> int:
    """Follow the newest job or sweep of a run folder. Returns the exit status."""
    if runs := runs_of_sweep(paths):
        return follow_sweep(slurm, runs, line)
    submitted = SubmittedJob.read(paths)
    if submitted is None:
        message = f"--attach {paths.root}: no job was submitted for this folder; give the run folder"
        raise ConfigError(message, code="launch.no_run_folder")
    return Follower(slurm, submitted, paths, line).run(from_start=from_start)


def run_command(words: Sequence[str]) -> int:
    help_if_asked(words, USAGE)
    match words:
        case ["--inside", *rest]:
            return run_inside(rest, os.environ)
        case ["--attach", folder]:
            return _follow(
                SlurmClient(), RunPaths(Path(folder).expanduser().absolute()), StatusLine(), from_start=False
            )
        case _:
            sweep = read_sweep([word for word in words if word != "--detach"])
            request = read_command_line(sweep.words, launcher="slurm")
            runs = sweep.run_words(request.config.trial_name)
            requests = [read_command_line(words_of_run, launcher="slurm") for words_of_run in runs]
            paths = RunPaths.of(request.config)
            return submit(requests or [request], paths, at_once=sweep.parallel, detach="--detach" in words)


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    run_main(main)
