"""Splits the text of an answer into reasoning, text and tool calls, by the style of the model's chat template."""

import ast
import asyncio
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import orjson

from areal.agent.turns import ToolCall
from areal.api.errors import ConfigError
from areal.observe.spans import span
from areal.observe.step_files import log_metric

# Python functions as tools: their JSON schemas, and calls of them with the arguments that a model wrote.

Tool = Callable[..., Any]  # A plain or async function. Plain ones run in a thread, which a time limit cannot end.
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


# The pieces that an answer is made of, and the rules by which text becomes a call. No function here raises.


class Call(NamedTuple):
    name: str
    arguments: str  # JSON text of an object.
    call_id: str = ""  # The id that the answer itself contains; empty: none.


class Broken(NamedTuple):
    text: str


class Thought(NamedTuple):
    text: str


Piece = str | Call | Broken | Thought  # A str is text for the reader.
Schemas = Mapping[str, Mapping[str, Any]]  # Name of a tool -> its parameters: name -> JSON schema.
Parser = Callable[[str, Schemas], list[Piece]]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_WHOLE = json.JSONDecoder(parse_constant=lambda name: _not_json(name))


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parsed_json(text: str) -> Any:
    """The JSON value of a text; None when it is not JSON (or null)."""
    try:
        return _WHOLE.decode(text)
    except (ValueError, RecursionError):
        return None


def leading_json(text: str, start: int) -> tuple[Any, int]:
    """(the JSON value at `start`, the index after it); (None, start) when there is none."""
    try:
        return _WHOLE.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def checked_call(name: Any, arguments: Any, *, source: str, call_id: str = "") -> Call | Broken:
    """A call, unless its name or its arguments cannot be sent to a client. `source`: its text in the answer."""
    if isinstance(arguments, str):
        arguments = parsed_json(arguments) if arguments.strip() else {}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        return Broken(source)
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        orjson.dumps(orjson.loads(text))  # replies are written by orjson, which refuses lone surrogates and deep values
    except (ValueError, TypeError, RecursionError):
        return Broken(source)
    return Call(name, text, call_id)


def json_call(value: Any, *, source: str) -> Call | Broken:
    """A call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        return Broken(source)
    arguments = value.get("arguments", value.get("parameters"))
    call_id = value.get("id")
    call_id = call_id if isinstance(call_id, str) and _NAME.fullmatch(call_id) else ""
    return checked_call(value.get("name"), {} if arguments is None else arguments, source=source, call_id=call_id)


class Block(NamedTuple):
    inner: str
    source: str  # With its markers.


def blocks(text: str, start: str, end: str) -> Iterator[str | Block]:
    """The text outside of the markers, and the blocks between them. The last block may lack its end marker."""
    position = 0
    while (first := text.find(start, position)) >= 0:
        yield text[position:first]
        last = text.find(end, first + len(start))
        position = len(text) if last < 0 else last + len(end)
        yield Block(text[first + len(start) : len(text) if last < 0 else last], text[first:position])
    yield text[position:]


def typed_value(text: str, schema: Any) -> Any:
    """The value of an argument that is written as plain text: by its schema, else JSON where it is JSON.

    A value of the wrong type stays text: the tool reports it, and the policy reads the report.
    """
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds and not (len(kinds) > 1 and text.strip() == "null"):
        return text
    found = parsed_json(text.strip())
    if found is None and text.strip() != "null":
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    return found


# The answers of gpt-oss (harmony): messages with a channel and, for calls, a recipient.

_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
_MESSAGE = "<|message|>"


def gpt_oss(text: str, schemas: Schemas) -> list[Piece]:
    """Channel analysis is reasoning, final and commentary are text; a message `to=functions.NAME` is a call."""
    pieces: list[Piece] = []
    position = 0
    while position < len(text):
        head_end = text.find(_MESSAGE, position)
        if head_end < 0:
            pieces.append(_END.sub("", text[position:]))
            break
        body_start = head_end + len(_MESSAGE)
        end = _END.search(text, body_start)
        body = text[body_start : end.start() if end else len(text)]
        pieces.append(_message(text[position:head_end], body, schemas))
        position = len(text) if end is None else end.end()
    return pieces


def _message(head: str, body: str, schemas: Schemas) -> Piece:
    channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
    if recipient is not None and recipient[1] != "user":
        source = f"{head}{_MESSAGE}{body}"
        namespace, _, name = recipient[1].partition(".")
        return checked_call(name, body, source=source) if namespace == "functions" else Broken(source)
    if channel is not None and channel[1] == "analysis":
        return Thought(body)
    return body


# Styles whose calls are JSON between markers: hermes, llama3_json, mistral, deepseek, kimi.


def hermes(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return [
        json_call(parsed_json(part.inner.strip()), source=part.source) if isinstance(part, Block) else part
        for part in blocks(text, "<tool_call>", "</tool_call>")
    ]


_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BETWEEN = re.compile(r"[\s;,]*")


def llama3_json(text: str, schemas: Schemas) -> list[Piece]:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, as the whole answer or after <|python_tag|>."""
    before, tag, calls = text.partition(_PYTHON_TAG)
    if not tag:
        if not _LOOKS_LIKE_CALL.match(text):
            return [text]
        before, calls = "", text
    pieces: list[Piece] = [before]
    position = 0
    while position < len(calls):
        gap = _BETWEEN.match(calls, position)
        first = gap.end() if gap else position
        if first >= len(calls):
            break
        value, end = leading_json(calls, first)
        if end == first:
            pieces.append(Broken((tag if first == position == 0 else "") + calls[position:]))
            break
        pieces.append(json_call(value, source=calls[position:end]))
        position = end
    return pieces


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\]([A-Za-z0-9]{1,64}))?\[ARGS\]\s*")


