"""The pool of agent processes: results, errors, blocked and dead workers, commands."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from areal.agent.agent_run import AgentJob, run_command, with_columns
from areal.agent.processes import AgentPool
from areal.api.registry import FunctionRef

FILE = str(Path(__file__).parent / "pool_agents.py")


def job(name: str, **row) -> AgentJob:
    ref = FunctionRef(name=name, file=FILE)
    return AgentJob(row=row, base_url="http://localhost:1", key="secret", agent=ref)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    os.environ["AREAL_TEACHER_TOKEN"] = "of the teacher"
    made = AgentPool(num_workers=1, sessions_per_worker=8)
    yield made
    await made.aclose()
    del os.environ["AREAL_TEACHER_TOKEN"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_returns_its_reward_parts_turns_and_metrics(pool) -> None:
    result = await pool.run(job("rewards"), timeout_s=60)
    assert (result.status, result.reward, result.parts) == ("ok", 1.0, {"format": 0.5})
    assert (result.rewards, result.metrics) == ({"a.0": 0.25, "0": 0.5}, {"looked_up": 2.0})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plain_function_is_an_agent_with_a_client_that_waits(pool) -> None:
    result = await pool.run(job("plain"), timeout_s=60)
    assert (result.status, result.reward, result.metrics) == ("ok", 1.0, {"looked_up": 3.0})


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_never_sees_the_token_of_the_run(pool, monkeypatch) -> None:
    result = await pool.run(job("sees_token"), timeout_s=60)
    assert result.reward == 0.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["raises", "interrupts", "exits_in_a_task"])
async def test_an_error_is_an_outcome_with_the_line_of_the_agent(pool, name) -> None:
    result = await pool.run(job(name), timeout_s=60)
    assert result.status == "error"
    assert "pool_agents.py:" in result.message


@pytest.mark.asyncio(loop_scope="module")
async def test_a_missing_agent_is_unusable(pool) -> None:
    assert (await pool.run(job("no_such_agent"), timeout_s=60)).status == "unusable"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_beyond_its_time_is_cancelled_and_its_process_stays(pool) -> None:
    first = await pool.run(job("process_id"), timeout_s=60)
    assert (await pool.run(job("waits"), timeout_s=0.05)).status == "timeout"
    assert (await pool.run(job("process_id"), timeout_s=60)).reward == first.reward


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["exit", "thread", "task", "abort"])
async def test_an_agent_that_ends_its_process_fails_and_the_others_in_it_die(pool, how, tmp_path) -> None:
    first = await pool.run(job("process_id"), timeout_s=60)
    (tmp_path / "ready").mkdir()
    others = [asyncio.create_task(pool.run(job("works", folder=str(tmp_path / "ready")), timeout_s=60)) for _ in "ab"]
    result = await pool.run(job("dies", how=how, folder=str(tmp_path / "ready")), timeout_s=60)
    assert (result.status, result.message[:13]) == ("error", "ProcessEnded:")
    assert [other.status for other in await asyncio.gather(*others)] == ["died", "died"]
    assert (await pool.run(job("process_id"), timeout_s=60)).reward != first.reward


async def test_a_command_gets_the_row_and_the_session_in_its_environment(tmp_path) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OPENAI_BASE_URL'] + sys.argv[2])"
    out = tmp_path / "out"
    command = (sys.executable, "-c", code, "{out}", "{question}{other}")
    row = {"out": str(out), "question": "6*7"}
    result = await run_command(AgentJob(row=row, base_url="http://localhost:1", key="secret", command=command))
    assert result.status == "ok"
    assert out.read_text() == "http://localhost:1/v16*7{other}"


async def test_python_is_the_interpreter_of_the_run_and_a_program_from_outside_gets_no_session(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code = f"import os, sys; sys.exit(os.environ.get('OPENAI_API_KEY') or sys.executable != {sys.executable!r})"
    command = ("python", "-S", "-c", code)
    job = AgentJob(row={}, base_url="http://localhost:1", key="secret", command=command)
    assert "secret" in (await run_command(job)).message
    assert (await run_command(job, knows_session=False)).status == "ok"


@pytest.mark.parametrize("refusal", ["", "agent.turn_budget"])
async def test_a_command_that_fails_has_its_last_output_in_the_message_and_the_refusal_in_it(refusal) -> None:
    command = (sys.executable, "-c", f"raise SystemExit('{refusal} no such page')")
    result = await run_command(AgentJob(row={}, base_url="http://localhost:1", key="secret", command=command))
    assert (result.status, result.refusal) == ("error", refusal)
    assert "no such page" in result.message


async def test_the_message_of_a_command_has_the_line_of_its_own_code(tmp_path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("import json\njson.loads('{')\n")
    result = await run_command(
        AgentJob(row={}, base_url="http://localhost:1", key="secret", command=(sys.executable, str(file)))
    )
    assert f"({file}:2)" in result.message


def test_braces_that_are_no_column_stay() -> None:
    assert with_columns('{"a": {b}}', {"b": 1}) == '{"a": 1}'
