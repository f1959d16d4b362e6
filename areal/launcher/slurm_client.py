"""The commands of Slurm that a launcher needs: submit, look, cancel, requeue."""

import re
import subprocess
import time
from pathlib import Path

from areal.api.config import LauncherConfig
from areal.api.errors import LaunchError
from areal.launcher.placement import node_names
from areal.launcher.slurm_states import JobFacts
from areal.observe.log import get_logger

_LOG = get_logger(__name__)
_LIMIT_S = 60.0
_UNKNOWN_JOB = "Invalid job id"
_SILENT = re.compile(
    r"Unable to contact slurm controller|Could not establish a configuration source|Socket timed out|Zero Bytes were t"
)
"""What the commands of Slurm print when its controller does not answer."""


class SlurmClient:
    """Runs the commands of Slurm on this machine. Every method but `cancel` raises LaunchError with code
    `launch.slurm_silent` when they are not installed or the controller does not answer."""

    def submit(self, script: Path, environment: dict[str, str], request: str) -> str:
        """Submit a script; returns the job's id. LaunchError with code `launch.slurm_refused` when Slurm refuses it.

        `request`: what the job requests, for the error.
        """
        done = _run("sbatch", "--parsable", str(script), environment=environment)
        if done.returncode:
            raise LaunchError(f"Slurm refuses a job of {request}: {_error(done)}", code="launch.slurm_refused")
        return done.stdout.strip().partition(";")[0]

    def look(self, job: str) -> JobFacts | None:
        """The state of a job; None when Slurm does not know it any more."""
        done = _run("scontrol", "show", "job", "--oneliner", job)
        if done.returncode == 0:
            return facts_of(done.stdout)
        if _UNKNOWN_JOB not in done.stderr:
            raise LaunchError(f"Slurm does not answer: {_error(done)}", code="launch.slurm_silent")
        for source in (("-X",), ("-c",)):  # the accounting database, or the file of ended jobs
            done = _run("sacct", *source, "-n", "-P", "-j", job, "-o", "State,ExitCode")
            if done.returncode == 0 and (lines := done.stdout.split("\n")[:-1]):
                state, _, status = lines[-1].partition("|")
                code, signal = _status(status)
                return JobFacts(state=state, exit_code=code, signal=signal)
        return None

    def cancel(self, job: str) -> None:
        """Cancel a job. When that fails only a warning says so, because other things have to end too."""
        try:
            _run("scancel", job)
        except LaunchError as error:
            _LOG.warning("job %s was not cancelled: %s", job, error)

    def kill_wait_s(self) -> float | None:
        """Seconds from SIGTERM to SIGKILL at the end of a job (KillWait); None when Slurm does not say so."""
        found = re.search(r"^KillWait\s*=\s*(\d+)", _run("scontrol", "show", "config").stdout, re.MULTILINE)
        return None if found is None else float(found[1])

    def requeue(self, job: str) -> None:
        """Put a running job back into the queue, which ends its processes. LaunchError when Slurm refuses it."""
        done = _run("scontrol", "requeue", job)
        if done.returncode:
            raise LaunchError(f"job {job} cannot be requeued: {_error(done)}", code="launch.slurm_refused")

    def hostnames(self, nodes: str) -> list[str]:
        """The names in a list of nodes such as node[1-3]."""
        done = _run("scontrol", "show", "hostnames", nodes)
        if done.returncode:
            raise LaunchError(f"scontrol show hostnames {nodes}: {_error(done)}", code="launch.slurm_silent")
        return done.stdout.split()

    def excluded(self, options: LauncherConfig) -> str:
        """The nodes that a job must not use, so that Slurm chooses among those of `launcher.nodelist`.

        A job with --nodelist would use all nodes of the list, and others too. LaunchError with code
        `launch.no_node_chosen` when the list has an unknown node, or none that is not excluded.
        """
        if not options.nodelist:
            return options.exclude
        done = _run("sinfo", "--all", "--noheader", "--Node", "--format=%N")
        if done.returncode:
            raise LaunchError(f"sinfo: {_error(done)}", code="launch.slurm_silent")
        known, wanted = set(done.stdout.split()), node_names(options.nodelist)
        if unknown := wanted - known:
            message = f"launcher.nodelist={options.nodelist}: Slurm has no node {', '.join(sorted(unknown))}"
            raise LaunchError(message, code="launch.no_node_chosen")
        chosen = wanted - node_names(options.exclude)
        if not chosen:
            message = f"launcher.nodelist={options.nodelist} and launcher.exclude={options.exclude} leave no node"
            raise LaunchError(message, code="launch.no_node_chosen")
        return ",".join(sorted(known - chosen))


def facts_of(line: str) -> JobFacts:
    """The facts in a line of `scontrol show job --oneliner`."""
    found = dict(re.findall(r"(?:^| )(JobState|Reason|Restarts|ExitCode|Requeue|NodeList|PreemptTime)=(\S*)", line))
    code, signal = _status(found.get("ExitCode", ""))
    return JobFacts(
        state=found.get("JobState", ""),
        reason=found.get("Reason", ""),
        restarts=int(found.get("Restarts") or 0),
        exit_code=code,
        signal=signal,
        requeue=found.get("Requeue") == "1",
        is_preempted=found.get("PreemptTime", "None") != "None",
        nodes="" if found.get("NodeList") == "(null)" else found.get("NodeList", ""),
    )


def _status(text: str) -> tuple[int, int]:
    """`code:signal` as Slurm writes it."""
    code, _, signal = text.strip().partition(":")
    return int(code or 0), int(signal or 0)


def _run(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        message = f"the command {words[0]} is not installed here: run the Slurm launcher on a login node"
        raise LaunchError(message, code="launch.slurm_silent") from None
    except subprocess.TimeoutExpired:
        message = f"{words[0]} has not ended after {time.monotonic() - began_s:.0f} s: the controller does not answer"
        raise LaunchError(message, code="launch.slurm_silent") from None
    if done.returncode and _SILENT.search(done.stderr):
        raise LaunchError(f"Slurm does not answer: {_error(done)}", code="launch.slurm_silent")
    return done


def _error(done: subprocess.CompletedProcess[str]) -> str:
    """The errors that a command printed, without its own name, in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(lines) or f"it exited with {done.returncode}"