def mistral(text: str, schemas: Schemas) -> list[Piece]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`, repeated."""
    first, *rest = text.split(_MISTRAL)
    pieces: list[Piece] = [first]
    for part in rest:
        named = _MISTRAL_CALL.match(part)
        start = named.end() if named else len(part) - len(part.lstrip())
        value, end = leading_json(part, start)
        source = _MISTRAL + part[:end]
        if named and isinstance(value, dict):
            pieces.append(checked_call(named[1], value, source=source, call_id=named[2] or ""))
        elif not named and isinstance(value, list) and value:
            pieces += [json_call(one, source=_MISTRAL + str(one)) for one in value]
        elif not named and isinstance(value, dict):
            pieces.append(json_call(value, source=source))
        else:
            pieces.append(Broken(_MISTRAL + part))
            continue
        pieces.append(part[end:])
    return pieces


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?", re.DOTALL)


def deepseek(text: str, schemas: Schemas) -> list[Piece]:
    """The calls of DeepSeek V3, R1 and V3.1: `NAME<｜tool▁sep｜>{...}`, or a name and a fenced block of JSON."""
    text = text.replace(_CALLS_BEGIN, "").replace(_CALLS_END, "")
    return [_deepseek_call(part) if isinstance(part, Block) else part for part in blocks(text, _CALL_BEGIN, _CALL_END)]


def _deepseek_call(block: Block) -> Call | Broken:
    name, separator, arguments = block.inner.partition("<｜tool▁sep｜>")
    if name.strip() == "function" and "```" in arguments:
        name, _, arguments = arguments.partition("\n")
        if fenced := _FENCED.fullmatch(arguments):
            arguments = fenced[1]
    if not separator:
        return Broken(block.source)
    return checked_call(name.strip(), arguments, source=block.source)


_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([A-Za-z0-9_.-]{1,128}?)(?::(\d{1,9}))?\s*")


