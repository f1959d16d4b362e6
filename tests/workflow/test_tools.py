import asyncio
from typing import Literal

import pytest

from areal.api.config import GenerationHyperparameters
from areal.observe.step_files import LoggedMetrics
from areal.workflow import ConversationWorkflow, ToolCall, call_tool, parse_tool_calls, tool_schema, use_tools

ROW = {"messages": [{"role": "user", "content": "2+3?"}], "answer": "5"}


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def fetch(words: list[str], kind: Literal["short", "long"], limit: float | None = None) -> dict[str, str]:
    return {"words": " ".join(words), "kind": kind}


async def hang() -> None:
    await asyncio.Event().wait()


def test_the_schema_of_a_function_has_its_parameters():
    assert tool_schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
    assert tool_schema(fetch)["function"]["parameters"]["properties"] == {
        "words": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["short", "long"]},
        "limit": {"anyOf": [{"type": "number"}]},
    }


def test_calls_in_a_text():
    text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and <tool_call>{"name": "hang"}'
    assert parse_tool_calls(text) == [ToolCall(name="add", arguments={"a": 1}), ToolCall(name="hang")]
    assert parse_tool_calls("no call") == []
    assert parse_tool_calls(f"<think>{text}</think>no") == []
    assert parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>') == [
        ToolCall(name="add", arguments={"a": "</tool_call>"})
    ]


@pytest.mark.parametrize("body", ["add(1)", "[]", '{"name": 5}', '{"name": "add", "arguments": "1"}', "{}"])
def test_a_malformed_call_has_a_problem(body):
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert call.problem


@pytest.mark.parametrize(
    ("call", "fails"),
    [
        (ToolCall(name="add", arguments={"a": 2, "b": 3}), False),
        (ToolCall(name="fetch", arguments={"words": ["x"], "kind": "long"}), False),
        (ToolCall(name="add", arguments={"c": 2}), True),
        (ToolCall(name="subtract"), True),
        (ToolCall(name="", problem="malformed"), True),
    ],
)
async def test_a_call_that_fails_is_a_result(call, fails):
    with LoggedMetrics() as logged:
        result = await call_tool(call, [add, fetch])
    assert result.startswith("error: ") is fails
    assert logged.means() == {"tool_errors": float(fails)}


async def test_a_tool_that_hangs_is_ended_at_its_limit():
    assert (await call_tool(ToolCall(name="hang"), [hang], timeout_s=0.01)).startswith("error: ")


class WithTools(ConversationWorkflow):
    """Adds with a tool."""

    async def converse(self, episode, conversation):
        return float(await use_tools(episode, conversation, [add], max_turns=3) == "5")


async def test_the_loop_ends_with_an_answer_without_calls(tokenizer, engine_of):
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><e>'
    workflow = WithTools("exact", GenerationHyperparameters(n_samples=1), tokenizer)
    with LoggedMetrics() as logged:
        group = await workflow.arun_episode(engine_of([call, "5<e>"]), ROW)
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.0
    assert "<s>tool\n5<e>\n<s>assistant\n5<e>" in tokenizer.decode(trajectory.token_ids)
    assert logged.means() == {"tool_errors": 0.0, "tool_calls": 1.0}


@pytest.mark.parametrize(
    ("answer", "num_calls"),
    [
        ('<think>or <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call></think>5<e>', 0),
        ("<tool_call><function=add><parameter=a>2</parameter></function></tool_call><e>", 1),
    ],
)
async def test_calls_are_those_of_a_session_with_this_template(tokenizer, engine_of, answer, num_calls):
    tokenizer.chat_template += "{# <tool_call><function= </think> #}"
    workflow = WithTools("exact", GenerationHyperparameters(n_samples=1), tokenizer)
    with LoggedMetrics() as logged:
        await workflow.arun_episode(engine_of([answer, "5<e>"]), ROW)
    assert logged.means()["tool_calls"] == num_calls


async def test_the_loop_has_at_most_max_turns(tokenizer, engine_of):
    engine = engine_of(["<tool_call>{}</tool_call><e>"] * 9)
    workflow = WithTools("exact", GenerationHyperparameters(n_samples=1), tokenizer)
    group = await workflow.arun_episode(engine, ROW)
    assert len(engine.requests) == 3
    assert group.trajectories[0].loss_mask[-1] == 1  # no result that nobody reads follows
