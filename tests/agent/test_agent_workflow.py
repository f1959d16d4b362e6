"""`workflow: agent` with the real openai SDK and a scripted policy."""

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from transformers.utils import generic

from areal.agent import session
from areal.agent.agent_run import AgentOutcome
from areal.agent.directory import SessionReward
from areal.api.alarm_rules import ALARM_RULES
from areal.api.columns import packed_ids
from areal.api.config import AgentConfig, GenerationHyperparameters
from areal.api.data import TURN_REWARDS, TURNS, GenerationResponse
from areal.api.errors import RewardError, ServerUnavailable
from areal.data.chat import EncodedPrompt
from areal.observe.spans import span, tracing, track
from areal.observe.trace import ChromeTracer, join_traces
from areal.workflow import Conversation
from areal.workflow.agent import AgentWorkflow, FinishedSession
from tests.agent.calculator_agents import Lookups
from tests.agent.policies import ScriptedEngine, tool_tokenizer
from tests.agent.test_session import request, session_of
from tests.expect import raises_code

AGENTS = Path(__file__).parent / "calculator_agents.py"
ROW = {"question": "6*7", "answer": "42"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def use_tool(prompt: str) -> str:
    return "42" if "tool\n42" in prompt else CALL


@pytest_asyncio.fixture
async def make():
    made: list[AgentWorkflow] = []

    def build(agent: str = "", *, n_samples: int = 2, **options) -> AgentWorkflow:
        names = ("command", "environment", "tools", "reward_fn", "online")
        arguments = {name: options.pop(name) for name in names if name in options}
        gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=200, max_tokens=2000)
        config = AgentConfig(**{"inline": True} | options)
        agent = f"{AGENTS}:{agent}" if agent else ""
        workflow = AgentWorkflow(gconfig, tool_tokenizer(), agent_config=config, agent=agent, **arguments)
        made.append(workflow)
        return workflow

    yield build
    for workflow in made:
        await workflow.aclose()


@pytest.fixture
def play(make):
    """One episode of an agent. `policy`: each answer, one after another; or a function of the prompt."""

    async def episode(agent: str = "", policy="1", *, row=ROW, **options):
        answers = itertools.cycle(policy) if isinstance(policy, list) else itertools.repeat(policy)
        engine = ScriptedEngine(policy if callable(policy) else lambda prompt: next(answers))
        return await make(agent, **options).arun_episode(engine, dict(row))

    return episode


async def test_a_session_with_a_tool_call_is_one_trajectory_with_both_answers(play) -> None:
    group = await play("run", use_tool)
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    (first, _) = group.trajectories
    trained = tool_tokenizer().decode([t for t, m in zip(first.token_ids, first.loss_mask, strict=True) if m])
    assert trained == f"{CALL}<|im_end|>42<|im_end|>"
    assert [group.stats[name] for name in ("num_turns", "tool_calls", "forks")] == [2, 1, 0]
    assert (len(group.turn_ids), group.rejected) == (4, "")
    session, _ = json.loads(group.record)["sessions"]
    assert [len(turn["calls"]) for turn in session["turns"]] == [1, 0]
    assert [message["role"] for message in session["messages"]] == ["user", "assistant", "tool", "assistant"]