def kimi(text: str, schemas: Schemas) -> list[Piece]:
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)."""
    for marker in ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"):
        text = text.replace(marker, "")
    return [
        _kimi_call(part) if isinstance(part, Block) else part
        for part in blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    ]


def _kimi_call(block: Block) -> Call | Broken:
    head, separator, arguments = block.inner.partition("<|tool_call_argument_begin|>")
    named = _KIMI_NAME.fullmatch(head)
    if not separator or not named:
        return Broken(block.source)
    return checked_call(named[1], arguments, source=block.source, call_id=head.strip() if named[2] else "")


# Calls as a Python list, `[f(a=1), g(b="x")]` (Llama 4). The text is parsed, never executed.

_MAX_LENGTH = 100_000
_PYTHON_MARKERS = ("<|python_start|>", "<|python_end|>")


def pythonic(text: str, schemas: Schemas) -> list[Piece]:
    """One list of calls with keyword arguments, as the whole answer."""
    source = text
    is_marked = _PYTHON_MARKERS[0] in text
    for marker in _PYTHON_MARKERS:
        source = source.replace(marker, "")
    source = source.strip()
    if not (source.startswith("[") and source.endswith("]")):
        return [Broken(text)] if is_marked else [text]
    try:
        tree = ast.parse(source, mode="eval").body if len(source) <= _MAX_LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.List) or not tree.elts or not all(isinstance(one, ast.Call) for one in tree.elts):
        looks_like_call = is_marked or (isinstance(tree, ast.List) and any(isinstance(x, ast.Call) for x in tree.elts))
        return [Broken(text)] if looks_like_call else [text]
    return [_python_call(one, source) for one in tree.elts if isinstance(one, ast.Call)]


def _python_call(node: ast.Call, source: str) -> Call | Broken:
    text = ast.get_source_segment(source, node) or source
    try:
        arguments = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
        name = ast.unparse(node.func)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Broken(text)
    if node.args or None in arguments:
        return Broken(text)
    return checked_call(name, arguments, source=text)


# Styles whose arguments are plain text between markers: qwen3_coder, glm, deepseek_dsml. Schemas give the types.


class _Form(NamedTuple):
    start: str
    end: str
    call: re.Pattern[str]  # What lies between: name, body.
    argument: re.Pattern[str]
    """One argument of the body: key, value, and is_text where the style says whether the value is text or JSON."""


def _pieces(text: str, schemas: Schemas, form: _Form) -> list[Piece]:
    return [
        _call(part, schemas, form) if isinstance(part, Block) else part for part in blocks(text, form.start, form.end)
    ]


def _call(block: Block, schemas: Schemas, form: _Form) -> Call | Broken:
    call = form.call.fullmatch(block.inner)
    if not call:
        return Broken(block.source)
    name, body, position, arguments = call["name"].strip(), call["body"], 0, {}
    schema = schemas.get(name, {})
    while body[position:].strip():
        found = form.argument.match(body, position)
        if not found:
            return Broken(block.source)
        key, value = found["key"].strip(), found["value"]
        match found.groupdict().get("is_text"):
            case "true":
                arguments[key] = value
            case "false":
                arguments[key] = parsed_json(value.strip())
            case _:
                arguments[key] = typed_value(value, schema.get(key))
        position = found.end()
    return checked_call(name, arguments, source=block.source)


_QWEN3_CODER = _Form(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>(?P<body>.*?)(?:</function>\s*|\Z)", re.DOTALL),
    re.compile(  # one newline on each side of a value belongs to the format
        r"\s*<parameter=(?P<key>[^>\n]{1,128})>\n?(?P<value>.*?)\n?(?:</parameter>\s*|(?=<parameter=)|\Z)", re.DOTALL
    ),
)
_GLM = _Form(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]{1,128})\s*(?P<body>.*)", re.DOTALL),
    re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL),
)
_DSML = _Form(
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    re.compile(r'\s*name="(?P<name>[^"\n]{1,128})">(?P<body>.*)', re.DOTALL),
    re.compile(
        r'\s*<｜DSML｜parameter name="(?P<key>[^"\n]{1,128})"(?: string="(?P<is_text>true|false)")?>'
        r"(?P<value>.*?)</｜DSML｜parameter>\s*",
        re.DOTALL,
    ),
)


def qwen3_coder(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder, Qwen3.5)."""
    return _pieces(text, schemas, _QWEN3_CODER)


