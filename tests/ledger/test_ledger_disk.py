"""Disks that fail: full, read-only, broken at fsync, cut off the power. What was promised is there afterwards."""

import asyncio
import errno
import itertools
import os
import subprocess

import pytest

from areal.api.errors import ArealError, LedgerError
from areal.cli.show import show
from areal.ledger import ledger as event_log
from areal.ledger.__main__ import main
from areal.ledger.audit import audit
from areal.ledger.event_files import AppendFile, LedgerReader, events_path, payload_path, recover_folder
from areal.ledger.ledger import GroupCommitLog, GroupWriter, Ledger
from areal.ledger.state import LedgerState
from tests.expect import raises_code
from tests.rollout import rollout_kit


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Disk:
    """Real files, of which a power cut leaves what was fsynced. One operation, counted from 0, goes wrong.

    As on Linux, a failed fsync is reported once: later reads and fsyncs succeed although these bytes are
    not on the disk.
    """

    def __init__(self, fail_at, error):
        self.fail_at, self.error = fail_at, error
        self.num_operations = 0
        self.files = []

    def operate(self):
        self.num_operations += 1
        if self.num_operations == self.fail_at + 1:
            raise self.error

    def open(self, path):
        self.operate()
        self.files.append(DiskFile(self, path))
        return self.files[-1]

    def fsync(self, descriptor):
        """What os.fsync does in the process that comes next."""
        number = os.fstat(descriptor).st_ino
        for file in self.files:
            if file.path.stat().st_ino == number:
                file.settle()

    def cut_power(self):
        for file in self.files:
            os.truncate(file.path, min(file.durable, file.path.stat().st_size))