TOOLS = {"tools": [f"{AGENTS}:calculator"]}
GUESSING = {"environment": f"{AGENTS}:Guessing", "n_samples": 1}
SCORED = {"reward_fn": "exact", "n_samples": 1}
TASK = {"messages": [{"role": "user", "content": "6*7"}], "answer": "42"}
EPISODES = {  # agent, policy, options -> rewards of the trajectories, why the group is rejected, metrics
    "rewards of turns and parts": ("WithParts", "1", {}, None, "", {"reward/format": 0.5}),
    "a missing reward is no zero": ("without_reward", "1", {}, [], "no_reward", {"no_reward": 1}),
    "sessions without reward are left out": (
        "sometimes_without_reward", ["1", "2", "1"], {"n_samples": 3, "missing_reward": "leave_out"},
        [1.0, 1.0], "", {"no_reward": pytest.approx(1 / 3)}),
    "a reward without a turn is none": (
        "asks_in_some", "1", {"missing_reward": "leave_out", "n_samples": 3}, [1.0, 1.0], "",
        {"no_reward": pytest.approx(1 / 3), "reward": 1.0}),
    "a reward without a turn rejects as a missing one": ("asks_nothing", "1", {}, [], "no_turns", {"no_reward": 1}),
    "an agent that hangs": ("hangs", "1", {"timeout_s": 0.3}, [], "agent_timeout", {"agent_timeouts": 1}),
    "the reward function scores the last answer": ("without_reward", "42", SCORED, [1.0], "", {}),
    "a used-up budget is scored": (
        "too_many_turns", "42", SCORED | {"max_turns": 2}, [1.0] * 2, "", {"budget_stops": 1, "num_turns": 2}),
    **{
        f"an own reward after the budget, {rule}": (
            "returns_its_own", "42", {"n_samples": 1, "budget_reward": rule, "max_turns": 1}, rewards, rejected, {})
        for rule, rewards, rejected in [("keep", [0.25], ""), ("zero", [0.0], ""), ("none", [], "turn_budget")]
    },
    "tools alone need no agent": ("", use_tool, SCORED | TOOLS | {"row": TASK}, [1.0], "", {"num_turns": 2}),
    "an environment gives rewards of turns": ("", ["1", "42"], GUESSING, None, "", {"num_turns": 2, "reward": 1.0}),
    "an environment that no answer reached gives 0 when the budget ends": (
        "", CALL, GUESSING | TOOLS | {"max_turns": 2}, [0.0], "", {"budget_stops": 1, "num_turns": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODES)
async def test_the_rewards_and_metrics_of_an_episode(play, name) -> None:
    agent, policy, options, rewards, rejected, stats = EPISODES[name]
    group = await play(agent, policy, **options)
    assert rewards is None or [trajectory.reward for trajectory in group.trajectories] == rewards
    assert group.rejected == rejected
    assert {metric: group.stats[metric] for metric in stats} == stats
    assert not rejected or "zero_reward" not in group.stats
    if agent == "WithParts":
        assert group.stats["reward"] in (1.5, 1.75)
    if agent in ("sometimes_without_reward", "asks_in_some"):
        assert [item["reward"] for item in json.loads(group.record)["sessions"]] == [1.0, 1.0, None]


async def test_a_reward_of_a_tool_call_belongs_to_its_turn_and_is_discounted_for_earlier_ones(play) -> None:
    (row,) = (await play("rewards_each_call", CALL, n_samples=1, turn_discount=0.5)).trajectories
    pairs = zip(row.columns[TURNS], row.columns[TURN_REWARDS], strict=True)
    values = {turn: value for turn, value in pairs if turn >= 0}
    assert values == {0: 0.5 + 0.5 * (0.5 + 1.0), 1: 0.5 + 1.0}, "the reward of the session belongs to its last turn"
    assert row.reward == 2.0


async def test_an_agent_that_always_fails_fails_its_episode_with_its_line(play) -> None:
    with raises_code("agent.failed", "calculator_agents.py") as caught:
        await play("raises")
    assert str(caught.value).startswith("agent_error")  # `areal show --reason agent_error` finds the episode


async def test_sessions_that_the_servers_failed_are_no_error_of_the_agent(play, monkeypatch) -> None:
    monkeypatch.setattr(session, "RETRY_AFTER_S", 0.01)

    def fails(prompt: str) -> str:
        raise ServerUnavailable("no server", code="fleet.no_live_replica")

    with raises_code("agent.no_server"):
        await play("run", fails)


@pytest.mark.parametrize(
    ("limit", "reason"), [({"max_turns": 2}, "turn_budget"), ({"max_seconds": 1e-9}, "agent_timeout")]
)
async def test_a_used_up_budget_without_a_reward_is_no_error_of_the_agent(play, limit, reason) -> None:
    group = await play("too_many_turns", "42", **limit)
    assert (group.rejected, group.agent_error) == (reason, "")


@pytest.mark.parametrize(("code", "reward"), [("agent.time_budget", None), ("agent.token_budget", 0.25)])
async def test_the_time_of_a_session_leaves_no_reward_whatever_its_agent_returns(code, reward) -> None:
    subject = session_of(ScriptedEngine(lambda prompt: "42"))
    await subject.answer(request())
    subject.counts.refused[code] += 1
    outcome = AgentOutcome(status="ok", reward=0.25, refusal="")
    result = FinishedSession(session=subject, outcome=outcome, reported=SessionReward(), num_open=1)
    assert (result.reward, result.wants_score, result.agent_error) == (reward, False, "")


@pytest.mark.parametrize(
    ("kind", "is_own"), [("wrapped", False), ("in a group", False), ("while handling it", False), ("own", True)]
)
async def test_an_error_after_a_refusal_is_of_the_budget_only_if_it_comes_from_the_refusal(play, kind, is_own) -> None:
    """An error that the agent raises later is its own: the reward function does not score its session."""
    with raises_code("agent.failed") if is_own else contextlib.nullcontext():
        group = await play("fails_beyond_budget", "42", **SCORED, max_turns=1, row={**ROW, "kind": kind})
        assert (group.rejected, [trajectory.reward for trajectory in group.trajectories]) == ("", [1.0])


@pytest.mark.parametrize("in_all", [False, True])
async def test_sessions_whose_agent_failed_count_in_no_rate_under_load(make, in_all) -> None:
    answers = itertools.cycle("2" if in_all else "21")
    workflow = make("raises_after_two", missing_reward="leave_out")
    for _ in range(2):
        with contextlib.suppress(RewardError):
            await workflow.arun_episode(ScriptedEngine(lambda prompt: next(answers)), dict(ROW))
    result = [item for sessions in workflow._blame._newest.values() for item in sessions]
    assert {item.reward for item in result} == (set() if in_all else {1.0})


@pytest.mark.parametrize(("missing_reward", "rejected"), [("reject", "agent_error: LookupError"), ("leave_out", "")])
async def test_an_agent_that_fails_in_one_session_is_named_as_the_cause(play, missing_reward, rejected) -> None:
    group = await play("raises_after_two", ["1", "2", "1"], n_samples=3, missing_reward=missing_reward)
    assert group.rejected == rejected
    assert "LookupError: no such page" in group.agent_error
    assert "calculator_agents.py:" in group.agent_error


async def test_a_row_without_messages_names_the_option_that_adds_them(play) -> None:
    with raises_code("agent.failed", "train_dataset.map_fn") as caught:
        await play("", use_tool, **TOOLS, **SCORED)
    assert "the agent" not in str(caught.value)


async def test_no_text_of_a_session_needs_torch(play, monkeypatch) -> None:
    """transformers imports torch for columns of another type than list; this process is a controller's."""

    def fail(value: object) -> bool:
        raise AssertionError(type(value))

    monkeypatch.setattr(generic, "is_torch_tensor", fail)
    (row,) = (await play("without_reward", "42", **SCORED)).trajectories
    conversation = Conversation(tool_tokenizer(), EncodedPrompt("", packed_ids(row.token_ids[:4])))
    ids = packed_ids(row.token_ids[4:])
    size = len(ids)
    answer = GenerationResponse(
        request_id="r", input_ids=[], output_ids=ids, output_logprobs=[0.0] * size, output_versions=[0] * size,
        stop_reason="stop",
    )  # fmt: skip
    assert conversation.add_answer(answer)
    assert conversation.add_turn(packed_ids(row.token_ids))


async def test_a_program_from_outside_takes_the_place_of_an_episode_and_reports_its_reward(make, monkeypatch) -> None:
    monkeypatch.setenv("AREAL_SERVER_TOKEN", "admin")
    workflow = make(online=True, n_samples=1)
    episode = asyncio.create_task(workflow.arun_episode(ScriptedEngine(lambda prompt: "42"), dict(ROW)))
    while not workflow._services.sessions._places:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(base_url=workflow._services.base_url) as http:
        admin = {"Authorization": "Bearer admin"}
        opened = (await http.post("/sessions", json={}, headers=admin)).json()
        full = await http.post("/sessions", json={}, headers=admin)
        client = AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"], http_client=http)
        completion = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": opened["row"]["question"]}]
        )
        unknown = await http.post(f"/sessions/{opened['key']}/reward", json={"reward": 9.0, "turns": {"none": 1.0}})
        await http.post(f"/sessions/{opened['key']}/reward", json={"reward": 0.5, "turns": {completion.id: 0.25}})
        group = await episode
        late = await http.post(f"/sessions/{opened['key']}/reward", json={"reward": 1.0})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "agent.unknown_turn")
    assert full.status_code == 429
    assert "Retry-After" in full.headers
    assert [trajectory.reward for trajectory in group.trajectories] == [0.75]
    assert late.status_code == 409


