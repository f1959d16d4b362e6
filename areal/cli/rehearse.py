"""`areal rehearse`: plays good and bad days of a policy and its server against an agent, without a model."""

import argparse
import asyncio
import inspect
import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from areal.agent.agent_run import AgentJob, AgentOutcome, run_command
from areal.agent.directory import OpenedSession
from areal.agent.processes import AgentPool
from areal.agent.rehearsal import SCENARIOS, RehearsalDirectory, RehearsedSession, Scenario, Script, chosen, problems_of
from areal.agent.session_server import SessionServer
from areal.agent.turns import BUDGET_CODES
from areal.api.config import DatasetConfig, PPOConfig
from areal.api.config.load import load_experiment
from areal.api.config.validate import raise_problems
from areal.api.data import MISSING_REWARDS
from areal.api.errors import ConfigError, InputError
from areal.api.registry import parse_function_path
from areal.api.workflow import constructor_problems
from areal.data.dataset import load_rows
from areal.observe.http_log import HttpLogger
from areal.system.network import bind_socket, http_address, new_token
from areal.system.run_paths import RunPaths
from areal.workflow.agent import AgentWorkflow, agent_job
from areal.workflow.scoring import Scorer

_KEEP_ALIVE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    job: AgentJob
    """The job without its session; of a program from outside the command that starts it. {run} is a run folder."""
    script: Script
    is_online: bool = False
    scorer: Scorer | None = None  # The reward functions for sessions without another reward.
    needs_reward: bool = False  # The configuration names no such function, so that each session needs a reward.


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="areal rehearse",
        usage="%(prog)s (AGENT | --command TEXT | --online TEXT | --config FILE [key=value ...]) [--data FILE] ...",
        description="Run an agent against a scripted policy: good answers, then the failures that a run may contain "
        "(docs/agents.md). No model is loaded.",
        epilog="Exit status: 0 nothing is lost; 1 a crash, hang, leak, lost turn or lost reward; 2 wrong usage. "
        "Scenarios: " + "; ".join(f"{scenario.name}: {scenario.text}" for scenario in SCENARIOS),
    )
    parser.add_argument("words", nargs="*", metavar="AGENT", help="file.py:function or module:function")
    parser.add_argument("--command", metavar="TEXT", help="instead: a program; {column} is that column of the row")
    parser.add_argument(
        "--online", metavar="TEXT", help="instead: a program that opens sessions; {run}: the run folder"
    )
    parser.add_argument("--config", metavar="FILE", help="instead: what workflow_args start, with its rewards")
    parser.add_argument("--data", metavar="FILE", help="rows, .jsonl or .json (default: train_dataset of --config)")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="the row that is used, from 0 (default: 0)")
    parser.add_argument("--answer", metavar="TEXT", help="a good answer (default: the column `answer`)")
    parser.add_argument("--call", default="", metavar="JSON", help="arguments of good tool calls (default: by schema)")
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        choices=[scenario.name for scenario in SCENARIOS],
        help="only this; repeatable",
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="of one scenario (default: 30)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser.parse_intermixed_args(words)


def rehearse(words: Sequence[str]) -> int:
    """Print the report; returns the exit status. ConfigError or InputError when the agent cannot be rehearsed."""
    request = _parse(words)
    facts = asyncio.run(_played(_target(request), chosen(request.scenario), request.timeout))
    sys.stdout.write((json.dumps(facts) if request.json else "\n".join(_lines(facts))) + "\n")
    return 1 if any(scenario["problems"] for scenario in facts["scenarios"]) else 0


