"""From the text of an answer to reasoning, text and tool calls; the style that a chat template implies."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from areal.agent.tool_calls.harmony import gpt_oss
from areal.agent.tool_calls.json_styles import deepseek, hermes, kimi, llama3_json, mistral
from areal.agent.tool_calls.pieces import Broken, Call, Parser, Piece, Schemas, Thought
from areal.agent.tool_calls.pythonic import pythonic
from areal.agent.tool_calls.text_styles import deepseek_dsml, glm, qwen3_coder
from areal.agent.turns import ToolCall
from areal.api.errors import ConfigError


def no_calls(text: str, schemas: Schemas) -> list[Piece]:
    """A template without tools: everything is text."""
    return [text]


STYLES: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "deepseek": deepseek,
    "deepseek_dsml": deepseek_dsml,
    "glm": glm,
    "kimi": kimi,
    "gpt_oss": gpt_oss,
    "pythonic": pythonic,
    "none": no_calls,
}
_MARKERS = (
    ("<|channel|>", "gpt_oss"),
    ("｜DSML｜", "deepseek_dsml"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>", "llama3_json"),
)
"""The first marker that a chat template contains decides."""
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStyle:
    """How the answers of a model are written. Made once for a chat template."""

    name: str
    reasoning: tuple[str, str] | None
    """Markers before and after reasoning; None: the style has its own, or none."""
    special_tokens: re.Pattern[str] | None
    """What is removed from text and reasoning."""

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
    """The parts of an answer."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    num_malformed: int
    """Calls that cannot be read. They are part of the text."""


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
