"""The charts of a run and the page that has them, from facts of the run."""

import base64
import hashlib
import json
import re

import pytest

from areal.cli.charts import StepTable, lanes_of, page_facts
from areal.cli.span_lanes import SpanLanes
from areal.cli.watch import GrowingRows, Watched
from areal.cli.web_page import page
from tests.cli.run_files import row


def facts_of(run):
    table, rows = StepTable(), GrowingRows(run.metrics).read()[0]
    columns = table.take(rows, replaces=True)
    watched = Watched(run.root)
    return columns, page_facts(watched.look(), table, watched.config)


def test_columns_have_the_values_of_each_step_and_none_where_there_is_none(run):
    columns, _ = facts_of(run)
    assert list(columns.steps) == [0, 1, 2, 3, 4]
    assert columns.columns["rollout/reward"] == [None, 0.1, 0.2, 0.3, 0.4]
    assert columns.columns["eval/greedy/reward"] == [0.1, None, None, 0.4, None]
    assert columns.columns["actor/entropy"] == [None, 1.0, 1.0, 1.0, None]
    assert "eval/greedy/episode/reward" not in columns.columns


def test_time_continues_where_a_row_does_not_have_it():
    rows = [{"step": 0}, {"step": 1, "seconds/elapsed": 2.5}, {"step": 2}, {"step": 3, "seconds/elapsed": 6.0}]
    table = StepTable()
    assert list(table.take(rows, replaces=True).elapsed_s) == [0.0, 2.5, 2.5, 6.0]
    assert list(table.take([{"step": 4}], replaces=False).elapsed_s) == [6.0]


def test_lanes_are_shares_of_the_time_of_a_step():
    lanes = lanes_of(row(1))
    assert lanes["lane/the trainer waits for answers"] == 0.25
    assert lanes["lane/the servers wait for the trainer"] == 1.0
    assert lanes["lane/update"] == pytest.approx(0.7)
    assert "lane/rollout" not in lanes
    assert lanes_of({"step": 0}) == {}


def traced(run, process, *spans, of="request"):
    """Add spans (name, start, end), in seconds, to the trace of a process."""
    run.trace.mkdir(exist_ok=True)
    with (run.trace / f"{process}.jsonl").open("a") as file:
        for name, start_s, end_s in spans:
            us = {"ts": (1e9 + start_s) * 1e6, "args": {"us": (end_s - start_s) * 1e6}}
            file.write(json.dumps({"ph": "b", "cat": of, "id": "1", "name": name, **us}) + "\n")


def test_spans_of_the_traces_are_lanes_of_each_process(run):
    lanes = SpanLanes(run.trace)
    assert lanes.chart() is None
    traced(run, "server-0", ("run", 0.0, 4.0), ("run", 2.0, 6.0), ("queued", 1.0, 1.03))
    traced(run, "trainer-0", ("update", 5.0, 8.0))
    chart = lanes.chart()
    assert [sery.label for sery in chart.series] == ["server-0: run", "trainer-0: update"]  # the other is too short
    assert (chart.kind, chart.unit) == ("lanes", "share of the time")
    times, *columns = chart.data
    assert (len(times), times[-1]) == (400, 8.0)
    assert [sum(column) * 8 / 400 for column in columns] == pytest.approx([6.0, 3.0])  # the union of both requests
    assert (columns[0][299], columns[0][300], columns[1][249], columns[1][250]) == (1.0, 0.0, 0.0, 1.0)
    assert lanes.chart() is chart  # nothing has grown


def test_lanes_of_many_processes_are_those_of_the_first(run):
    for number in range(40):
        traced(run, f"server-{number}", ("run", 0.0, 4.0))
        traced(run, f"trainer-{number}", ("update", 0.0, 4.0))
    traced(run, "controller", ("reward", 0.0, 4.0), of="episode")
    labels = [sery.label for sery in SpanLanes(run.trace).chart().series]
    assert len(labels) == 24
    assert labels[:4] == ["controller: reward", "server-0: run", "trainer-0: update", "server-1: run"]


def test_only_the_time_of_which_all_spans_are_known_is_shown(run):
    traced(run, "trainer-0", ("update", 0.0, 90.0))
    traced(run, "server-0", *(("run", at / 100, at / 100 + 0.005) for at in range(9000)))
    chart = SpanLanes(run.trace).chart()
    times, *columns = chart.data
    assert 5.0 < times[-1] < 40.0
    assert [column[-1] for column in columns] == pytest.approx([0.5, 1.0], abs=0.05)


def test_a_process_without_spans_in_the_newest_part_of_its_trace_has_no_lane(run):
    traced(run, "trainer-0", ("update", 0.0, 4.0))
    traced(run, "server-0", ("run", 0.0, 4.0))
    with (run.trace / "server-0.jsonl").open("a") as file:
        file.write(json.dumps({"ph": "M", "name": "process_name", "args": {"name": "s" * 2**18}}) + "\n")
    assert [series.label for series in SpanLanes(run.trace).chart().series] == ["trainer-0: update"]


def test_charts_name_their_series_units_and_the_options_that_govern_them(run):
    _, facts = facts_of(run)
    charts = {chart.title: chart for chart in facts.charts}
    rewards = charts["reward of train batches and evaluations"]
    assert [sery.label for sery in rewards.series] == ["rollout/reward", "eval/greedy/reward"]
    assert charts["entropy"].unit == "nats"
    (option,) = charts["staleness of a batch"].options
    assert (option.name, option.value) == ("rollout.max_head_offpolicyness", 1)
    assert option.meaning.startswith("Maximum staleness")
    (bars,) = [chart for chart in facts.charts if chart.kind == "bars"]
    assert bars.data == [[0.0, 1.0], [0.25, 0.75]]
    (lanes,) = [chart for chart in facts.charts if chart.kind == "lanes"]
    assert [sery.label for sery in lanes.series][-1] == "update", "phases below one percent have no lane"


def test_answers_without_a_reward_have_a_chart_and_a_text(run):
    _, facts = facts_of(run)
    assert "answers of evaluations without a reward" in [chart.title for chart in facts.charts]
    (result,) = facts.view.evaluations
    assert (result.step, result.text) == (3, "0.400, 2 of 8 without a reward")
    run.metrics.write_text(run.metrics.read_text().replace('"eval/greedy/missing": 2', '"eval/greedy/missing": 0'))
    _, facts = facts_of(run)
    assert "answers of evaluations without a reward" not in [chart.title for chart in facts.charts]


def test_the_page_allows_its_own_scripts_only_and_names_no_other_host():
    made = page("watch", title="<b>", data=json.dumps({"answer": "</script><script>"}).encode(), connects=True)
    assert "<title>&lt;b&gt;</title>" in made.html
    assert made.html.count("<script") == 4, "the data do not end their element"
    scripts = re.findall(r"<script>(.*?)</script>", made.html, re.S)
    sums = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    sources = " ".join(f"'sha256-{item}'" for item in sums)
    (allowed,) = [part for part in made.policy.split("; ") if part.startswith("script-src")]
    assert allowed == f"script-src {sources}"
    assert "default-src 'none'" in made.policy
    assert "unsafe" not in made.policy
    assert set(re.findall(r"https?://[\w./-]+", made.html)) == {"https://github.com/leeoniya/uPlot"}
    assert re.findall(r"\b(?:innerHTML|insertAdjacentHTML|document\.write)\b|\beval\(", made.html) == []
