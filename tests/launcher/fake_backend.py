"""A process backend without processes: a test sets exit codes and log lines."""

import signal
from pathlib import Path

from areal.launcher.backend import LogTail, ProcessBackend
from areal.launcher.job import LaunchPlan, PlannedProcess, RunNumbers
from areal.system.network import Host
from areal.system.process import ProcessContext
from tests.process_context import a_context

NUMBERS = RunNumbers(
    episodes_per_step=1,
    samples_per_step=1,
    optimizer_steps_per_train_step=1,
    max_concurrent_episodes=1,
    max_staleness=0,
    on_stale="train",
    rows=None,
    steps_per_epoch=None,
    total_steps=None,
)


def context_of(name, *, run_dir="/nowhere", world_size=1, num_servers=1, device="cpu"):
    """The context of a process by its name in a plan: `controller`, `trainer-1`, `server-0-part-1`."""
    unit, _, part = name.partition("-part-")
    role, _, index = unit.partition("-")
    return a_context(
        role=role,
        index=int(index or 0),
        part=int(part or 0),
        world_size=world_size,
        num_servers=num_servers,
        run_dir=str(run_dir),
        device=device,
    )


def planned_process(name, *, num_trainers=1, num_servers=1, run_dir="/nowhere", argv=None, gpus=(), logs="."):
    """`logs`: the folder of its log in the run folder."""
    device = "cuda:0" if gpus else "cpu"
    context = context_of(name, run_dir=run_dir, world_size=num_trainers, num_servers=num_servers, device=device)
    return PlannedProcess(
        name=name,
        role=context.role,
        index=context.index,
        part=context.part,
        host=Host(),
        argv=argv or (name,),
        env=context.to_env(),
        log_path=str(Path(run_dir, logs, f"{name}.log")),
        device=device,
        gpus=gpus,
        num_threads=1,
        memory_bytes=None,
    )


def plan_of(processes, run_dir, *, spare_gpus=(), attached=()):
    return LaunchPlan(
        run_dir=str(run_dir),
        recover=False,
        allocation="",
        processes=tuple(processes),
        spare_gpus=spare_gpus,
        attached=attached,
        numbers=NUMBERS,
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