def glm(text: str, schemas: Schemas) -> list[Piece]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` (GLM 4.5 and later)."""
    return _pieces(text, schemas, _GLM)


def deepseek_dsml(text: str, schemas: Schemas) -> list[Piece]:
    """`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE` ... (DeepSeek V3.2)."""
    return _pieces(re.sub(r"</?｜DSML｜(?:function_calls|tool_calls)>", "", text), schemas, _DSML)


# From the text of an answer to reasoning, text and tool calls; the style that a chat template implies.


def no_calls(text: str, schemas: Schemas) -> list[Piece]:
    """A template without tools: everything is text."""
    return [text]


STYLES: dict[str, Parser] = {
    "hermes": hermes, "qwen3_coder": qwen3_coder, "llama3_json": llama3_json, "mistral": mistral,
    "deepseek": deepseek, "deepseek_dsml": deepseek_dsml, "glm": glm, "kimi": kimi, "gpt_oss": gpt_oss,
    "pythonic": pythonic, "none": no_calls,
}  # fmt: skip
_MARKERS = (
    ("<|channel|>", "gpt_oss"), ("｜DSML｜", "deepseek_dsml"), ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"), ("[TOOL_CALLS]", "mistral"), ("<arg_key>", "glm"), ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"), ("<|python_start|>", "pythonic"), ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)  # fmt: skip
"""The first marker that a chat template contains decides."""
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How the answers of a model are written. Made once for a chat template."""

    name: str
    reasoning: tuple[str, str] | None  # Markers before and after reasoning; None: the style has its own, or none.
    special_tokens: re.Pattern[str] | None  # What is removed from text and reasoning.

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether an answer after a prompt with this end begins inside of reasoning."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning[0])


def style_of(name: str, chat_template: Any, special_tokens: Iterable[str] = ()) -> AnswerStyle:
    """The style with a name, or for auto the one that a chat template implies; its markers of reasoning.

    `special_tokens`: those of the tokenizer, as text (`special_tokens`). ConfigError: there is no
    such style.
    """
    # A template is a text, a table of texts by name, or None.
    chat_template = str(chat_template or "")
    if name == "auto":
        name = next((style for marker, style in _MARKERS if marker in chat_template), "none")
    if name not in STYLES:
        message = f"there is no style of tool calls {name!r}: use auto, {', '.join(STYLES)}"
        raise ConfigError(message, code="config.conflict")
    reasoning = next((pair for pair in _REASONING if pair[1] in chat_template), None)
    longest_first = sorted({token for token in special_tokens if token}, key=len, reverse=True)
    removed = re.compile("|".join(re.escape(token) for token in longest_first)) if longest_first else None
    return AnswerStyle(name=name, reasoning=None if name == "gpt_oss" else reasoning, special_tokens=removed)


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens of a Hugging Face tokenizer, as text; empty for another one."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.special]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAnswer:
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    num_malformed: int  # Calls that cannot be read. They are part of the text.


def split_answer(
    text: str,
    token_ids: Sequence[int],
    style: AnswerStyle,
    *,
    tools: Sequence[dict[str, Any]],
    turn_id: str,
    in_reasoning: bool = False,
) -> SplitAnswer:
    """Split an answer. Never raises, for any text.

    `text`: the answer with its special tokens. `turn_id` and `token_ids` give calls without an id a unique one.
    `tools`: those of the request, in OpenAI's form; without tools nothing is a call. `in_reasoning`: the prompt has
    opened the reasoning (`AnswerStyle.opens_reasoning`).
    """
    reasoning, rest = _without_reasoning(text, style, in_reasoning)
    schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    parse = STYLES[style.name] if tools or style.name == "gpt_oss" else no_calls
    pieces = parse(rest, schemas)
    if not tools:
        pieces = [Broken(piece.arguments) if isinstance(piece, Call) else piece for piece in pieces]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    thoughts = [reasoning, *(piece.text for piece in pieces if isinstance(piece, Thought))]
    spoken = "".join(_spoken(piece, style) for piece in pieces)
    spoken = spoken.strip() if calls else spoken.lstrip("\n") if any(thoughts) else spoken
    return SplitAnswer(
        text=spoken,
        reasoning="\n".join(_cleaned(thought, style).strip("\n") for thought in thoughts if thought),
        tool_calls=_with_ids(calls, turn_id, token_ids),
        num_malformed=sum(isinstance(piece, Broken) for piece in pieces),
    )


def _with_ids(calls: Sequence[Call], turn_id: str, token_ids: Sequence[int]) -> tuple[ToolCall, ...]:
    """The calls with unique ids: the one that the answer contains, else a new one."""
    found: dict[str, ToolCall] = {}
    for index, call in enumerate(calls):
        is_free = call.call_id and call.call_id not in found
        call_id = call.call_id if is_free else _new_id(turn_id, token_ids, index)
        found[call_id] = ToolCall(call_id=call_id, name=call.name, arguments=call.arguments)
    return tuple(found.values())


def _without_reasoning(text: str, style: AnswerStyle, in_reasoning: bool) -> tuple[str, str]:
    """(reasoning, what follows it). Only reasoning at the start counts."""
    if style.reasoning is None:
        return "", text
    start, end = style.reasoning
    before, opened, after = text.partition(start)
    if opened and not before.strip():
        inner = after
    elif in_reasoning or (end in text and not opened):
        inner = text
    else:
        return "", text
    reasoning, _, rest = inner.partition(end)
    return reasoning, rest


def _spoken(piece: Piece, style: AnswerStyle) -> str:
    match piece:
        case str():
            return _cleaned(piece, style)
        case Broken():
            return _cleaned(piece.text, style)
        case _:
            return ""


def _cleaned(text: str, style: AnswerStyle) -> str:
    return text if style.special_tokens is None else style.special_tokens.sub("", text)


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _new_id(turn_id: str, token_ids: Sequence[int], index: int) -> str:
    """Nine letters and digits, the form that the strictest chat templates (Mistral) require."""
    seed = f"{turn_id} {index} {','.join(map(str, token_ids))}"
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8])
    return "".join(_DIGITS[number // 62**power % 62] for power in range(9))


__all__ = ["STYLES", "AnswerStyle", "SplitAnswer", "special_tokens", "split_answer", "style_of"]
