"""A trainer that publishes differences and servers that apply them are killed at any operation: after each update every
server has exactly the weights of the trainer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.delta_process import Model
from tests.faults.driver import ROOT

SEED = 5
FULL_BYTES = 2 * (300 * 400 + 50_001)


@dataclass
class Process:
    """A trainer or a server on a machine with the folder `folder`, in a process that is started again when killed."""

    kind: str
    folder: Path
    num_operations: int = 1
    """Of its last command."""
    num_kills: int = 0
    running: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._start()

    def _start(self) -> None:
        env = os.environ | {"TMPDIR": str(self.folder), "AREAL_SERVER_TOKEN": "token-of-the-delta-kills"}
        argv = [sys.executable, "-m", "tests.faults.delta_process", self.kind, str(SEED)]
        self.running = subprocess.Popen(
            argv, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *, kill_at: int = 0, **command: Any) -> dict[str, Any] | None:
        """The answer; None when the process has killed itself and was started again."""
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write(json.dumps({**command, "kill_at": kill_at}) + "\n")
        self.running.stdin.flush()
        line = self.running.stdout.readline()
        if not line:
            assert kill_at > 0
            self._restart()
            return None
        answer = json.loads(line)
        self.num_operations = answer["num_operations"]
        return answer

    def insist(self, rng: random.Random, *, is_struck: bool, **command: Any) -> dict[str, Any]:
        """The answer. If it `is_struck`, the process is killed at an operation of this command, or after the last. A
        trainer that starts again publishes the version again."""
        answer = self.ask(kill_at=rng.randint(1, self.num_operations) if is_struck else 0, **command)
        if is_struck and answer is not None:
            self.running.kill()
            self._restart()
        if answer is None or (is_struck and self.kind == "trainer"):
            answer = self.ask(**command)
        assert answer is not None
        return answer

    def _restart(self) -> None:
        assert self.running.wait() == -signal.SIGKILL
        self.num_kills += 1
        self._start()

    def end(self) -> None:
        self.running.kill()
        self.running.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    """The trainer, then servers."""
    made = [Process("trainer", tmp_path / "trainer"), Process("server", tmp_path / "server-0")]
    yield made
    for process in made:
        process.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_200_updates_and_30_kills_all_checksums_are_equal(processes: list[Process], tmp_path: Path) -> None:
    num_updates, num_kills = 200, 30
    rng, model = random.Random(SEED), Model(SEED)
    struck = {version: rng.randrange(3) for version in rng.sample(range(3, num_updates + 1), num_kills)}
    trainer, shares = processes[0], list[float]()
    joins, problems, lost = num_updates // 3, 0, list[str]()
    for version in range(1, num_updates + 1):
        model.advance(version)
        if version == joins:
            processes.append(Process("server", tmp_path / "server-1"))
        victim = struck[version] % len(processes) if version in struck else -1
        update = trainer.insist(rng, is_struck=victim == 0, version=version)
        if version % 17 == 0:
            for folder in trainer.folder.glob(f"areal-*/*/delta_v{version:06d}"):
                shutil.rmtree(folder)
                lost.append(folder.name)
        where = {"url": update["url"], "deltas": update["deltas"]}
        for index, server in enumerate(processes[1:], start=1):
            if version % 13 == index and version not in struck and version < num_updates:
                continue  # it misses this version
            found = server.insist(rng, is_struck=victim == index, **where)
            assert found["checksum"] == model.checksum(), (version, index)
            shares.append(found["num_copied"] / FULL_BYTES)
            problems += bool(found["problem"])
            # A server that missed that version needs its difference later.
            assert not found["problem"] or any(f"not serve {name}-" in found["problem"] for name in lost), found
    assert sum(process.num_kills for process in processes) == num_kills
    small = sum(share < 0.1 for share in shares)
    assert small > 0.6 * len(shares)
    assert problems > 0, "of lost differences"