class TracedEngine(ScriptedEngine):
    """Its answers are spans, as those of the engine of an episode."""

    async def agenerate(self, request):
        with span("generate"):
            return await super().agenerate(request)


@pytest.mark.parametrize("is_online", [False, True])
async def test_a_trace_has_the_turns_of_a_session_in_its_episode(make, tmp_path, monkeypatch, is_online) -> None:
    """The session server runs in the context of the first episode, which started it."""
    monkeypatch.setenv("AREAL_SERVER_TOKEN", "admin")
    workflow = make("" if is_online else "run", n_samples=1, online=is_online)

    async def episode(name: str) -> None:
        with track("episode", name):
            await workflow.arun_episode(TracedEngine(use_tool), dict(ROW))

    async def program() -> None:
        while not workflow._services.sessions._places:
            await asyncio.sleep(0)
        async with httpx.AsyncClient(base_url=workflow._services.base_url) as http:
            opened = (await http.post("/sessions", json={}, headers={"Authorization": "Bearer admin"})).json()
            body = {"model": "policy", "messages": [{"role": "user", "content": "6*7"}]}
            await http.post(f"/sessions/{opened['key']}/v1/chat/completions", json=body)
            await http.post(f"/sessions/{opened['key']}/reward", json={"reward": 1.0})

    with tracing(ChromeTracer(tmp_path / "controller.jsonl", "controller")):
        for name in ("17", "18"):
            await asyncio.gather(episode(name), *([program()] if is_online else []))
    result = [(event["id"], event["name"]) for event in join_traces(tmp_path)["traceEvents"] if event["ph"] == "b"]
    parts = ["generate", "episode"] if is_online else ["agent", "generate", "generate", "episode"]
    assert sorted(result) == sorted((name, part) for name in ("17", "18") for part in parts)


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_reward_may_come_by_post_within_its_window_after_the_end_of_the_agent(make, is_reported) -> None:
    workflow = make("rewarded_later", n_samples=1, reward_window_s=30.0 if is_reported else 0.01)
    addresses: list[str] = []
    row = {**ROW, "addresses": addresses}
    episode = asyncio.create_task(workflow.arun_episode(ScriptedEngine(lambda prompt: "42"), row))
    if is_reported:
        while not addresses:
            await asyncio.sleep(0)
        async with httpx.AsyncClient() as http:
            assert (await http.post(addresses[0], json={"reward": 0.5})).status_code == 200
    group = await episode
    assert [trajectory.reward for trajectory in group.trajectories] == [0.5] * is_reported
    assert group.rejected == ("" if is_reported else "no_reward")


