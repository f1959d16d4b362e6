import asyncio
import datetime
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from areal.api.config import RewardConfig
from areal.api.registry import FunctionRef
from areal.reward.pool import RewardPool, _Worker
from areal.reward.worker import Worker
from tests.expect import raises_code

FUNCTIONS = str(Path(__file__).parent / "reward_functions.py")


def ref(name: str) -> FunctionRef:
    return FunctionRef(name=name, file=FUNCTIONS)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A dead worker may be reaped late on a busy machine."""
    monkeypatch.setattr("areal.reward.pool._EXIT_WAIT_S", 100.0)


@pytest.fixture
async def pool_of():
    made = []

    def make(workers=1, timeout_s=200.0):
        made.append(RewardPool(RewardConfig(workers=workers, timeout_s=timeout_s)))
        return made[-1]

    yield make
    for pool in made:
        await pool.aclose()


@pytest.fixture
async def pool(pool_of):
    return pool_of()


@pytest.fixture
async def quick_pool(pool_of):
    """For calls that hang: the limit is long enough for other calls on a busy machine."""
    return pool_of(timeout_s=3.0)


async def has_started(folder, *names):
    while not all((folder / f"started-{name}").exists() for name in names):
        await asyncio.sleep(0.01)


async def until_gone(pid):
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def score(pool, name, completion="yes", **row):
    (result,) = await pool.score_many(ref(name), "2+2=", [1, 2], [(completion, [3, 4, 5])], row)
    return result


async def test_numbers_of_every_kind_become_floats(pool):
    assert (await score(pool, "length")).value == 3.0
    assert (await score(pool, "truth")).value == 1.0
    result = await score(pool, "echo_row", weight=0.5, prompt="a column of the same name")
    assert (result.status, result.value, result.message) == ("ok", 6.5, "")
    assert result.seconds >= 0


async def test_a_mapping_has_a_score_and_other_numbers(pool):
    result = await score(pool, "details", details={"score": 1, "acc": True, "pred": "42", "steps": [1], "ratio": 0.5})
    assert (result.status, result.value, result.metrics) == ("ok", 1.0, {"acc": 1.0, "ratio": 0.5})
    assert (await score(pool, "length")).metrics is None
    for details, status, message in [
        ({"acc": 1.0}, "error", "returned a mapping without 'score', with acc"),
        ({}, "error", "returned a mapping without 'score', with nothing"),
        ({"score": "1"}, "error", "returned score=a str instead of a number"),
        ({"score": None, "acc": 1.0}, "error", "returned score=None instead of a number"),
        ({"score": "nan"}, "not_finite", "returned score=nan"),
        ({"score": 1.0, "acc": "inf", "last": 2.0}, "not_finite", "returned acc=inf"),
    ]:
        result = await score(pool, "details", details=details)
        assert (result.status, result.value, result.message, result.metrics) == (status, 0.0, message, None)


async def test_every_failure_has_its_status_and_the_next_call_works(pool):
    for name, row, status, parts in [
        ("raises", {}, "error", ["ValueError: cannot read 'yes'", "reward_functions.py"]),
        ("returns_nan", {}, "not_finite", []),
        ("returns_none", {}, "error", ["returned None instead of a number"]),
        ("returns_text", {}, "error", []),
        ("exits", {}, "error", []),
        ("lenght", {}, "unusable", ["'length'"]),
        ("echo_row", {"other": 1}, "error", ["echo_row needs the column 'weight', a row has only ['other']"]),
        ("is_async", {}, "unusable", ["async function"]),
    ]:
        result = await score(pool, name, **row)
        assert (result.status, result.value) == (status, 0.0), result
        assert all(part in result.message for part in parts), result
    assert (await score(pool, "length")).status == "ok"


async def test_a_hanging_call_is_killed_and_the_others_of_its_group_are_scored(quick_pool):
    pool = quick_pool
    before = await score(pool, "process_id")
    for _ in range(3):  # the pool then expects short calls and sends them together
        await pool.score_many(ref("hangs"), "", [], [("quick", [])] * 4, {})
    results = await pool.score_many(ref("hangs"), "", [], [(text, []) for text in ("a", "hang", "b", "c")], {})
    assert [r.status for r in results] == ["ok", "timeout", "ok", "ok"]
    assert "limit of 3 s" in results[1].message
    assert (await score(pool, "process_id")).value != before.value
    await until_gone(int(before.value))


async def test_rows_scored_at_the_same_time_share_messages(quick_pool, monkeypatch):
    """Each row keeps its own columns, and a call that hangs fails alone."""
    pool = quick_pool
    for _ in range(3):  # the pool then expects short calls and sends them together
        await pool.score_many(ref("scaled"), "", [], [("quick", [])] * 4, {"weight": 1})
    sizes: list[list[int]] = []
    send = _Worker.send
    monkeypatch.setattr(
        _Worker, "send", lambda worker, parts: (sizes.append([len(calls) for _, calls in parts]), send(worker, parts))
    )
    rows = [
        pool.score_many(ref("scaled"), "", [], [("a", []), ("hang", [])], {"weight": 1}),
        pool.score_many(ref("scaled"), "", [], [("bb", [])], {"weight": 10}),
        pool.score_many(ref("length"), "", [], [("of another function", [])], {}),
        pool.score_many(ref("scaled"), "", [], [("ccc", [])], {"weight": 100}),
    ]
    result = [[(r.status, r.value) for r in results] for results in await asyncio.gather(*rows)]
    assert result == [[("ok", 1.0), ("timeout", 0.0)], [("ok", 20.0)], [("ok", 19.0)], [("ok", 300.0)]]
    assert sizes == [[2, 1], [1], [1], [1]]  # the call after the one that hung is sent again


def test_a_result_that_came_while_the_event_loop_was_blocked_counts():
    async def main():
        pool = RewardPool(RewardConfig(workers=1, timeout_s=3.0))
        assert (await score(pool, "length")).status == "ok"  # the function is loaded: the limit is 3 s from here
        (worker,) = pool._workers
        scoring = asyncio.create_task(score(pool, "length"))
        while not pool._workers[worker]:
            await asyncio.sleep(0)
        sent = time.monotonic()
        select.select([worker._socket], [], [], 100)
        while time.monotonic() < sent + 3.1:
            pass
        assert (await scoring).status == "ok"
        await pool.aclose()

    asyncio.run(main())  # the loop of the other tests discounts the time for which it is blocked


async def test_a_queue_that_workers_cannot_clear_soon_is_named():
    pool = RewardPool(RewardConfig(workers=1))
    assert pool.waits_for() == ""
    pool._queue.extend([None] * 1536)
    pool._recent_s = 0.001
    assert pool.waits_for() == ""
    pool._recent_s = 3.0
    assert pool.waits_for() == "1,536 reward calls wait for 1 worker, 3.0 s each: increase reward.workers"


async def test_fail_fast_ends_the_other_calls_of_a_group(quick_pool):
    answers = [(text, []) for text in ("hang", "hang", "hang", "hang")]
    results = await quick_pool.score_many(ref("hangs"), "", [], answers, {}, fail_fast=True)
    assert [r.status for r in results] == ["timeout"]
    assert (await score(quick_pool, "length")).status == "ok"


async def test_a_call_that_kills_its_worker_is_tried_twice_and_the_others_are_scored(pool, tmp_path):
    for _ in range(3):
        await pool.score_many(ref("dies"), "", [], [("quick", [])] * 4, {})
    results = await pool.score_many(ref("dies"), "", [], [(text, []) for text in ("a", "die", "b", "c")], {})
    assert [r.status for r in results] == ["ok", "died", "ok", "ok"]
    assert results[1].message == "its process ended with exit code 3, 2 times"
    assert (await score(pool, "dies_once", marker=str(tmp_path / "marker"))).status == "ok"


async def test_prints_do_not_reach_the_channel(pool, capfd):
    for _ in range(3):
        assert (await score(pool, "prints")).status == "ok"
    assert "hello from a user" in capfd.readouterr().err


async def test_calls_run_at_once_on_all_workers(pool_of, tmp_path):
    pool = pool_of(workers=2)
    calls = [asyncio.create_task(score(pool, "waits_for_file", str(k), folder=str(tmp_path))) for k in range(5)]
    await has_started(tmp_path, 0, 1)
    assert {p.name for p in tmp_path.glob("started-*")} == {"started-0", "started-1"}
    assert pool.num_workers == 2
    (tmp_path / "go").touch()
    assert {result.status for result in await asyncio.gather(*calls)} == {"ok"}


async def test_calls_run_in_the_order_of_their_requests(pool, tmp_path):
    (tmp_path / "go").touch()
    results = await asyncio.gather(*(score(pool, "waits_for_file", "", folder=str(tmp_path)) for _ in range(8)))
    ends = [result.value for result in results]
    assert ends == sorted(ends)


async def test_slow_calls_of_a_group_run_on_several_workers(pool_of, tmp_path):
    calls, row = [("0", []), ("1", [])], {"folder": str(tmp_path)}
    task = asyncio.create_task(pool_of(workers=2).score_many(ref("waits_for_file"), "", [], calls, row))
    await has_started(tmp_path, 0, 1)
    (tmp_path / "go").touch()
    assert [r.status for r in await task] == ["ok", "ok"]


async def test_a_cancelled_call_is_not_run(pool, tmp_path):
    first, second, third = (
        asyncio.create_task(score(pool, "waits_for_file", name, folder=str(tmp_path)))
        for name in ("first", "second", "third")
    )
    await has_started(tmp_path, "first")
    second.cancel()
    (tmp_path / "go").touch()
    await asyncio.gather(first, third)
    assert not (tmp_path / "started-second").exists()


async def test_large_rows_are_sent_and_rows_that_are_not_json_are_errors(pool):
    result = await score(pool, "length", "x" * 3_000_000, text="y" * 3_000_000)
    assert result.value == 3_000_000
    with raises_code("reward.row_not_json", "'when'"):
        await score(pool, "length", when=datetime.timedelta(1))


async def test_closing_ends_the_workers_and_fails_waiting_calls(pool, tmp_path):
    pid = int((await score(pool, "process_id")).value)
    waiting = asyncio.create_task(score(pool, "waits_for_file", folder=str(tmp_path)))
    while not list(tmp_path.glob("started-*")):
        await asyncio.sleep(0.01)
    await pool.aclose()
    with raises_code("reward.pool_closed"):
        await waiting
    assert not psutil.pid_exists(pid)
    with raises_code("reward.pool_closed"):
        await score(pool, "length")


async def test_workers_ignore_ctrl_c_and_are_separate_process_groups(pool):
    pid = int((await score(pool, "process_id")).value)
    assert os.getpgid(pid) == pid
    os.kill(pid, 2)
    assert (await score(pool, "process_id")).value == pid


async def test_an_idle_worker_that_dies_is_replaced(pool):
    pid = int((await score(pool, "process_id")).value)
    os.kill(pid, 9)
    result = await score(pool, "process_id")
    assert result.status == "ok"
    assert int(result.value) != pid


HANGING_PARENT = """
import asyncio, sys
from areal.api.config import RewardConfig
from areal.api.registry import FunctionRef
from areal.reward.pool import RewardPool, _Worker

