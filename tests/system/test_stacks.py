import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from areal.system.stacks import describe_tasks, request_stacks

BEGIN = """
import sys
from pathlib import Path
from areal.system.stacks import register_stack_dumps
register_stack_dumps(Path(sys.argv[1]), with_tasks={with_tasks})
def ready():
    print("ready", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start a Python process that has registered; returns it and its stacks file once it printed `ready`."""
    started = []

    def begin(body, *, with_tasks):
        path = tmp_path / "stacks" / "it.txt"
        code = BEGIN.format(with_tasks=with_tasks) + body
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process, path

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_text(path, *texts, limit_s=200.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        result = path.read_text()
        if all(text in result for text in texts):
            return result
        time.sleep(0.01)
    raise AssertionError(f"{texts} did not all come to be in:\n{path.read_text()}")


IN_C = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
def adds_up_for_ever():
    ready()
    sum(range(10**15))  # in C, holding the interpreter
adds_up_for_ever()
"""


def test_a_process_inside_a_call_to_c_writes_the_stacks_of_all_threads(start):
    process, path = start(IN_C, with_tasks=False)
    for count in (1, 2):
        request_stacks(path, process.pid, "nothing has moved")
        deadline = time.monotonic() + 200.0
        while path.read_text().count("in adds_up_for_ever") < count and time.monotonic() < deadline:
            time.sleep(0.01)
    text = path.read_text()
    assert text.count(f"pid {process.pid}: nothing has moved") == 2
    assert text.count("in adds_up_for_ever") == 2
    assert text.count("threading.py") >= 2, "the other thread is there too"
    assert text.index("nothing has moved") < text.index("in adds_up_for_ever")
    assert process.poll() is None


LOOP = """
import asyncio
async def waits_for_good(never):
    await never.wait()
async def episode(never):
    await waits_for_good(never)
async def main():
    never = asyncio.Event()
    tasks = [asyncio.create_task(episode(never), name=f"episode-{n}") for n in range(9)]
    asyncio.get_running_loop().call_later(0.1, ready)
    await never.wait()
with asyncio.Runner(loop_factory=FACTORY) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("factory", ["None", "__import__('uvloop').new_event_loop"])
def test_a_loop_writes_its_tasks_though_nothing_else_wakes_it(start, factory):
    process, path = start(LOOP.replace("FACTORY", factory), with_tasks=True)
    for count in (1, 2):
        request_stacks(path, process.pid, "why")
        wait_for_text(path, *["10 tasks"] * count)
    text = wait_for_text(path, "waits_for_good")
    assert "episode-0, episode-1, episode-2, episode-3 and 5 more: <string>:" in text
    assert "in " in text
    assert process.poll() is None


BLOCKED_LOOP = """
import asyncio, time
async def blocks():
    ready()
    sum(range(10**15))
asyncio.run(blocks())
"""


def test_a_blocked_loop_writes_at_least_its_threads(start):
    process, path = start(BLOCKED_LOOP, with_tasks=True)
    request_stacks(path, process.pid, "why")
    wait_for_text(path, "in blocks", "base_events.py")
    assert process.poll() is None


READS_BY_ITSELF = """
import ctypes
room = ctypes.create_string_buffer(1)
ready()
print(ctypes.CDLL(None).read(0, room, 1), room.value.decode(), flush=True)
"""


def test_a_system_call_of_a_library_continues_after_the_signal(start):
    """A library that does not try again by itself would take the interruption for a failure."""
    process, path = start(READS_BY_ITSELF, with_tasks=False)
    for _ in range(3):
        request_stacks(path, process.pid, "why")
        time.sleep(0.1)  # it is inside the call again
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "1 x\n"
    wait_for_text(path, "most recent call first")


ASKS_A_SERVER = """
import http.client
connection = http.client.HTTPConnection("127.0.0.1", int(sys.stdin.readline()), timeout=60)
connection.request("GET", "/")
ready()
print(connection.getresponse().read().decode(), flush=True)
"""


def test_a_waiting_http_client_continues_after_the_signal(start):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = ASKS_A_SERVER.replace("int(sys.stdin.readline())", str(port))
        process, path = start(code, with_tasks=False)
        answering, _ = listening.accept()
        with answering:
            for _ in range(3):
                request_stacks(path, process.pid, "why")
                time.sleep(0.1)
            answering.recv(1000)
            answering.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        assert process.stdout.readline() == "hello\n"
    wait_for_text(path, "getresponse")


RANK = """
import datetime, os
import torch, torch.distributed as dist
rank, port = int(sys.argv[2]), int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
value = torch.ones(4)
dist.all_reduce(value)
if rank == 1:
    sys.stdin.readline()
else:
    ready()
dist.all_reduce(value)
store.set(f"rank-{rank}", "done")
store.wait(["rank-0", "rank-1"])
print(value.tolist(), flush=True)
if rank == 0:
    sys.stdin.readline()  # its store serves the other
"""


@pytest.mark.slow
def test_a_rank_in_a_collective_continues_after_the_signal(tmp_path):
    from areal.system.network import bind_socket

    with bind_socket("127.0.0.1") as bound:
        port = bound.getsockname()[1]
    code = BEGIN.format(with_tasks=False) + RANK
    paths = [tmp_path / f"{rank}.txt" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank, path in enumerate(paths)
    ]
    try:
        assert ranks[0].stdout.readline() == "ready\n"
        for _ in range(3):
            for process, path in zip(ranks, paths, strict=True):
                request_stacks(path, process.pid, "why")
            time.sleep(0.2)
        wait_for_text(paths[0], "in all_reduce")
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        assert [process.stdout.readline() for process in ranks] == ["[4.0, 4.0, 4.0, 4.0]\n"] * 2
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_stack_file_that_cannot_be_opened_is_ignored(tmp_path):
    code = BEGIN.format(with_tasks=True) + "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nready()"
    path = tmp_path / "no" / "such" / "it.txt"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "ready\n")
    assert "most recent call first" in done.stderr
    assert not path.exists()


def test_asking_a_process_that_has_just_ended_is_no_error(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    request_stacks(tmp_path / "stacks" / "it.txt", ended.pid, "why")
    assert f"pid {ended.pid}: why" in (tmp_path / "stacks" / "it.txt").read_text()


async def _own(event):
    await asyncio.wait_for(event.wait(), 200)


async def test_a_task_is_placed_in_our_own_frame_and_in_the_library_it_waits_in():
    event = asyncio.Event()
    ours = asyncio.create_task(_own(event), name="own")
    foreign = asyncio.create_task(asyncio.Queue().get(), name="foreign")
    await asyncio.sleep(0.01)
    lines = {line.split(":")[0].strip(): line for line in describe_tasks({ours, foreign}).splitlines()[1:]}
    assert "test_stacks.py" in lines["own"]
    assert lines["own"].split(" _own, in ")[1].startswith(os.path.dirname(asyncio.__file__))
    assert lines["own"].split()[-1] in ("wait_for", "wait"), "3.11 runs Event.wait in a second task, 3.12 in this one"
    assert lines["foreign"].endswith(" get")
    assert "test_stacks" not in lines["foreign"]
    event.set()
    await ours
    foreign.cancel()


def test_an_import_does_not_change_the_signal():
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