def _target(request: argparse.Namespace) -> Target:
    """What the command line names, and what the policy knows of its row."""
    targets = [request.command, request.online, request.config, request.words[0] if request.words else None]
    if sum(target is not None for target in targets[:3]) + (request.config is None and len(request.words)) != 1:
        text = "give one of AGENT, --command, --online, and --config with key=value"
        raise ConfigError(text, code="agent.no_agent")
    if not request.timeout > 0:
        raise ConfigError(f"--timeout {request.timeout:g}: it must be above 0", code="config.out_of_range")
    config = None if request.config is None else _config(request.config, request.words)
    row = _row(request, config)
    try:
        if request.call and not isinstance(json.loads(request.call), dict):
            raise ValueError("it is no object")
        command = tuple(shlex.split(request.command or request.online or ""))
    except ValueError as error:
        text = f"--call, --command or --online cannot be read: {error}"
        raise ConfigError(text, code="config.bad_override") from error
    answer = str(row.get("answer", "4")) if request.answer is None else request.answer
    script, scorer, needs_reward = Script(answer=answer, arguments=request.call), None, False
    if config is None:
        agent = parse_function_path(request.words[0], key="AGENT") if request.words else None
        job = AgentJob(row=row, base_url="", key="", agent=agent, command=command)
    else:
        agent_program = agent_job(**config.workflow_args)
        if agent_program is None:
            text = "workflow_args.online: give the program from outside as --online TEXT"
            raise ConfigError(text, code="agent.no_agent")
        job = replace(agent_program, row=row)
        has_functions = config.reward_fn or config.reward.names_functions
        scorer = Scorer(config.reward_fn, config.reward) if has_functions else None
        needs_reward = not has_functions
    job = replace(job, watch=not job.command)
    return Target(
        job=job, script=script, is_online=request.online is not None, scorer=scorer, needs_reward=needs_reward
    )


def _config(file: str, overrides: Sequence[str]) -> PPOConfig:
    config = load_experiment(["--config", file, *overrides], allow_unknown_top_level=True)
    if not isinstance(config, PPOConfig) or config.workflow != "agent":
        raise ConfigError(f"{file}: workflow must be agent", code="agent.no_agent")
    raise_problems(list(constructor_problems(config, inspect.signature(AgentWorkflow).parameters)))
    return config


def _row(request: argparse.Namespace, config: PPOConfig | None) -> dict[str, Any]:
    if request.data is not None:
        dataset = DatasetConfig(path=request.data)
    elif config is not None:
        dataset = config.train_dataset
    else:
        raise ConfigError("give the rows: --data FILE", code="data.not_found")
    rows = load_rows(dataset, default_split="train", first=request.row + 1)
    if not 0 <= request.row < len(rows):
        raise InputError(f"--row {request.row}: {dataset.path} has {len(rows)} rows", code="data.not_found")
    return rows[request.row]


async def _played(target: Target, scenarios: Sequence[Scenario], timeout_s: float) -> dict[str, Any]:
    pool = AgentPool(num_workers=1, sessions_per_worker=1)
    try:
        return await play(pool, target, scenarios, timeout_s=timeout_s)
    finally:
        await pool.aclose()
        if target.scorer is not None:
            await target.scorer.aclose()


async def play(pool: AgentPool, target: Target, scenarios: Sequence[Scenario], *, timeout_s: float) -> dict[str, Any]:
    """Play scenarios one after the other, each in its own session; the report, JSON-ready.

    ConfigError when the agent cannot be loaded.
    """
    directory, facts, good = RehearsalDirectory(), list[dict[str, Any]](), None
    async with _served(directory) as (base_url, run):
        for scenario in scenarios:
            session = directory.session = RehearsedSession(scenario.steps, target.script)
            key = directory.key = secrets.token_urlsafe(24)
            job = replace(target.job, base_url=base_url, key=key)
            if target.is_online:
                directory.num_refused = scenario.num_refused
                directory.place = OpenedSession(key=key, session_id="rehearsal", timeout_s=timeout_s, row=job.row)
                outcome = await _from_outside(job, run, session, timeout_s=timeout_s)
            else:
                outcome = await pool.run(job, timeout_s=timeout_s)
            if outcome.status == "unusable":
                raise ConfigError(f"the agent cannot be started: {outcome.message}", code="agent.not_startable")
            if outcome.refusal in BUDGET_CODES and target.scorer is not None:
                outcome = replace(outcome, status="ok")  # as in a run: the session is scored as it is
            reward = await _reward(target, session, outcome)
            good = reward if scenario is scenarios[0] else good
            facts.append(_facts(scenario, session, outcome, reward, good, needs_reward=target.needs_reward))
    return {"good_reward": good, "scenarios": facts}