async def main():
    pool = RewardPool(RewardConfig(workers=1, timeout_s=1000))
    (found,) = await pool.score_many(FunctionRef(name="process_id", file=sys.argv[1]), "", [], [("", [])], {})
    asyncio.ensure_future(pool.score_many(FunctionRef(name="hangs", file=sys.argv[1]), "", [], [("hang", [])], {}))
    await asyncio.sleep(0.1)
    sys.stdout.write(f"{int(found.value)}\\n")
    sys.stdout.flush()
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_busy_worker_dies_with_its_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", HANGING_PARENT, FUNCTIONS], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        worker.wait(timeout=200)
    except psutil.TimeoutExpired:
        pytest.fail("the worker still runs after its parent ended")


async def test_a_module_that_hangs_at_import_is_killed(pool, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\ndef f(*a, **k): return 1.0\n")
    await score(pool, "length")  # a worker has started
    monkeypatch.setattr("areal.reward.pool._LOAD_LIMIT_S", 1.5)
    monkeypatch.setattr(pool, "_timeout_s", 0.1)
    (result,) = await pool.score_many(FunctionRef(name="f", file=str(tmp_path / "slow.py")), "", [], [("", [])], {})
    assert (result.status, result.message) == ("timeout", "took over 1.5 s to import")


async def test_workers_that_cannot_start_are_replaced_a_limited_number_of_times(pool, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = await score(pool, "length")
    assert result.status == "died"
    assert "no reward worker could be started: the last ended with exit code 1" in result.message


async def test_the_children_of_a_killed_call_are_killed(quick_pool, tmp_path):
    row = {"folder": str(tmp_path)}
    result = await score(quick_pool, "starts_a_child", **row)
    assert result.status == "timeout"
    child = int((tmp_path / "child").read_text())
    await until_gone(child)


def test_a_worker_whose_pool_was_killed_ends_without_output():
    """A traceback in the controller's log would look like the cause of the controller's end."""
    pool_end, worker_end = socket.socketpair()
    pool_end.close()
    Worker(worker_end).run()
