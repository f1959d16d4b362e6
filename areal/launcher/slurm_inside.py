"""The launcher inside a Slurm job: its nodes, and what happens at the end of its time or after the loss of a node."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal.api.config import BaseExperimentConfig
from areal.api.errors import LaunchError
from areal.launcher.backend import Cluster
from areal.launcher.local import launch, read_command_line
from areal.launcher.nodes import NodeCluster
from areal.launcher.preflight import newest_checkpoint
from areal.launcher.resume_text import has_saved, trained_steps
from areal.launcher.slurm_client import SlurmClient
from areal.launcher.slurm_job import is_requeued, node_of
from areal.launcher.slurm_jobs import JobsCluster
from areal.system.process import ERROR_PREFIX
from areal.system.run_paths import RunPaths

_MARGIN_S = 10.0
_REQUEUE_LIMIT_S = 120.0
_POLL_S = 0.2
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
            if self._closing.wait(_POLL_S):  # the run has ended by itself
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
