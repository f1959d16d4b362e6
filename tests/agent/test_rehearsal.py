"""Rehearsals of agents: what each loses, with the line of its code."""

import json
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from areal.agent.agent_run import AgentJob, AgentOutcome
from areal.agent.processes import AgentPool
from areal.agent.rehearsal import SCENARIOS, Script, chosen, problems_of
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
    return {scenario["scenario"]: scenario for scenario in report["scenarios"]}


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


ZERO, ERROR = AgentOutcome(status="ok", reward=0.0), AgentOutcome(status="error", message="x")
LEAK = AgentOutcome(status="ok", reward=1.0, leaks=["a"])


@pytest.mark.parametrize("needs_reward", [False, True])
def test_a_good_answer_needs_a_reward_where_no_function_gives_one(needs_reward):
    result = problems_of(
        SCENARIOS[0], AgentOutcome(status="ok"), reward=None, good_reward=None, num_lost=0, needs_reward=needs_reward
    )
    assert result == ["no reward"] * needs_reward


@pytest.mark.parametrize(
    ("name", "outcome", "good", "lost", "problems"),
    [  # a zero counts where the policy is not at fault, and an error is right in an outage only
        ("busy", ZERO, 1.0, 0, ["zero reward"]),
        ("outage", ZERO, 1.0, 0, ["zero reward"]),
        ("busy", ZERO, 0.0, 0, []),
        ("cut_answer", ZERO, 1.0, 0, []),
        ("cut_answer", AgentOutcome(status="ok"), 1.0, 0, ["no reward"]),
        ("outage", ERROR, 1.0, 0, []),
        ("busy", ERROR, 1.0, 0, ["crashed"]),
        ("outage", AgentOutcome(status="died"), 1.0, 0, ["crashed"]),
        ("outage", AgentOutcome(status="timeout"), 1.0, 0, ["hung"]),
        ("answers", LEAK, 1.0, 1, ["leaked", "lost turns"]),
    ],
)
def test_problems_of_an_outcome(name, outcome, good, lost, problems):
    scenario = next(item for item in SCENARIOS if item.name == name)
    assert problems_of(scenario, outcome, reward=outcome.reward, good_reward=good, num_lost=lost) == problems


def test_the_first_scenario_is_always_played():
    assert [item.name for item in chosen(["busy"])] == ["answers", "busy"]
    assert chosen([]) == SCENARIOS


@module_loop
async def test_a_good_agent_loses_nothing_in_any_scenario(pool):
    report = await rehearsed(pool, "good")
    assert list(report) == [item.name for item in SCENARIOS]
    assert {item["scenario"]: item["problems"] for item in report.values() if item["problems"]} == {}
    assert all(item["is_reached"] for item in report.values())
    kept = [item.name for item in SCENARIOS if item.keeps_reward]
    assert {report[name]["reward"] for name in kept} == {1.0}
    assert [report[name]["num_requests"] for name in ("busy", "dropped", "retries", "outage")] == [4, 4, 6, 3]
    assert [report[name]["num_turns"] for name in ("dropped", "retries", "overflow")] == [2, 2, 1]


LOSSES = [  # agent, scenarios, seconds -> problems of each scenario, and where the line of its code stands
    ("trusts_arguments", ["wrong_arguments"], 60, {"wrong_arguments": ["crashed"]},
     ["wrong_arguments message crashes"]),
    ("swallows", ["busy", "dropped"], 60,
     {"answers": [], "busy": ["zero reward"], "dropped": ["lost turns", "zero reward"]}, ["busy last_error swallowed"]),
    ("hangs", ["empty_answer"], 2, {"empty_answer": ["hung"]}, ["empty_answer message hangs"]),
    ("repeats_without_mark", ["dropped"], 60, {"answers": [], "dropped": ["lost turns"]}, []),
    ("streams", ["slow", "dropped", "parallel_calls"], 60, {"slow": [], "dropped": ["crashed", "lost turns"]}, []),
    ("good", ["malformed_call"], 60, {"malformed_call": []}, []),
    ("OneAnswer", ["overflow"], 60, {"answers": [], "overflow": []}, []),
    ("Unprepared", ["empty_answer"], 60, {"empty_answer": ["crashed"]},
     ["empty_answer message fails", "empty_answer last_error fails"]),
]  # fmt: skip


@module_loop
@pytest.mark.parametrize(
    ("name", "scenarios", "timeout_s", "problems", "lines"), LOSSES, ids=lambda item: str(item)[:12]
)
async def test_what_an_agent_loses_and_at_which_line(pool, name, scenarios, timeout_s, problems, lines):
    way = "agent" if name.islower() else "environment"
    report = await rehearsed(pool, name, *scenarios, timeout_s=float(timeout_s), way=way)
    assert {key: report[key]["problems"] for key in problems} == problems
    for key, where, mark in map(str.split, lines):
        assert line_with(f"# {mark} here") in report[key][where]
    if name == "repeats_without_mark":  # a repeated request without the mark of a retry is a new turn
        assert (report["dropped"]["num_turns"], report["dropped"]["num_lost_turns"]) == (2, 1)
    if name == "streams":
        assert not report["parallel_calls"]["is_reached"]
    if name == "good":
        assert [report[key]["num_malformed_calls"] for key in ("malformed_call", "answers")] == [1, 0]


@module_loop
@pytest.mark.parametrize(("name", "loses"), [("with_runner", True), ("good", False), ("OneAnswer", False)])
async def test_a_client_that_does_not_send_thinking_back_is_shown(pool, name, loses):
    report = await rehearsed(pool, name, "thinking", way="agent" if name.islower() else "environment")
    assert [(item["loses_thinking"], item["problems"]) for item in report.values()] == [(False, []), (loses, [])]


@module_loop
async def test_tasks_and_processes_that_remain_are_leaks(pool):
    report = await rehearsed(pool, "leaks", "answers")
    task, process = report["answers"]["leaks"]
    assert report["answers"]["problems"] == ["leaked"]
    assert task == f"task poller ({line_with('# leaks here')})"
    assert "input()" in process


LEAVES = "import subprocess; subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)"


@pytest.mark.parametrize(("code", "problems"), [(LEAVES, ["leaked"]), ("pass", [])])
def test_the_exit_status_is_1_when_a_command_loses_something(command, code, problems):
    status, (facts,) = command("--command", f'{sys.executable} -S -c "{code}"', "--scenario", "answers")
    assert (status, facts["problems"]) == (len(problems), problems)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("agent.not_startable", ["--command", "./no_such_program"]),
        ("config.bad_reference", [f"{AGENTS}:no_such_agent"]),
        ("agent.no_agent", []),
        ("agent.no_agent", [f"{AGENTS}:good", "--command", "true"]),
        ("agent.no_agent", ["--config", CALCULATOR, "--online", "true"]),
        ("agent.no_agent", ["--config", CALCULATOR, "~workflow_args.agent", "workflow_args.online=true"]),
        ("workflow.invalid_args", ["--config", CALCULATOR, "workflow_args.agnt=x"]),
        ("data.not_found", [f"{AGENTS}:good", "--row", "1"]),
        ("config.bad_override", [f"{AGENTS}:good", "--call", "[1]"]),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused(command, code, words):
    with raises_code(code):
        command(*words)
