"""Tools of a workflow: calls in the text of an answer, and the loop around them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.agent.tool_calls import (
    AnswerStyle,
    Broken,
    Call,
    Piece,
    Tool,
    answer_call,
    answer_pieces,
    style_of,
    tool_schema,
)
from areal.observe.step_files import log_metric
from areal.workflow.conversation import Conversation, Episode, generate


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str = ""  # Why it cannot be executed; empty when it can.


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen) in an answer, and
    not in its reasoning, which begins with `<think>`."""
    style = AnswerStyle(name="hermes", reasoning=("<think>", "</think>"), special_tokens=None)
    return _calls(answer_pieces(text, style, tools=[{"function": {"name": ""}}]), style)


def _calls(pieces: Sequence[Piece], style: AnswerStyle) -> list[ToolCall]:
    found: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, Call):
            found.append(ToolCall(name=piece.name, arguments=json.loads(piece.arguments)))
        elif isinstance(piece, Broken):
            problem = 'a call must be {"name": ..., "arguments": {...}}' if style.name == "hermes" else "malformed call"
            found.append(ToolCall(name="", problem=problem))
    return found


def _calls_of_last(episode: Episode, conversation: Conversation, tools: Sequence[Tool]) -> list[ToolCall]:
    """The calls of the last answer, in the style of the chat template, as a session of an agent reads them."""
    tokenizer, answer = conversation.tokenizer, conversation.last_answer
    style = style_of("auto", tokenizer.chat_template)
    style = style_of("hermes", tokenizer.chat_template) if style.name == "none" else style
    ids = list(answer.token_ids)
    if ids and ids[-1] in episode.settings.stop_token_ids:
        ids.pop()
    return _calls(
        answer_pieces(
            tokenizer.decode(ids),
            style,
            tools=[tool_schema(tool) for tool in tools],
            in_reasoning=style.opens_reasoning(conversation.context_of(answer).text[-64:]),
            is_cut=not answer.finished,
        ),
        style,
    )


async def call_tool(call: ToolCall, tools: Sequence[Tool], *, timeout_s: float = 30.0) -> str | list[dict[str, Any]]:
    """The result of one call as text, or as parts where it has images. A call that fails gives `error: ...`, which the
    model reads like any result.

    Reports the metric tool_errors (0 or 1), whose mean is per call.
    """
    return await answer_call(call.name, call.arguments, call.problem, tools, timeout_s=timeout_s)


async def use_tools(
    episode: Episode,
    conversation: Conversation,
    tools: Sequence[Tool],
    *,
    max_turns: int = 8,
    parse: Callable[[str], list[ToolCall]] | None = None,
    timeout_s: float = 30.0,
) -> str:
    """Let the policy answer until it calls no tool, at most `max_turns` times. Returns the text of the last answer.

    `parse`: finds the calls in the text of an answer; None = in the style of the chat template, Hermes without one.
    The calls of one answer run at the same time; each result is a message of the role `tool`. The loop also ends when
    gconfig.max_tokens leaves no room for another answer. Reports the metrics tool_calls (of the conversation) and
    tool_errors (share of the calls).
    """
    text, num_calls = "", 0
    for turn in range(max_turns):
        text = await generate(episode, conversation)
        calls = _calls_of_last(episode, conversation, tools) if parse is None else parse(text)
        if not calls or turn + 1 == max_turns:
            break
        num_calls += len(calls)
        results = await asyncio.gather(*(call_tool(call, tools, timeout_s=timeout_s) for call in calls))
        messages = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        if not conversation.add_messages(await conversation.stored(messages)):
            break
    log_metric("tool_calls", num_calls)
    return text
