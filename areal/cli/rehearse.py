"""`areal rehearse`: plays good and bad days of a policy and its server against an agent, without a model."""

import argparse
import asyncio
import json
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web

from areal.agent.agent_run import AgentJob, AgentOutcome
from areal.agent.processes import AgentPool
from areal.agent.rehearsal import SCENARIOS, Scenario, chosen, problems_of
from areal.agent.rehearsal_session import RehearsalDirectory, RehearsedSession, Script
from areal.agent.session_routes import SessionServer
from areal.api.config import DatasetConfig
from areal.api.errors import ConfigError, InputError
from areal.api.functions import parse_function_path
from areal.data.dataset import load_rows
from areal.observe.http_log import HttpLogger
from areal.system.network import bind_socket, http_address, new_token

_KEEP_ALIVE_S = 0.25


class Request(argparse.Namespace):
    """The arguments of the command line."""

    agent: str | None
    command: str | None
    data: str
    row: int
    answer: str | None
    call: str
    scenario: list[str]
    timeout: float
    json: bool


def _parse(words: Sequence[str]) -> Request:
    parser = argparse.ArgumentParser(
        prog="areal rehearse",
        description="Run an agent against a scripted policy: good answers, then the failures that a run may contain "
        "(docs/agents.md). No model is loaded.",
        epilog="Exit status: 0 nothing is lost; 1 a crash, hang, leak, lost turn or lost reward; 2 wrong usage. "
        "Scenarios: " + "; ".join(f"{one.name}: {one.text}" for one in SCENARIOS),
    )
    parser.add_argument("agent", nargs="?", metavar="AGENT", help="file.py:function or module:function")
    parser.add_argument("--command", metavar="TEXT", help="instead: a program; {column} is that column of the row")
    parser.add_argument("--data", required=True, metavar="FILE", help="rows, .jsonl or .json")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="the row that is used, from 0 (default: 0)")
    parser.add_argument("--answer", metavar="TEXT", help="a good answer (default: the column `answer`)")
    parser.add_argument("--call", default="", metavar="JSON", help="arguments of good tool calls (default: by schema)")
    parser.add_argument(
        "--scenario", action="append", default=[], choices=[one.name for one in SCENARIOS], help="only this; repeatable"
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="of one scenario (default: 30)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_args(words, Request())


def rehearse(words: Sequence[str]) -> int:
    """Print the report; returns the exit status. ConfigError or InputError when the agent cannot be rehearsed."""
    request = _parse(words)
    job, script = _job(request)
    facts = asyncio.run(_played(job, script, chosen(request.scenario), request.timeout))
    sys.stdout.write((json.dumps(facts) if request.json else "\n".join(_lines(facts))) + "\n")
    return 1 if any(one["problems"] for one in facts["scenarios"]) else 0


def _job(request: Request) -> tuple[AgentJob, Script]:
    """The job, without its session, and what the policy knows of its row."""
    if (request.agent is None) == (request.command is None):
        raise ConfigError("give either AGENT or --command", code="agent.no_agent")
    if not request.timeout > 0:
        raise ConfigError(f"--timeout {request.timeout:g}: it must be above 0", code="config.out_of_range")
    rows = load_rows(DatasetConfig(path=request.data), default_split="train")
    if not 0 <= request.row < len(rows):
        raise InputError(f"--row {request.row}: {request.data} has {len(rows)} rows", code="data.not_found")
    try:
        if request.call and not isinstance(json.loads(request.call), dict):
            raise ValueError("it is no object")
        command = tuple(shlex.split(request.command or ""))
    except ValueError as error:
        raise ConfigError(f"--call or --command cannot be read: {error}", code="config.bad_override") from error
    row = rows[request.row]
    answer = str(row.get("answer", "4")) if request.answer is None else request.answer
    agent = None if request.agent is None else parse_function_path(request.agent, key="AGENT")
    job = AgentJob(row=row, base_url="", key="", agent=agent, command=command, watch=agent is not None)
    return job, Script(answer=answer, arguments=request.call)


async def _played(job: AgentJob, script: Script, scenarios: Sequence[Scenario], timeout_s: float) -> dict[str, Any]:
    pool = AgentPool(num_workers=1, sessions_per_worker=1)
    try:
        return await play(pool, job, script, scenarios, timeout_s=timeout_s)
    finally:
        await pool.aclose()


async def play(
    pool: AgentPool, job: AgentJob, script: Script, scenarios: Sequence[Scenario], *, timeout_s: float
) -> dict[str, Any]:
    """Play scenarios one after the other, each in its own session; the report, JSON-ready.

    ConfigError when the agent cannot be loaded.
    """
    directory, found, good = RehearsalDirectory(), list[dict[str, Any]](), None
    async with _served(directory) as base_url:
        for scenario in scenarios:
            session = directory.session = RehearsedSession(scenario.steps, script)
            key = directory.key = secrets.token_urlsafe(24)
            outcome = await pool.run(replace(job, base_url=base_url, key=key), timeout_s=timeout_s)
            if outcome.status == "unusable":
                raise ConfigError(f"the agent cannot be started: {outcome.message}", code="agent.not_startable")
            reward = _reward(session, outcome)
            good = reward if scenario is scenarios[0] else good
            found.append(_facts(scenario, session, outcome, reward, good))
    return {"good_reward": good, "scenarios": found}


@asynccontextmanager
async def _served(directory: RehearsalDirectory) -> AsyncIterator[str]:
    """The address of a session server on loopback."""
    server = SessionServer(directory, admin_token=new_token(), token_text=str, keep_alive_s=_KEEP_ALIVE_S)
    log = HttpLogger()
    runner = server.runner(log)
    runner.app.on_response_prepare.append(directory.end_connection)
    bound = bind_socket()
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield http_address(bound)
    finally:
        await runner.cleanup()
        log.close()


def _reward(session: RehearsedSession, outcome: AgentOutcome) -> float | None:
    """Of the whole session, as in a run: reported by POST, else returned, with the rewards of turns."""
    given = outcome.reward if session.reported.reward is None else session.reported.reward
    turns = outcome.rewards | session.reported.turns
    return given if not turns else (given or 0.0) + sum(turns.values())


def _facts(
    scenario: Scenario, session: RehearsedSession, outcome: AgentOutcome, reward: float | None, good: float | None
) -> dict[str, Any]:
    problems = problems_of(scenario, outcome, reward=reward, good_reward=good, num_lost=session.num_lost)
    return {
        "scenario": scenario.name,
        "problems": problems,
        "is_reached": session.has_played_fault or all(step.is_plain for step in scenario.steps),
        "reward": reward,
        "num_requests": session.num_requests,
        "num_turns": session.num_turns,
        "num_lost_turns": session.num_lost,
        "message": outcome.message,
        "last_error": outcome.last_error,
        "leaks": outcome.leaks,
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{'scenario':<16}{'result':<26}{'reward':>8}{'requests':>10}{'turns':>7}{'lost':>6}"]
    for one in facts["scenarios"]:
        result = ", ".join(one["problems"]) or ("ok" if one["is_reached"] else "not reached")
        reward = "none" if one["reward"] is None else f"{one['reward']:g}"
        counts = f"{one['num_requests']:>10}{one['num_turns']:>7}{one['num_lost_turns']:>6}"
        lines.append(f"{one['scenario']:<16}{result:<26}{reward:>8}{counts}")
        if one["problems"]:
            caught = [] if one["message"] or not one["last_error"] else [f"the agent caught {one['last_error']}"]
            lines += [f"    {text}" for text in (one["message"], *one["leaks"], *caught) if text]
    if not facts["good_reward"]:
        lines.append("good answers get no reward above 0, so lost rewards cannot be seen: give --answer, or --call")
    lost = [one["scenario"] for one in facts["scenarios"] if one["problems"]]
    return [*lines, f"LOST in {', '.join(lost)}" if lost else "nothing is lost"]
