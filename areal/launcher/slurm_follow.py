"""Follows a Slurm job: shows why it waits, the lines of its run while it runs, and why it ended."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.api.errors import LaunchError
from areal.launcher.logs import FollowedLog
from areal.launcher.slurm_states import JobFacts, Meaning, meaning_of
from areal.launcher.status import StatusLine
from areal.system.run_paths import RunPaths

_POLL_S = 0.5
_LOOK_S = 3.0
"""Seconds between two questions to the controller of Slurm, which all users share."""
_REQUEUE_S = 15.0
"""Seconds after which a job that Slurm may put back into the queue has ended for certain."""
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
        self._allocation: int | None = None
        """Restarts of the job when it was last seen running."""
        self._ended_s: float | None = None
        self._due_s = float("-inf")
        """When the controller is asked next."""

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
