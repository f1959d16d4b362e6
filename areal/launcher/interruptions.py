"""Requests of the user to stop a run, and what would be lost by stopping now."""

import signal

from areal.launcher.preflight import newest_checkpoint, step_of
from areal.launcher.status import last_record
from areal.system.run_paths import RunPaths


class Interruptions:
    """Number of the user's requests to stop: Ctrl-C, SIGTERM or a closed terminal."""

    def __init__(self) -> None:
        self.count = 0
        self.may_wait = False
        """The first was Ctrl-C: a user waits, and may press it again. Other signals come with a time limit."""

    def add(self, number: int, _: object = None) -> None:
        """Signal handler. A terminal that closes may send SIGHUP several times, which is one request."""
        self.may_wait = self.may_wait or (number == signal.SIGINT and self.count == 0)
        self.count = max(self.count, 1) if number == signal.SIGHUP else self.count + 1


def unsaved_steps(paths: RunPaths) -> int:
    """Train steps of the metrics that the newest recovery checkpoint does not contain."""
    saved = newest_checkpoint(paths)
    return (last_record(paths.metrics) or {}).get("step", 0) - (step_of(saved) if saved else 0)
