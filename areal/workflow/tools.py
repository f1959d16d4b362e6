"""Tools of a workflow: JSON schemas of Python functions, calls in the text of an answer, and the loop around them."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from areal.observe.episode_metrics import log_metric
from areal.workflow.conversation import Conversation
from areal.workflow.conversing import Episode, generate

Tool = Callable[..., Any]
"""A plain or async function. Plain ones run in a thread, which a time limit cannot end."""
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an answer contains."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str = ""
    """Why it cannot be executed; empty when it can."""


def tool_schema(function: Tool) -> dict[str, Any]:
    """The description of a tool that chat templates take: from its name, docstring and annotated parameters."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    properties = {one.name: _json_type(hints.get(one.name, Any)) for one in parameters}
    required = [one.name for one in parameters if one.default is one.empty]
    shape = {"type": "object", "properties": properties, "required": required}
    about = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": shape}
    return {"type": "function", "function": about}


def _json_type(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_json_type(one) for one in arguments if one is not type(None)]}
    name = _JSON_TYPES.get(origin or hint)
    if name is None:
        return {}
    return {"type": name} | ({"items": _json_type(arguments[0])} if name == "array" and arguments else {})


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in an answer of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""
    found: list[ToolCall] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
            found.append(ToolCall(name=name, arguments=arguments))
        except (ValueError, KeyError, TypeError, AttributeError):
            found.append(ToolCall(name="", problem='a call must be {"name": ..., "arguments": {...}}'))
    return found


async def call_tool(call: ToolCall, tools: Sequence[Tool], *, timeout_s: float = 30.0) -> str:
    """The result of one call as text. A call that fails gives `error: ...`, which the model reads like any result.

    Reports the metric tool_errors (0 or 1), whose mean is per call.
    """
    text, problem = "", call.problem
    tool = next((tool for tool in tools if tool.__name__ == call.name), None)
    if not problem and tool is None:
        problem = f"there is no tool {call.name!r}, only {', '.join(tool.__name__ for tool in tools)}"
    if tool is not None and not problem:
        try:
            text = _as_text(await asyncio.wait_for(_run(tool, call.arguments), timeout_s))
        except TimeoutError:
            problem = f"{call.name} did not end within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - user code: the model sees the error of its call
            problem = f"{type(error).__name__}: {error}"
    log_metric("tool_errors", float(bool(problem)))
    return f"error: {problem}" if problem else text


async def _run(tool: Tool, arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(tool, **arguments)


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


async def use_tools(
    episode: Episode,
    conversation: Conversation,
    tools: Sequence[Tool],
    *,
    max_turns: int = 8,
    parse: Callable[[str], list[ToolCall]] = parse_tool_calls,
    timeout_s: float = 30.0,
) -> str:
    """Let the policy answer until it calls no tool, at most `max_turns` times. Returns the text of the last answer.

    The calls of one answer run at the same time; each result is a message of the role `tool`. The loop also ends when
    gconfig.max_tokens leaves no room for another answer. Reports the metrics tool_calls (of the conversation) and
    tool_errors (share of the calls).
    """
    text, num_calls = "", 0
    for turn in range(max_turns):
        text = await generate(episode, conversation)
        calls = parse(text)
        if not calls or turn + 1 == max_turns:
            break
        num_calls += len(calls)
        results = await asyncio.gather(*(call_tool(call, tools, timeout_s=timeout_s) for call in calls))
        messages = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        if not conversation.add_messages(messages):
            break
    log_metric("tool_calls", num_calls)
    return text
