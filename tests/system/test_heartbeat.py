import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from areal.system import heartbeat as module
from areal.system.heartbeat import (
    HEARTBEAT,
    Beat,
    Heartbeat,
    NodeBeats,
    beating_loop,
    beating_thread,
    read_beats,
    write_beats,
)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)


@pytest.fixture
def node():
    return NodeBeats()


def heartbeat_of(node, name="trainer-0"):
    return Heartbeat(node.slot(name)[HEARTBEAT])


def wait_for_beats(node, more_than: int, name="trainer-0", limit_s: float = 200.0) -> Beat:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        beat = node.read().get(name)
        if beat is not None and beat.beats > more_than:
            return beat
        time.sleep(0.002)
    raise AssertionError(f"no beat beyond {more_than} in {limit_s} s")


def test_a_heartbeat_holds_pid_work_and_duration(node, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    heartbeat = heartbeat_of(node)
    assert node.read() == {}
    heartbeat.beat()
    assert node.read() == {"trainer-0": Beat(pid=os.getpid(), beats=1, doing="starts", for_s=0.0, step=None)}
    heartbeat.doing("rollout", 4)
    now[0] = 107.0
    heartbeat.doing("rollout", 4)
    heartbeat.beat()
    assert node.read() == {"trainer-0": Beat(pid=os.getpid(), beats=2, doing="rollout", for_s=7.0, step=4)}
    heartbeat.doing("rollout", 5)
    heartbeat.beat()
    assert node.read()["trainer-0"].for_s == 0.0
    heartbeat.end()
    heartbeat.beat()
    assert node.read() == {}


def test_each_process_has_its_slot_and_a_new_start_empties_it(node):
    first, second = heartbeat_of(node, "server-0"), heartbeat_of(node, "server-1")
    first.doing("\N{SNOWMAN}" * 1000)
    for item in (first, second):
        item.beat()
    assert {name: beat.doing[:6] for name, beat in node.read().items()} == {
        "server-0": "\N{SNOWMAN}" * 6,
        "server-1": "starts",
    }
    node.slot("server-0")
    assert node.read().keys() == {"server-1"}


def test_a_record_that_is_being_written_does_not_replace_the_last_one(node):
    heartbeat = heartbeat_of(node)
    heartbeat.beat()
    os.pwrite(node.descriptor, b"x", module._HEAD_BYTES + 20)
    assert node.read() == {}
    heartbeat.beat()
    os.pwrite(node.descriptor, b"x", module._HEAD_BYTES + 20)
    assert node.read() == {}
    heartbeat.beat()
    assert node.read()["trainer-0"].beats == 3
    os.pwrite(node.descriptor, b"x", module._HEAD_BYTES + 20)
    assert node.read()["trainer-0"].beats == 3


def test_only_a_process_that_inherits_the_file_writes_into_it(node, tmp_path):
    code = "from areal.system.heartbeat import launched_heartbeat as l; h = l(); h.beat(); print(h.is_read)"
    env = os.environ | node.slot("server-0")

    def written(descriptors):
        output = subprocess.check_output([sys.executable, "-c", code], env=env, pass_fds=descriptors, text=True)
        return output.strip(), node.read().keys()

    with open(tmp_path / "another file", "w+b") as other:
        slot = env[HEARTBEAT].split(":")
        heartbeat = Heartbeat(":".join([str(other.fileno()), *slot[1:]]))
        heartbeat.beat()
        assert (heartbeat.is_read, other.read()) == (False, b"")
    assert not Heartbeat("").is_read
    assert written([]) == ("False", set())
    assert written([node.descriptor]) == ("True", {"server-0"})


def test_the_file_of_a_run_contains_all_heartbeats(tmp_path):
    path = tmp_path / "alive.json"
    assert read_beats(path) == {}
    beat = Beat(pid=1, beats=2, doing="x", for_s=0.5, step=3, resident_bytes=4, node="n", silent_s=5.0)
    write_beats(path, {"trainer-0": beat})
    assert read_beats(path) == {"trainer-0": beat}
    assert [entry.name for entry in tmp_path.iterdir()] == ["alive.json"]
    for text in ("", "{", "[1]", '{"a": 1}', '{"a": {"pid": 1}}'):
        path.write_text(text)
        assert read_beats(path) == {}


def test_doing_writes_no_heartbeat(node):
    heartbeat = heartbeat_of(node)
    for step in range(1000):
        heartbeat.doing("update", step)
    assert node.read() == {}


def test_a_thread_beats_while_the_main_thread_is_in_a_long_tensor_operation(node):
    import torch

    torch.set_num_threads(1)
    with beating_thread(heartbeat_of(node)) as heartbeat:
        before = wait_for_beats(node, 0).beats
        heartbeat.doing("update", 3)
        big = torch.rand(1500, 1500)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.3:
            big @ big
        assert wait_for_beats(node, before + 2).doing == "update"
    for thread in threading.enumerate():
        if thread.name == "heartbeat":  # it must end, and has not run yet
            thread.join(200.0)
            assert not thread.is_alive()
    assert node.read() == {}, "it ends with its block, and what follows is no hang"


async def test_a_loop_writes_heartbeats_until_it_is_blocked(node):
    sentence = ["batch 3"]
    async with beating_loop(heartbeat_of(node), lambda: sentence[0]):
        assert (await asyncio.to_thread(wait_for_beats, node, 2)).doing == "batch 3"
        sentence[0] = "the trainer"
        now = node.read()["trainer-0"].beats
        assert (await asyncio.to_thread(wait_for_beats, node, now + 2)).doing == "the trainer"
        now = node.read()["trainer-0"].beats
        time.sleep(0.3)
        silent = node.read()["trainer-0"].beats
        assert silent == now
        await asyncio.to_thread(wait_for_beats, node, silent)
    assert "heartbeat" not in [task.get_name() for task in asyncio.all_tasks()]
    assert node.read() == {}


async def test_an_error_in_the_description_does_not_end_the_heartbeats(node):
    def tell():
        raise KeyError("step")

    async with beating_loop(heartbeat_of(node), tell):
        beat = await asyncio.to_thread(wait_for_beats, node, 3)
    assert beat.doing == "no description (KeyError: 'step')"