async def test_a_stream_of_several_answers_takes_every_setting_to_the_policy(make) -> None:
    engine = ScriptedEngine(lambda prompt: "42")
    row: dict = dict(ROW)
    group = await make("streams", n_samples=1).arun_episode(engine, row)
    texts, num_logprobs = row["streamed"]
    settings = [request.gconfig for request in engine.requests]
    assert texts == ["42", "42"]
    assert [request.seed for request in engine.requests] == [5, 6]
    assert {(setting.max_new_tokens, setting.temperature, tuple(setting.stop)) for setting in settings} == {
        (9, 0.5, ("!",))
    }
    assert num_logprobs == [sum(trajectory.loss_mask) for trajectory in group.trajectories]


@pytest.mark.parametrize(
    ("rows_at_once", "policy", "is_blamed"),
    [
        ((1,) * 16 + (16,), ["42"], True),
        ((1,) * 8, ["42"], False),
        ((1,) * 8, ["42", "41"], False),
        ((1, 2) * 4, ["42", "41"], False),
    ],
    ids=["load", "no load", "a bad policy", "a bad policy and load that the tool serves"],
)
async def test_zeros_are_blamed_on_the_load_only_where_a_time_out_bites_under_it(
    make, caplog, rows_at_once, policy, is_blamed
) -> None:
    """The agent's tool serves two sessions at the same time: of many more, its time-out ends some."""
    answers = itertools.cycle(policy)
    engine, workflow = ScriptedEngine(lambda prompt: next(answers)), make("with_lookup", n_samples=2)
    zeros = []
    with caplog.at_level("WARNING", logger="areal"):
        for count in rows_at_once:
            row = ROW | {"lookups": Lookups(2 * count)}
            groups = await asyncio.gather(*(workflow.arun_episode(engine, dict(row)) for _ in range(count)))
            zeros += [group.stats["zero_reward"] for group in groups]
    result = groups[-1].stats["zeros_by_load"]
    limit = next(rule.limit for rule in ALARM_RULES if rule.name == "zeros_by_load")
    assert result > 2 * limit if is_blamed else result == 0
    assert len([record for record in caplog.records if record.name == "areal.workflow.agent"]) == is_blamed
    assert (sum(zeros[:8]) == 0) == (policy == ["42"]), "the tool serves few sessions in time"


async def test_wrong_answers_that_end_early_are_not_blamed_on_the_load(make) -> None:
    """All sessions start together. A guess ends while the others are open; a tool call and its answer end later."""
    engine = ScriptedEngine(lambda prompt: "0" if "guess" in prompt else use_tool(prompt))
    workflow = make("run", n_samples=2)
    rows = [ROW | ({"question": "guess"} if number % 2 else {}) for number in range(40)]
    groups = await asyncio.gather(*(workflow.arun_episode(engine, row) for row in rows))
    assert {group.stats["reward"] for group in groups} == {0.0, 1.0}
    assert {group.stats["zeros_by_load"] for group in groups} == {0.0}
