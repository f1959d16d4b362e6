"""A trainer that publishes differences and servers that apply them are killed at any operation: after each update every
server has exactly the weights of the trainer.
"""

from __future__ import annotations

import contextlib
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


@dataclass(eq=False)
class Process:
    """A trainer or a server on a machine with the folder `folder`, in a process that is started again when killed."""

    role: str
    folder: Path
    kind: str = "http"
    """How weights travel."""
    num_operations: int = 1
    """Of its last command."""
    num_kills: int = 0
    running: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._start()

    def _start(self) -> None:
        env = os.environ | {"TMPDIR": str(self.folder), "AREAL_SERVER_TOKEN": "token-of-the-delta-kills"}
        argv = [sys.executable, "-m", "tests.faults.delta_process", self.role, self.kind, str(SEED)]
        self.running = subprocess.Popen(
            argv, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.running.stdout is not None
        assert self.running.stdout.readline() == "ready\n"

    def ask(self, *, kill_at: int = 0, **command: Any) -> dict[str, Any] | None:
        """The answer; None when the process has killed itself and was started again."""
        self.send(**command, kill_at=kill_at)
        return self.answer(kill_at=kill_at)

    def send(self, **command: Any) -> None:
        assert self.running.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` finds out
            self.running.stdin.write(json.dumps(command) + "\n")
            self.running.stdin.flush()

    def answer(self, *, kill_at: int) -> dict[str, Any] | None:
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        if not line:
            assert kill_at > 0
            self._restart()
            return None
        answer = json.loads(line)
        self.num_operations = answer.get("num_operations", self.num_operations)
        return answer

    def insist(self, rng: random.Random, *, is_struck: bool, **command: Any) -> dict[str, Any]:
        """The answer. If it `is_struck`, the process is killed at an operation of this command, or after the last. A
        trainer that starts again publishes the version again."""
        answer = self.ask(kill_at=rng.randint(1, self.num_operations) if is_struck else 0, **command)
        if is_struck and answer is not None:
            self.running.kill()
            self._restart()
        if answer is None or (is_struck and self.role == "trainer"):
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
def processes(tmp_path: Path, kind: str) -> Iterator[list[Process]]:
    """The trainer, then servers."""
    made = [Process("trainer", tmp_path / "trainer", kind), Process("server", tmp_path / "server-0", kind)]
    yield made
    for process in made:
        process.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["http", "disk", "http-memory", "disk-memory", "http-ranks", "disk-ranks"])
def test_after_200_updates_and_30_kills_all_checksums_are_equal(
    processes: list[Process], tmp_path: Path, kind: str
) -> None:
    """With a shared disk the trainer publishes again for a server that needs whole weights."""
    num_updates, num_kills = 200, 30
    rng, model = random.Random(SEED), Model(SEED)
    struck = {version: rng.randrange(3) for version in rng.sample(range(3, num_updates + 1), num_kills)}
    trainer, shares = processes[0], list[float]()
    joins, problems, lost = num_updates // 3, 0, list[str]()
    for version in range(1, num_updates + 1):
        model.advance(version)
        if version == joins:
            processes.append(Process("server", tmp_path / "server-1", kind))
        victim = struck[version] % len(processes) if version in struck else -1
        update = trainer.insist(rng, is_struck=victim == 0, version=version)
        if version % 17 == 0:
            for folder in tmp_path.glob(f"**/delta_v{version:06d}*"):
                if folder.parent == tmp_path / "shared" or trainer.folder in folder.parents:
                    shutil.rmtree(folder)
                    lost.append(f"delta_v{version:06d}")
        where = {"url": update["url"], "deltas": update["deltas"]}
        for index, server in enumerate(processes[1:], start=1):
            if version % 13 == index and version not in struck and version < num_updates:
                continue  # it misses this version
            result = server.insist(rng, is_struck=victim == index, **where)
            if "error" in result:
                assert (kind[:4], result["error"]) == ("disk", "weights.bad_delta")
                assert any(f"{name}-" in result["message"] for name in lost), result
                assert trainer.ask(version=version) is not None
                result = server.ask(**where) or {}
            assert result["checksum"] == model.checksum(), (version, index)
            shares.append(result["num_copied"] / FULL_BYTES)
            problems += bool(result["problem"])
            # A server that missed that version needs its difference later.
            assert not result["problem"] or any(f"{name}-" in result["problem"] for name in lost), result
    assert sum(process.num_kills for process in processes) == num_kills
    small = sum(share < 0.1 for share in shares)
    assert small > 0.6 * len(shares)
    assert problems > 0, "of lost differences"


class Broadcasts:
    """The fleet of the collective: passes updates of the trainer to the servers, and notes who has which version."""

    def __init__(self, processes: list[Process]) -> None:
        self.trainer, self.servers = processes[0], processes[1:]
        self.versions: dict[str, int] = {}
        self.codes: list[str] = []

    def name(self, server: Process) -> str:
        """Of the process: another one after it was killed."""
        return f"{server.folder.name}.{server.num_kills}"

    def lacking(self, version: int) -> list[str]:
        return [name for name in map(self.name, self.servers) if self.versions.get(name) != version]

    def publish(self, version: int, checksum: str, kills: dict[Process, int]) -> float:
        """The bytes of the last broadcasts. `kills`: operation at which a process kills itself."""
        self.trainer.send(version=version, replicas=self.lacking(version), kill_at=kills.get(self.trainer, 0))
        while answer := self.trainer.answer(kill_at=kills.get(self.trainer, 0)):
            if "update" not in answer:
                return answer["bytes"]
            update = answer["update"]
            asked = [server for server in self.servers if self.name(server) in update["replicas"]]
            for server in asked:
                rank = 1 + update["replicas"].index(self.name(server))
                server.send(update=update, rank=rank, kill_at=kills.get(server, 0))
            names = [self.name(server) for server in asked]
            result = [server.answer(kill_at=kills.get(server, 0)) for server in asked]
            for server, each in zip(asked, result, strict=True):
                if each is None:
                    kills[server] = 0
            for name, each in zip(names, result, strict=True):
                if each is not None and "error" not in each:
                    assert each["checksum"] == checksum
                    self.versions[name] = version
                elif each is not None:
                    self.codes.append(each["error"])
            failed = [item is None or "error" in item for item in result]
            self.trainer.send(lacking=self.lacking(version), all_failed=all(failed))
        kills[self.trainer] = 0
        return self.publish(version, checksum, kills) if self.lacking(version) else 0.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "num_updates", "num_kills"),
    [("collective", 200, 30), ("collective-ranks", 60, 12), ("hosted", 60, 12), ("hosted-ranks", 20, 4)],
)
def test_after_broadcast_updates_and_kills_all_checksums_are_equal(
    processes: list[Process], tmp_path: Path, kind: str, num_updates: int, num_kills: int
) -> None:
    rng, model, fleet = random.Random(SEED), Model(SEED), Broadcasts(processes)
    struck = {version: rng.randrange(3) for version in rng.sample(range(3, num_updates + 1), num_kills)}
    small = 0
    for version in range(1, num_updates + 1):
        model.advance(version)
        if version == num_updates // 3:
            fleet.servers.append(Process("server", tmp_path / "server-1", kind))
        members = [fleet.trainer, *fleet.servers]
        kills = dict.fromkeys(members, 0)
        if version in struck:
            victim = members[struck[version] % len(members)]
            kills[victim] = rng.randint(1, victim.num_operations)
        sent = fleet.publish(version, model.checksum(), kills)
        while lacking := fleet.lacking(version):
            fleet.publish(version, model.checksum(), kills)
            assert fleet.lacking(version) != lacking
        small += sent < 0.1 * FULL_BYTES
    assert sum(process.num_kills for process in (fleet.trainer, *fleet.servers)) > num_kills // 2, (
        "an operation that a command did not reach ends nothing"
    )
    assert small > num_updates // 2
    assert "weights.bad_delta" not in fleet.codes