async def _from_outside(job: AgentJob, run: Path, session: RehearsedSession, *, timeout_s: float) -> AgentOutcome:
    """Run a program that opens its session until it has reported the final reward; then end it."""
    command = tuple(part.replace("{run}", str(run)) for part in job.command)
    program = asyncio.create_task(run_command(replace(job, command=command), knows_session=False), name="program")
    final = asyncio.create_task(session.is_final.wait(), name="final reward")
    try:
        await asyncio.wait((program, final), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if final.done():
            return AgentOutcome(status="ok")
        if program.done():
            return program.result()
        return AgentOutcome(status="timeout", message=f"no final reward within {timeout_s:g} s")
    finally:
        program.cancel()
        final.cancel()
        await asyncio.gather(program, final, return_exceptions=True)


@asynccontextmanager
async def _served(directory: RehearsalDirectory) -> AsyncIterator[tuple[str, Path]]:
    token = new_token()
    server = SessionServer(directory, admin_token=token, token_text=str, keep_alive_s=_KEEP_ALIVE_S)
    log = HttpLogger()
    runner = server.runner(log)
    runner.app.on_response_prepare.append(directory.end_connection)
    bound = bind_socket()
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        with tempfile.TemporaryDirectory(prefix="areal-") as name:
            run = RunPaths(Path(name))
            run.token.write_text(token)
            run.sessions.write_text(json.dumps({"base_url": http_address(bound)}))
            yield http_address(bound), run.root
    finally:
        await runner.cleanup()
        log.close()


async def _reward(target: Target, session: RehearsedSession, outcome: AgentOutcome) -> float | None:
    """Reward of the whole session, as in a run: by POST, else returned with those of turns, else by functions."""
    reward = outcome.reward if session.reported.reward is None else session.reported.reward
    turns = outcome.rewards | session.reported.turns
    if turns:
        return (reward or 0.0) + sum(turns.values())
    if reward is not None or target.scorer is None or outcome.status != "ok" or not session.num_turns:
        return reward
    prompt = "\n".join(str(message.get("content") or "") for message in session.messages)
    answer = {"role": "assistant", "content": session.last_text}
    columns = target.job.row | {"messages": [*session.messages, answer]}
    (score,) = await target.scorer.score(prompt, [], [(session.last_text, [])], columns)
    return score.reward


def _facts(
    scenario: Scenario,
    session: RehearsedSession,
    outcome: AgentOutcome,
    reward: float | None,
    good: float | None,
    *,
    needs_reward: bool,
) -> dict[str, Any]:
    lost = session.num_lost
    problems = problems_of(scenario, outcome, reward=reward, good_reward=good, num_lost=lost, needs_reward=needs_reward)
    return {
        "scenario": scenario.name, "problems": problems,
        "is_reached": session.has_played_fault or all(step.is_plain for step in scenario.steps), "reward": reward,
        "num_requests": session.num_requests, "num_turns": session.num_turns, "num_lost_turns": session.num_lost,
        "num_malformed_calls": session.num_malformed, "message": outcome.message, "last_error": outcome.last_error,
        "leaks": outcome.leaks, "loses_thinking": session.loses_thinking,
    }  # fmt: skip


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{'scenario':<16}{'result':<26}{'reward':>8}{'requests':>10}{'turns':>7}{'lost':>6}"]
    for scenario in facts["scenarios"]:
        result = ", ".join(scenario["problems"]) or ("ok" if scenario["is_reached"] else "not reached")
        reward = "none" if scenario["reward"] is None else f"{scenario['reward']:g}"
        counts = f"{scenario['num_requests']:>10}{scenario['num_turns']:>7}{scenario['num_lost_turns']:>6}"
        lines.append(f"{scenario['scenario']:<16}{result:<26}{reward:>8}{counts}")
        if scenario["loses_thinking"]:
            lines.append("    the client does not send reasoning_content back: sessions restore it")
        if "no reward" in scenario["problems"] and facts["good_reward"] is None:
            lines.append(f"    {MISSING_REWARDS['no_reward']}")
        if scenario["problems"]:
            is_shown = scenario["last_error"] and not scenario["message"]
            caught = [f"the agent caught {scenario['last_error']}"] if is_shown else []
            lines += [f"    {text}" for text in (scenario["message"], *scenario["leaks"], *caught) if text]
    if not facts["good_reward"]:
        lines.append(
            "good answers get no reward above 0, so lost rewards cannot be seen: give --answer or --call, or --config"
        )
    lost = [scenario["scenario"] for scenario in facts["scenarios"] if scenario["problems"]]
    return [*lines, f"LOST in {', '.join(lost)}" if lost else "nothing is lost"]
