"""Starts hosts of fake foreign servers, and knows every process that came of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from areal.system.discovery import FileRegistry
from areal.system.heartbeat import NodeBeats
from areal.system.process import AREAL_PROCESS
from areal.system.run_paths import RunPaths
from tests.process_context import a_context

FOLDER = Path(__file__).parent
CONFIG = """
experiment_name: hosts
trial_name: run
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: ROOT}
train_dataset: {path: rows.jsonl}
reward_fn: math
actor: {path: model, optimizer: {lr: 1.0e-5}}
rollout: {weight_update_timeout_s: UPDATE}
launcher: {stop_grace_s: GRACE}
"""


def host_argv(paths, *words, update_s=300.0, grace_s=10.0):
    """The command of a host whose server misbehaves as the words say. Makes the run folder and its config."""
    paths.root.mkdir(parents=True, exist_ok=True)
    text = CONFIG.replace("ROOT", str(paths.root.parents[1])).replace("UPDATE", str(update_s))
    paths.config.write_text(text.replace("GRACE", str(grace_s)))
    server = [sys.executable, "-I", "-S", str(FOLDER / "fake_foreign_server.py"), "{port}", str(paths.root), *words]
    return [
        *[sys.executable, str(FOLDER / "host_fake_server.py"), "--backend", "vllm"],
        *["--config", str(paths.config), "--", *server],
    ]


def wait_until(what, seconds=200.0):
    """Far longer than it takes, so that only a fault ends it."""
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(paths):
    """Everything that lives and was started for this run, whoever started it."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_of_it = str(paths.root) in process.environ().get(AREAL_PROCESS, "")
            if is_of_it and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
    return result


def pid_of(paths, name):
    """Of `server` or `engine`, once it has started."""
    path = paths.root / f"{name}.pid"
    wait_until(path.exists)
    return int(path.read_text())


class Host:
    """One host without a launcher, its log where a launcher would have it."""

    def __init__(self, paths, argv, process_group=0, **context):
        self.paths = paths
        self.registry = FileRegistry(paths.names)
        inputs = a_context(role="server", index=4, num_servers=5, run_dir=str(paths.root))
        context = replace(inputs, **context)
        self._node, self._name = NodeBeats(), context.name
        self.log_path = paths.log_of(context.name)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                argv,
                env=os.environ | context.to_env() | self._node.slot(context.name),
                stdout=log,
                stderr=log,
                process_group=process_group,
                pass_fds=[self._node.descriptor],
            )

    @property
    def pid(self):
        return self.process.pid

    @property
    def log(self):
        return self.log_path.read_text()

    def wait_ready(self):
        """Its address, as registered."""

        def is_ready():
            assert self.process.poll() is None, self.log
            return self.registry.get("ready/server-4")

        wait_until(is_ready)
        return json.loads(self.registry.get("servers/4"))["address"]

    def wait_end(self):
        """Its exit code, once nothing of it is left."""
        code = self.process.wait(timeout=200)
        wait_until(lambda: not processes_of(self.paths))
        return code

    def beat(self):
        return self._node.read().get(self._name)

    def wait_beat(self, words):
        """A beat that says so."""
        return wait_until(lambda: (beat := self.beat()) and words in beat.doing and beat)

    def abandon(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def run_paths(folder):
    return RunPaths(folder / "hosts" / "run")
