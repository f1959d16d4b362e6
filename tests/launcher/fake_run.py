"""Small scripted processes below a real supervisor, everything in one folder."""

import io
import json
import signal
import sys
import time

import psutil

from areal.api.config import LauncherConfig, RecoverConfig
from areal.launcher.backend import LocalBackend
from areal.launcher.status import StatusLine, StatusSource
from areal.launcher.supervisor import Interruptions, Supervisor
from areal.system.discovery import FileRegistry
from areal.system.durable import publish_folder
from areal.system.run_paths import RunPaths
from tests.launcher.fake_backend import plan_of, planned_process

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time, zlib
context = json.loads(os.environ["AREAL_PROCESS"])
name = context["role"] + ("" if context["role"] == "controller" else "-" + str(context["index"]))
name += "-part-" + str(context["part"]) if context["part"] else ""
run = pathlib.Path(context["run_dir"])
names = run / "names"
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request for stacks, which the real ones answer
beats = 0
def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new"); new.write_text(text); new.replace(path)
def ready():
    write(names / "ready" / (name + ".json"), str(os.getpid()))
def wait_for(path):
    while not (names / path).exists(): time.sleep(0.01)
def first(mark):
    new = not (names / mark).exists(); write(names / mark, ""); return new
def beat(step=None, doing="work"):
    global beats
    beats += 1
    record = json.dumps({"pid": os.getpid(), "beats": beats, "doing": doing, "for_s": 1.0, "step": step}).encode()
    descriptor, _, offset = map(int, os.environ["AREAL_HEARTBEAT"].split(":"))
    head = zlib.crc32(record).to_bytes(4) + len(record).to_bytes(2)
    os.pwrite(descriptor, head + record, offset)
def live(seconds=600, step=None, until="never"):
    end = time.time() + seconds
    while time.time() < end and not (names / until).exists(): beat(step); time.sleep(0.05)
def pid_of(who): return int((names / "ready" / (who + ".json")).read_text())
def wait_for_the_end_of(pid):  # until the supervisor has seen it
    try:
        while True: os.kill(pid, 0); time.sleep(0.01)
    except ProcessLookupError: pass
def die(number=9): os.kill(os.getpid(), number); time.sleep(600)
def note(text):
    with open(run / "notes", "a") as file: file.write(text + chr(10))
"""
SERVE = "ready(); live()"
DONE = "ready(); wait_for('ready/server-0.json'); print('bye')"


class Run:
    """A plan of scripted processes and what they left behind."""

    def __init__(self, folder, *, recover="auto", retries=3, **settings):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.names = folder / "names"
        self.paths = RunPaths(folder)
        self.config = LauncherConfig(**({"stop_grace_s": 0.3, "ready_timeout_s": 200.0} | settings))
        self.recover = RecoverConfig(mode=recover, freq_steps=1, retries=retries)
        self.interruptions = Interruptions()
        self.backend = LocalBackend(self.paths)
        self.screen = io.StringIO()
        self.spare_gpus = ()
        self.attached = ()
        self.gpus = {}
        self.words = ()
        """More words in the command of every process, which have no effect."""
        self.clock = time.monotonic

    def __call__(self, **codes):
        """Run processes given as name=code, `server_0` meaning server-0."""
        names = [name.replace("_", "-") for name in codes]
        count = {role: sum(name.startswith(role) for name in names) for role in ("trainer", "server")}
        processes = [self.planned(name, code, count) for name, code in zip(names, codes.values(), strict=True)]
        plan = plan_of(processes, self.folder, spare_gpus=self.spare_gpus, attached=self.attached)
        registry = FileRegistry(self.names)
        source = StatusSource(registry, self.folder / "metrics.jsonl", has_controller=True, total_steps=None)
        supervisor = Supervisor(
            plan,
            self.config,
            self.recover,
            self.paths,
            self.backend,
            registry=registry,
            source=source,
            line=StatusLine(self.screen),
            interruptions=self.interruptions,
            clock=self.clock,
        )
        return supervisor.run()

    def planned(self, name, code, count):
        return planned_process(
            name,
            num_trainers=count["trainer"],
            num_servers=count["server"],
            run_dir=self.folder,
            argv=(sys.executable, "-S", "-c", PRELUDE + code, *self.words),
            gpus=self.gpus.get(name, ()),
            logs="logs",
        )

    def log(self, name):
        return (self.folder / "logs" / f"{name}.log").read_text()

    def notes(self):
        return (self.folder / "notes").read_text().splitlines()

    def pid_of(self, name):
        """Of a process that is ready, from its sign."""
        path = self.names / "ready" / f"{name}.json"
        self.until(path.exists)
        return int(path.read_text())

    def stop(self, name):
        """SIGSTOP a process that is ready and beats; returns its pid."""
        pid = self.pid_of(name)
        self.until(lambda: name in self.backend.beats())
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        return pid

    def until(self, what, seconds=120):
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.screen.getvalue()
            time.sleep(0.01)

    def write_checkpoint(self, step):
        (self.paths.recover / "next").mkdir(parents=True)
        (self.paths.recover / "next" / "state.json").write_text(json.dumps({"step": step}))
        publish_folder(self.paths.recover / "next", self.paths.recover / f"step-{step:06d}")


class BeatClock:
    """Advances when all others have sent a heartbeat, so that none of them is silent only because it got no CPU.

    Once `names/done` exists it stops: processes end then.
    """

    def __init__(self, run, *, silent, holds=lambda: False):
        self._run = run
        self._silent = silent
        self._holds = holds
        """Whether it must wait for something else, too."""
        self._seen = {}
        self._now_s = time.monotonic()

    def __call__(self):
        if not (self._run.names / "done").exists() and not self._holds():
            beats = {name: beat for name, beat in self._run.backend.beats().items() if name != self._silent}
            if beats and all(beat != self._seen.get(name) for name, beat in beats.items()):
                self._seen = beats
                self._now_s += 0.6
        return self._now_s


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
