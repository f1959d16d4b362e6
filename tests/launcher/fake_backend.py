"""A process backend without processes: a test sets exit codes and log lines."""

import signal

from areal.launcher.backend import LogTail, ProcessBackend
from areal.launcher.job import PlannedProcess
from areal.system.network import Host
from areal.system.process import ProcessContext


def planned_process(name, *, num_trainers=1, run_dir="/nowhere"):
    role, _, index = name.partition("-")
    context = ProcessContext(
        role=role,
        index=int(index or 0),
        world_size=num_trainers,
        num_servers=1,
        run_id=0,
        run_dir=str(run_dir),
        num_threads=1,
        recover=False,
        device="cpu",
    )
    return PlannedProcess(
        name=name,
        role=role,
        index=context.index,
        host=Host(),
        argv=(name,),
        env=context.to_env(),
        log_path=f"{run_dir}/{name}.log",
        device="cpu",
        gpus=(),
        num_threads=1,
        memory_bytes=None,
    )


class FakeBackend(ProcessBackend):
    """A process runs until `exit_codes` has an entry for it."""

    def __init__(self, *, ends_on=(signal.SIGTERM, signal.SIGKILL)):
        self.starts = []
        """(name, context) of every start."""
        self.exit_codes = {}
        self.lines = {}
        self.signals = []
        self.stopped = []
        self.stacks = []
        self.heartbeats = {}
        self.on_start = lambda name, count: None
        self._ends_on = ends_on

    def start(self, planned):
        self.starts.append((planned.name, ProcessContext.from_env(planned.env)))
        self.exit_codes.pop(planned.name, None)
        self.on_start(planned.name, self.count(planned.name))
        return 1000 + len(self.starts)

    def count(self, name):
        return sum(started == name for started, _ in self.starts)

    def poll(self, name):
        return self.exit_codes.get(name)

    def signal(self, name, number):
        if name not in self.exit_codes:
            self.signals.append((name, number))
            if number in self._ends_on:
                self.exit_codes[name] = -number

    def last_lines(self, name):
        return LogTail(self.lines.get(name, []), 1)

    def request_stacks(self, name, reason):
        self.stacks.append((name, reason))
        return True

    def stop(self, names, grace_s, *, hurry):
        for name in names:
            self.signal(name, signal.SIGTERM)
            self.stopped.append(name)

    def resident_bytes(self):
        return 123

    def beats(self):
        return self.heartbeats
