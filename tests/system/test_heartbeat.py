import asyncio
import json
import os
import threading
import time

import pytest

from areal.system import heartbeat as module
from areal.system.heartbeat import Beat, Heartbeat, beating_loop, beating_thread, read_beat, resident_bytes


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)


def wait_for_beats(path, more_than: int, limit_s: float = 200.0) -> Beat:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        beat = read_beat(path)
        if beat is not None and beat.beats > more_than:
            return beat
        time.sleep(0.002)
    raise AssertionError(f"no beat beyond {more_than} in {limit_s} s")


def test_a_heartbeat_holds_pid_work_and_duration(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    path = tmp_path / "alive" / "trainer-0.json"
    assert read_beat(path) is None
    heartbeat = Heartbeat(path)
    heartbeat.beat()
    first = read_beat(path)
    assert first == Beat(
        pid=os.getpid(), beats=1, doing="starts", for_s=0.0, step=None, resident_bytes=first.resident_bytes
    )
    assert first.resident_bytes > 2**20
    assert resident_bytes(path.parent) == {"trainer-0": first.resident_bytes}
    heartbeat.doing("rollout", 4)
    now[0] = 107.0
    heartbeat.doing("rollout", 4)
    heartbeat.beat()
    second = Beat(pid=os.getpid(), beats=2, doing="rollout", for_s=7.0, step=4, resident_bytes=first.resident_bytes)
    assert read_beat(path) == second
    heartbeat.doing("rollout", 5)
    heartbeat.beat()
    assert read_beat(path).for_s == 0.0
    assert set(json.loads(path.read_bytes())) == {"pid", "beats", "doing", "for_s", "step", "resident_bytes", "node"}
    assert [entry.name for entry in path.parent.iterdir()] == ["trainer-0.json"]


def test_an_unreadable_heartbeat_is_none(tmp_path):
    path = tmp_path / "a.json"
    for text in ("", "{", "[1]", '{"pid": 1}', '{"pid": 1, "beats": 1, "doing": "", "for_s": 0, "step": 1, "more": 2}'):
        path.write_text(text)
        assert read_beat(path) is None


def test_doing_writes_no_heartbeat(tmp_path):
    path = tmp_path / "a.json"
    heartbeat = Heartbeat(path)
    for step in range(1000):
        heartbeat.doing("update", step)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_logged_once_and_ignored(tmp_path, caplog):
    folder = tmp_path / "alive"
    heartbeat = Heartbeat(folder / "server-0.json")
    heartbeat.beat()
    (folder / "server-0.json").unlink()
    folder.rmdir()
    with beating_thread(heartbeat):
        deadline = time.monotonic() + 200.0
        while heartbeat._beats < 5 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert sum("no heartbeat" in record.message for record in caplog.records) == 1
        folder.mkdir()  # there is room again
        assert wait_for_beats(folder / "server-0.json", 4).beats >= 5


def test_a_thread_beats_while_the_main_thread_is_in_a_long_tensor_operation(tmp_path):
    import torch

    torch.set_num_threads(1)
    path = tmp_path / "trainer-0.json"
    with beating_thread(Heartbeat(path)) as heartbeat:
        before = wait_for_beats(path, 0).beats
        heartbeat.doing("update", 3)
        big = torch.rand(1500, 1500)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.3:
            big @ big
        assert wait_for_beats(path, before + 2).doing == "update"
    for thread in threading.enumerate():
        if thread.name == "heartbeat":  # it must end, and has not run yet
            thread.join(200.0)
            assert not thread.is_alive()
    assert read_beat(path) is None, "it ends with its block, and what follows is no hang"


async def test_a_loop_writes_heartbeats_until_it_is_blocked(tmp_path):
    path = tmp_path / "controller.json"
    sentence = ["batch 3"]
    async with beating_loop(Heartbeat(path), lambda: sentence[0]):
        assert (await asyncio.to_thread(wait_for_beats, path, 2)).doing == "batch 3"
        sentence[0] = "the trainer"
        now = read_beat(path).beats
        assert (await asyncio.to_thread(wait_for_beats, path, now + 2)).doing == "the trainer"
        now = read_beat(path).beats
        time.sleep(0.3)
        silent = read_beat(path).beats
        assert silent <= now + 1, "none begins; one that was under way may end"
        await asyncio.to_thread(wait_for_beats, path, silent)
    assert "heartbeat" not in [task.get_name() for task in asyncio.all_tasks()]
    assert read_beat(path) is None


def test_a_heartbeat_written_during_the_end_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "controller.json"
    heartbeat = Heartbeat(path)
    replace = os.replace

    def ends_before_it_is_there(source, target):
        heartbeat.end()
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", ends_before_it_is_there)
    heartbeat.beat()
    assert list(tmp_path.iterdir()) == []


async def test_an_error_in_the_description_does_not_end_the_heartbeats(tmp_path):
    path = tmp_path / "controller.json"

    def tell():
        raise KeyError("step")

    async with beating_loop(Heartbeat(path), tell):
        beat = await asyncio.to_thread(wait_for_beats, path, 3)
    assert beat.doing == "no description (KeyError: 'step')"