class DiskFile:
    def __init__(self, disk, path):
        self.disk, self.path, self.durable, self.lost_from = disk, path, 0, None
        path.touch(exist_ok=False)

    def settle(self):
        size = self.path.stat().st_size
        self.durable = size if self.lost_from is None else min(size, self.lost_from)

    def write(self, data):
        try:
            self.disk.operate()
        except BaseException:
            self._append(data[: len(data) // 2])
            raise
        self._append(data)

    def _append(self, data):
        with self.path.open("ab", buffering=0) as file:
            file.write(data)

    def sync(self):
        try:
            self.disk.operate()
        except OSError:
            self.lost_from = self.durable
            raise
        self.settle()

    def cut(self, size):
        os.truncate(self.path, size)
        if self.lost_from is not None and size <= self.lost_from:
            self.lost_from = None

    def close(self):
        pass


def write_until_it_fails(forge, disk):
    """How many events are promised to be durable."""
    forge.folder.mkdir()
    writer = GroupWriter(forge.folder, 1, open_file=disk.open)
    promised = 0
    unwritten = [(1, forge.payloads)]
    for begin in range(0, len(forge.events), 6):
        try:
            writer.write(forge.events[begin : begin + 6], unwritten)
        except (OSError, Killed):
            return promised
        unwritten = []
        promised = min(begin + 6, len(forge.events))
    return promised


def said(folder):
    return [event for event in list(LedgerReader(folder).events()) if event["event"] != "group"]


@pytest.mark.parametrize("power", ["stays", "is cut at once", "is cut once the next controller has written"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
        Killed(),
    ],
    ids=["disk full", "fsync fails", "read-only", "killed"],
)
def test_a_failed_file_operation_loses_no_durable_event(forge, tmp_path, monkeypatch, error, power):
    for fail_at in itertools.count():
        forge = type(forge)(tmp_path / str(fail_at))
        forge.two_steps()
        events = [
            event | {"payload": list(event["payload"])} if "payload" in event else event for event in forge.events
        ]
        disk = Disk(fail_at, error)
        promised = write_until_it_fails(forge, disk)
        monkeypatch.setattr(os, "fsync", disk.fsync)
        if power == "is cut at once":
            disk.cut_power()
        result = recover_folder(forge.folder)
        writer = GroupWriter(forge.folder, result.next_number, after=result.end)
        writer.write([forge.events[0]], [])
        writer.close()
        if power == "is cut once the next controller has written":
            disk.cut_power()
        kept = said(forge.folder)
        assert kept.pop() == forge.events[0]
        assert promised <= len(kept) <= promised + (6 if isinstance(error, Killed) else 0)
        assert kept == events[: len(kept)]
        assert recover_folder(forge.folder).state == LedgerState.replay([*kept, forge.events[0]])
        report = audit(forge.folder)
        assert report.is_clean, (fail_at, report.lines())
        if disk.num_operations <= fail_at:
            break
    assert fail_at > 10


class FailingSync(AppendFile):
    """Its first `good` fsyncs succeed, the next one fails, and all later ones would succeed again."""

    good = 1

    def __init__(self, path):
        super().__init__(path)
        self.calls = itertools.count()

    def sync(self):
        if next(self.calls) == self.good:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()


async def test_after_a_failed_fsync_nothing_more_is_reported_durable(tmp_path):
    log = GroupCommitLog(GroupWriter(tmp_path, 1, open_file=FailingSync), first_segment=1)
    ledger, heard = Ledger(log, read_payload=lambda where: b""), []
    ledger.start(heard.append)
    ledger.attached(step=0, version=0)
    await ledger.durable()
    ledger.admit(version=0)
    waiting = [asyncio.ensure_future(ledger.durable()) for _ in range(3)]
    for waiter in waiting:
        with raises_code("ledger.not_writable", "Input/output error"):
            await asyncio.wait_for(waiter, 200)
    for _ in range(2):
        with pytest.raises(LedgerError, match="Input/output error"):
            await ledger.durable()
        with pytest.raises(LedgerError, match="Input/output error"):
            ledger.admit(version=0)
    with pytest.raises(LedgerError, match="Input/output error"):
        await ledger.close()
    assert len(heard) == 1
    assert "\n" not in str(heard[0])
    assert [event["event"] for event in said(tmp_path)] == ["attached"], "the lines that are not on disk are taken back"


async def test_a_write_error_fails_all_waiting_callers(tmp_path):
    ledger = Ledger.open(tmp_path)
    ledger.start(lambda failure: None)
    ledger.published(version=2**70, kind="disk", path="v")
    with raises_code("ledger.not_writable"):
        await asyncio.wait_for(ledger.durable(), 200)
    with pytest.raises(LedgerError):
        await ledger.close()


async def test_a_folder_that_may_not_be_written_has_one_error_code(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    log = GroupCommitLog(GroupWriter(tmp_path, 1, open_file=refuse), first_segment=1)
    ledger = Ledger(log, read_payload=lambda where: b"")
    ledger.start(lambda failure: None)
    ledger.attached(step=0, version=0)
    with raises_code("ledger.not_writable", "Read-only file system"):
        await ledger.durable()
    with pytest.raises(LedgerError):
        await ledger.close()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LedgerError, match=str(file)) as error:
        Ledger.open(file / "ledger")
    assert error.value.code == "ledger.not_writable"


async def test_a_clock_jump_changes_only_times(tmp_path, monkeypatch, capsys):
    """Forwards by a century and back again, between any two looks at it."""
    jumps = (4e9 * (number % 2) - number for number in itertools.count())
    times_of_groups = (4e9 * (number % 2) - number for number in itertools.count())
    monkeypatch.setattr(event_log.time, "time", lambda: next(times_of_groups))
    ledger = Ledger.open(tmp_path / "ledger")
    ledger._clock = lambda: next(jumps)
    controller = rollout_kit.make_controller(ledger, total_steps=10)
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(3))
    await controller.committed(3, "recover/step3")
    await controller.close()
    assert recover_folder(tmp_path / "ledger").state == ledger.state
    report = audit(tmp_path / "ledger")
    assert report.is_clean, report.lines()
    for command in (["audit"], ["stats"], ["stats", "--json"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 0
    for words in (["--episode", "0"], ["--episode", "0", "--tokens"], ["--step", "1"]):
        assert show([str(tmp_path), *words]) == 0
    out = capsys.readouterr().out
    assert "(the clock went back" in out
    assert "the clock jumped" in out


def mount(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", folder):
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def run_until_it_stops(folder, num_steps):
    """Train until the ledger cannot be written; the cause, or None."""
    ledger = Ledger.open(folder)
    done = ledger.state.trained_steps or 0
    controller = rollout_kit.make_controller(
        ledger,
        total_steps=num_steps,
        fleet=rollout_kit.FakeFleet(version=done),
        workflow=rollout_kit.ScriptedWorkflow(lambda index: rollout_kit.Script(num_tokens=200, token_s=0.0)),
    )
    try:
        await controller.start()
        await controller.attach(rank=0, world_size=1, dp_size=1, step=done, version=done)
        await rollout_kit.train(controller, range(done, num_steps))
        await controller.close()
    except ArealError as error:
        with pytest.raises(LedgerError):
            await controller.close()
        return str(error)
    return None


@pytest.mark.slow
async def test_a_real_disk_that_is_full_and_then_read_only(small_disk):
    folder = small_disk / "ledger"
    cause = await run_until_it_stops(folder, 60)
    assert "No space left on device" in cause
    assert "\n" not in cause
    before = recover_folder(folder).state
    assert audit(folder).is_clean
    assert before.consumed_steps

    assert mount("-o", "remount,ro", small_disk)
    with pytest.raises(LedgerError, match="Read-only file system"):
        Ledger.open(folder)
    assert audit(folder).is_clean

    assert mount("-o", "remount,rw,size=16m", small_disk)
    assert await run_until_it_stops(folder, 60) is None
    report = audit(folder)
    assert report.is_clean, report.lines()
    assert report.counts["consumed"] == 240
    state = recover_folder(folder).state
    assert before.batches.items() <= state.batches.items()
    assert events_path(folder, 1).stat().st_size
    assert payload_path(folder, 1).stat().st_size
