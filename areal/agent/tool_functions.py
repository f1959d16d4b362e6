"""Python functions as tools: their JSON schemas, and calls of them with the arguments that a model wrote."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from areal.observe.episode_metrics import log_metric
from areal.observe.spans import span

Tool = Callable[..., Any]
"""A plain or async function. Plain ones run in a thread, which a time limit cannot end."""
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


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


def parsed_arguments(text: str) -> tuple[dict[str, Any], str]:
    """The arguments of a call from their JSON text, and why they cannot be used (empty: they can)."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        return {}, f"the arguments are not JSON: {error}"
    return (arguments, "") if isinstance(arguments, dict) else ({}, "the arguments are not a JSON object")


async def answer_call(
    name: str, arguments: Mapping[str, Any], problem: str, tools: Sequence[Tool], *, timeout_s: float
) -> str | list[dict[str, Any]]:
    """What the model reads about a call: its result, or `error: ...`; `problem`: why it cannot be made, or empty.

    A result with images is a list of parts {type: image, url: data URL} and {type: text, text}; others become text.

    Reports the metric tool_errors (0 or 1), whose mean is per call.
    """
    content: str | list[dict[str, Any]] = ""
    tool = next((tool for tool in tools if tool.__name__ == name), None)
    if not problem and tool is None:
        problem = f"there is no tool {name!r}, only {', '.join(tool.__name__ for tool in tools)}"
    if tool is not None and not problem:
        try:
            with span(f"tool {name}"):
                content = _content(await asyncio.wait_for(_run(tool, arguments), timeout_s))
        except TimeoutError:
            problem = f"{name} did not end within {timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 - user code: the model sees the error of its call
            problem = f"{type(error).__name__}: {error}"
    log_metric("tool_errors", float(bool(problem)))
    return f"error: {problem}" if problem else content


async def _run(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(tool, **arguments)


def _content(result: Any) -> str | list[dict[str, Any]]:
    parts: list[Any] = result if isinstance(result, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    if "image" in kinds and set(kinds) <= {"image", "text"}:
        return parts
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
