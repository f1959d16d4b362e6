"""Spans of concurrent work, and the tables of where the time goes."""

import asyncio
import json

import pytest

from areal.observe.spans import SessionTracer, add_track, episode_ended, span, tracing, track
from areal.observe.trace import ChromeTracer, join_traces, run_command, time_tables


def part(kind, track, name, start, end):
    return {"name": name, "cat": kind, "id": track, "pid": 1, "ph": "b", "ts": start, "args": {"us": end - start}}


def test_spans_of_tasks_belong_to_the_track_that_started_them(tmp_path):
    async def answer():
        with span("generate"):
            await asyncio.sleep(0)

    async def episode(name):
        with track("episode", name):
            await asyncio.gather(answer(), answer())

    async def run():
        await asyncio.gather(episode("1"), episode("2"))

    with tracing(ChromeTracer(tmp_path / "controller.jsonl", "controller")):
        asyncio.run(run())
    events = join_traces(tmp_path)["traceEvents"]
    result = sorted((event["id"], event["name"]) for event in events if event["ph"] == "b")
    assert result == [(item, name) for item in "12" for name in ("episode", "generate", "generate")]
    assert sum(event["ph"] == "e" for event in events) == 6


def test_the_record_of_an_episode_has_no_part_of_a_weight_update_of_its_number(tmp_path):
    with tracing(SessionTracer(tmp_path / "sessions.ndjson", flush_threshold=1)):
        add_track("episode", "3", 0, 5_000_000_000, [("generate", 0, 2_000_000_000)])
        add_track("weight update", "3", 0, 9_000_000_000, [("send", 0, 1)])
        episode_ended(3, "accepted")
    (line,) = (tmp_path / "sessions.ndjson").read_text().splitlines()
    record = json.loads(line)
    assert (record["total_s"], record["generate_s"]) == (5.0, 2.0)
    assert "send_s" not in record


def test_the_amounts_of_a_piece_of_work_are_in_its_span(tmp_path):
    with tracing(ChromeTracer(tmp_path / "server-0.jsonl", "server-0")):
        add_track("request", "7", 0, 4_000, [("run", 1_000, 4_000)], {"tokens": 5})
    events = join_traces(tmp_path)["traceEvents"]
    result = {event["name"]: event["args"] for event in events if event["ph"] == "b"}
    assert result["request"].pop("tokens") == 5
    # Microseconds since 1970 are exact to a quarter.
    assert result == {"run": {"us": pytest.approx(3.0, abs=0.5)}, "request": {"us": pytest.approx(4.0, abs=0.5)}}


def test_without_a_tracer_nothing_is_recorded():
    with tracing(None), track("episode", "1"), span("generate"):
        add_track("request", "late", 0, 5, [("run", 1, 5)])


def test_parts_that_overlap_count_once_and_the_rest_is_other():
    events = [
        {"ph": "M", "pid": 1, "args": {"name": "controller"}},
        part("episode", "1", "episode", 0, 10e6),
        part("episode", "1", "generate", 0, 4e6),
        part("episode", "1", "generate", 2e6, 6e6),
        part("episode", "1", "reward", 5e6, 7e6),
        part("episode", "2", "episode", 15e6, 20e6),
    ]
    (table,) = time_tables(events)
    assert (table.kind, table.process, table.count, table.mean_s, table.longest_s) == (
        "episode",
        "controller",
        2,
        7.5,
        10,
    )
    assert table.parts == {"generate": 3.0, "reward": 1.0, "other": 4.0}
    assert table.busy_share == 0.75


def test_a_step_lasts_until_the_next_one_begins():
    spans = [("rollout", 0, 1), ("update", 1, 3), ("rollout", 4, 5), ("update", 5, 8)]
    events = [{"ph": "X", "pid": 7, "name": name, "ts": a * 1e6, "dur": (b - a) * 1e6} for name, a, b in spans]
    (table,) = time_tables(events)
    assert (table.kind, table.count, table.mean_s) == ("step", 2, 4.0)
    assert table.parts == pytest.approx({"rollout": 1.0, "update": 2.5, "other": 0.5})
    waits = [("wait_batch", 0, 0.5), ("wait_servers", 1, 1.2)]
    events += [{"ph": "X", "pid": 7, "name": name, "ts": a * 1e6, "dur": (b - a) * 1e6} for name, a, b in waits]
    (table,) = time_tables(events)
    assert table.lines()[1] == "  waits 8.8% (batch 6.2%, servers 2.5%)"


def test_the_command_prints_the_tables_and_writes_the_joined_trace(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    lines = [part("request", "a", "request", 0, 2e6), part("request", "a", "queued", 0, 5e5)]
    (tmp_path / "trace" / "server-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "joined.json"
    assert run_command([str(tmp_path), "-o", str(out), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert (table["kind"], table["parts"]) == ("request", {"queued": 0.5, "other": 1.5})
    assert len(json.loads(out.read_text())["traceEvents"]) == 2
    assert run_command([str(tmp_path), "-o", str(out)]) == 0
    assert "queued" in capsys.readouterr().out
