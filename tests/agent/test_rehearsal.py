"""Rehearsals of agents: what each loses, with the line of its code."""

import json
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from areal.agent.agent_run import AgentJob, AgentOutcome
from areal.agent.processes import AgentPool
from areal.agent.rehearsal import SCENARIOS, Scenario, Script, chosen, problems_of
from areal.api.registry import FunctionRef
from areal.cli.main import run_command
from areal.cli.rehearse import Target, play
from tests.expect import raises_code

AGENTS = Path(__file__).parent / "rehearsed_agents.py"
CALCULATOR = str(Path(__file__).parents[2] / "examples" / "agents" / "calculator.yaml")


module_loop = pytest.mark.asyncio(loop_scope="module")
ROW = {"question": "6*7", "answer": "42"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    made = AgentPool(num_workers=1, sessions_per_worker=1)
    yield made
    await made.aclose()


async def rehearsed(pool, name, *scenarios, timeout_s=60.0, way="agent"):
    """The facts of scenarios by their names."""
    ref = FunctionRef(name=name, file=str(AGENTS))
    job = AgentJob(row=ROW, base_url="", key="", watch=True, **{way: ref})
    report = await play(pool, Target(job=job, script=Script(answer="42")), chosen(scenarios), timeout_s=timeout_s)
    return {one["scenario"]: one for one in report["scenarios"]}


@pytest.fixture
def command(tmp_path, capsys):
    """Runs `areal rehearse`: its exit status and its report."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(ROW) + "\n")

    def run(*words):
        status = run_command(["rehearse", *words, "--data", str(data), "--json"])
        return status, json.loads(capsys.readouterr().out)["scenarios"]

    return run


def line_with(text: str) -> str:
    """FILE:LINE of the code that contains `text`."""
    lines = AGENTS.read_text().splitlines()
    return f"{AGENTS}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def scenario(name: str) -> Scenario:
    return next(one for one in SCENARIOS if one.name == name)


def found(name: str, outcome: AgentOutcome, *, good: float | None = 1.0, lost: int = 0):
    return problems_of(scenario(name), outcome, reward=outcome.reward, good_reward=good, num_lost=lost)


def test_a_zero_counts_where_the_policy_is_not_at_fault():
    zero = AgentOutcome(status="ok", reward=0.0)
    assert found("busy", zero) == found("outage", zero) == ["zero reward"]
    assert found("busy", zero, good=0.0) == found("cut_answer", zero) == []
    assert found("cut_answer", AgentOutcome(status="ok")) == ["no reward"]


def test_an_error_is_right_only_in_an_outage():
    error = AgentOutcome(status="error", message="x")
    assert (found("outage", error), found("busy", error)) == ([], ["crashed"])
    assert found("outage", AgentOutcome(status="died")) == ["crashed"]
    assert found("outage", AgentOutcome(status="timeout")) == ["hung"]


def test_leaks_and_lost_turns_count_next_to_a_reward():
    assert found("answers", AgentOutcome(status="ok", reward=1.0, leaks=["a"]), lost=1) == ["leaked", "lost turns"]


def test_the_first_scenario_is_always_played():
    assert [one.name for one in chosen(["busy"])] == ["answers", "busy"]
    assert chosen([]) == SCENARIOS


@module_loop
async def test_a_good_agent_loses_nothing_in_any_scenario(pool):
    report = await rehearsed(pool, "good")
    assert list(report) == [one.name for one in SCENARIOS]
    assert {one["scenario"]: one["problems"] for one in report.values() if one["problems"]} == {}
    assert all(one["is_reached"] for one in report.values())
    kept = [one.name for one in SCENARIOS if one.keeps_reward]
    assert {report[name]["reward"] for name in kept} == {1.0}
    assert [report[name]["num_requests"] for name in ("busy", "dropped", "retries", "outage")] == [4, 4, 6, 3]
    assert [report[name]["num_turns"] for name in ("dropped", "retries", "overflow")] == [2, 2, 1]


@module_loop
async def test_an_agent_that_trusts_arguments_crashes_at_its_line(pool):
    report = await rehearsed(pool, "trusts_arguments", "wrong_arguments")
    assert report["wrong_arguments"]["problems"] == ["crashed"]
    assert line_with("# crashes here") in report["wrong_arguments"]["message"]


@module_loop
async def test_a_swallowed_error_is_a_zero_reward_and_a_lost_turn(pool):
    report = await rehearsed(pool, "swallows", "busy", "dropped")
    assert report["answers"]["problems"] == []
    assert report["busy"]["problems"] == ["zero reward"]
    assert line_with("# swallowed here") in report["busy"]["last_error"]
    assert report["dropped"]["problems"] == ["lost turns", "zero reward"]


@module_loop
async def test_an_agent_that_waits_hangs_at_its_line(pool):
    report = await rehearsed(pool, "hangs", "empty_answer", timeout_s=2.0)
    assert report["empty_answer"]["problems"] == ["hung"]
    assert line_with("# hangs here") in report["empty_answer"]["message"]


@module_loop
async def test_tasks_and_processes_that_remain_are_leaks(pool):
    report = await rehearsed(pool, "leaks", "answers")
    task, process = report["answers"]["leaks"]
    assert report["answers"]["problems"] == ["leaked"]
    assert task == f"task poller ({line_with('# leaks here')})"
    assert "input()" in process


@module_loop
async def test_a_repeated_request_without_the_mark_of_a_retry_loses_its_turn(pool):
    report = await rehearsed(pool, "repeats_without_mark", "dropped")
    assert (report["answers"]["problems"], report["dropped"]["problems"]) == ([], ["lost turns"])
    assert (report["dropped"]["num_turns"], report["dropped"]["num_lost_turns"]) == (2, 1)


@module_loop
async def test_a_stream_that_ends_early_or_comes_late(pool):
    report = await rehearsed(pool, "streams", "slow", "dropped", "parallel_calls")
    assert report["slow"]["problems"] == []
    assert report["dropped"]["problems"] == ["crashed", "lost turns"]
    assert not report["parallel_calls"]["is_reached"]


@module_loop
async def test_an_environment_is_rehearsed_and_its_line_is_found(pool):
    report = await rehearsed(pool, "OneAnswer", "overflow", way="environment")
    assert [one["problems"] for one in report.values()] == [[], []]
    report = await rehearsed(pool, "Unprepared", "empty_answer", way="environment")
    assert report["empty_answer"]["problems"] == ["crashed"]
    assert line_with("# fails here") in report["empty_answer"]["message"]
    assert line_with("# fails here") in report["empty_answer"]["last_error"]


@module_loop
async def test_a_malformed_call_is_counted_as_in_a_run(pool):
    report = await rehearsed(pool, "good", "malformed_call")
    assert (report["malformed_call"]["num_malformed_calls"], report["answers"]["num_malformed_calls"]) == (1, 0)


def test_the_exit_status_is_1_when_a_command_leaves_a_process_behind(command):
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)"
    status, (facts,) = command("--command", f'{sys.executable} -S -c "{code}"', "--scenario", "answers")
    assert (status, facts["problems"]) == (1, ["leaked"])


def test_the_exit_status_is_0_when_nothing_is_lost(command):
    status, (facts,) = command("--command", f"{sys.executable} -S -c pass", "--scenario", "answers")
    assert (status, facts["problems"]) == (0, [])


def test_an_agent_that_cannot_be_started_is_refused(command):
    with raises_code("agent.not_startable"):
        command("--command", "./no_such_program")
    with raises_code("config.bad_reference"):
        command(f"{AGENTS}:no_such_agent")
    for words in ([], [f"{AGENTS}:good", "--command", "true"], ["--config", CALCULATOR, "--online", "true"]):
        with raises_code("agent.no_agent"):
            command(*words)
    with raises_code("agent.no_agent"):
        command("--config", CALCULATOR, "~workflow_args.agent", "workflow_args.online=true")
    with raises_code("workflow.invalid_args"):
        command("--config", CALCULATOR, "workflow_args.agnt=x")
    with raises_code("data.not_found"):
        command(f"{AGENTS}:good", "--row", "1")
    with raises_code("config.bad_override"):
        command(f"{AGENTS}:good", "--call", "[1]")
