"""The dialect of `/v1/messages` (Anthropic)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from areal.agent.dialects.chat_completions import (
    FOREIGN,
    FORMAT,
    MAX_TOKENS,
    SAMPLING,
    answer_schema,
    checked_choice,
    content_part,
    function_tool,
    joined_content,
    joined_text,
    merged,
    part_text,
    refused_part,
    stops,
    tool_name,
    top_k,
    unique_tools,
)
from areal.agent.dialects.dialect import (
    MAX_ITEMS,
    Asked,
    Dialect,
    Fields,
    FieldTable,
    Growth,
    Json,
    Sent,
    invalid,
    named_event,
    unsupported,
)
from areal.agent.turns import (
    FinishReason,
    Message,
    TurnAnswer,
    TurnRefused,
    TurnRequest,
    TurnSettings,
    assistant_message,
    function_call,
)

FIELDS = FieldTable(
    read={
        "model": "required; every name means the policy",
        "messages": "roles user, assistant and system; content is text or blocks of the types text, image "
        "(base64), tool_use, tool_result and thinking; `is_error` has no effect; a last message of the assistant "
        "begins the answer: it is part of the prompt, and not trained",
        "system": "text or text blocks, which are joined by a newline",
        "max_tokens": "required (not for count_tokens): most generated tokens; at least 1",
        "temperature": "0 to 1; 0 is greedy",
        "top_p": "above 0, at most 1",
        "top_k": SAMPLING["top_k"],
        "stop_sequences": "at most 16; an answer that one ended has the stop_reason end_turn",
        "stream": SAMPLING["stream"],
        "tools": "with an input_schema; `strict` and hints have no effect",
        "tool_choice": "auto, any, none, or one tool; `disable_parallel_tool_use` has no effect",
        "output_config": f"`format`: json_schema; {FORMAT}; `effort` has no effect",
    },
    ignored={
        "metadata": ("object", "metadata"),
        "service_tier": ("text", "there is one tier"),
        "cache_control": ("object", "the cache needs no hint; blocks and tools may have it too"),
        "inference_geo": ("text", "there is one place"),
    },
    only={"speed": (("standard",), "there is one speed")},
    foreign={name: FOREIGN[name] for name in ("thinking", "context_management")},
    refused={"container": "is not supported", "mcp_servers": "is not supported"},
)


def parse(body: Json) -> Asked:
    return _parse(body, needs_limit=True)


def parse_count(body: Json) -> Asked:
    return _parse(body, needs_limit=False)


def _parse(body: Json, *, needs_limit: bool) -> Asked:
    fields = Fields(body)
    model = fields.required_text("model")
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS)
    if max_tokens is None and needs_limit:
        raise invalid("max_tokens", "is required")
    system = joined_text(fields.take("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    values = fields.items("messages")
    if not values:
        raise invalid("messages", "must be a list with at least one message")
    for index, value in enumerate(values):
        messages += _chat_messages(Fields(value, f"messages[{index}]"))
    prefill = ""
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        if "tool_calls" in last or "reasoning_content" in last or not messages:
            raise unsupported("messages", "the last message of the assistant may have text only, after another message")
        prefill = last["content"] or ""
    tools = unique_tools([_tool(Fields(value, f"tools[{at}]")) for at, value in enumerate(fields.items("tools"))])
    choice = _tool_choice(fields.fields("tool_choice"), tools)
    settings = TurnSettings(
        max_new_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 1),
        top_p=fields.number("top_p", 1e-9, 1),
        top_k=top_k(fields),
        stop=stops(fields.items("stop_sequences"), "stop_sequences"),
    )
    stream, schema, foreign = fields.flag("stream"), None, dict[str, str]()
    if (output := fields.fields("output_config")) is not None:
        wanted = output.fields("format")
        schema = None if wanted is None else answer_schema(wanted, nested=False)
        if output.text("effort"):
            foreign["output_config.effort"] = FOREIGN["reasoning_effort"]
        output.finish()
    fields.finish(FIELDS)
    turn = TurnRequest(
        messages=tuple(messages), tools=tools, tool_choice=choice, prefill=prefill, answer_schema=schema,
        settings=settings,
    )  # fmt: skip
    return Asked(turn=turn, model=model, stream=stream, foreign=foreign | fields.foreign)


def _chat_messages(fields: Fields) -> list[Message]:
    """One message in OpenAI's form: results of tools are messages of the role tool."""
    role = fields.required_text("role")
    content = fields.take("content")
    if content is None or not isinstance(content, str | list):
        raise invalid(fields.name("content"), "must be a text or a list of blocks")
    fields.finish()
    path = fields.name("content")
    match role:
        case "user":
            return _user_messages(content, path)
        case "assistant":
            return [_assistant(content, path)]
        case "system":
            return [{"role": "system", "content": joined_text(content, path)}]
        case _:
            raise invalid(fields.name("role"), "must be user, assistant or system")


def _user_messages(content: str | list[Any], path: str) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not 0 < len(content) <= MAX_ITEMS:
        raise invalid(path, f"must have 1 to {MAX_ITEMS} blocks")
    messages: list[Message] = []
    for index, value in enumerate(content):
        block = Fields(value, f"{path}[{index}]")
        if block.text("type") != "tool_result":
            part = content_part(value, block.path)
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"].append(part)
            else:
                messages.append({"role": "user", "content": [part]})
            continue
        call_id = block.required_text("tool_use_id")
        result = joined_content(block.take("content"), block.name("content")) or ""
        block.skip(is_error="flag", cache_control="object")
        block.finish()
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    return [
        message if message["role"] == "tool" else {**message, "content": merged(message["content"])}
        for message in messages
    ]


def _assistant(content: str | list[Any], path: str) -> Message:
    if isinstance(content, str):
        return assistant_message(content, None, [])
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, value in enumerate(content):
        block = Fields(value, f"{path}[{index}]")
        match kind := block.required_text("type"):
            case "text":
                texts.append(part_text(value, block.path))
                continue
            case "thinking":
                thoughts.append(block.text("thinking") or "")
                block.skip(signature="text")
            case "tool_use":
                call_id, name = block.required_text("id"), tool_name(block)
                calls.append(function_call(call_id, name, orjson.dumps(block.object("input") or {}).decode()))
                block.skip(cache_control="object", caller="object")
            case _:
                raise refused_part(block, kind)
        block.finish()
    return assistant_message("\n".join(texts), "\n".join(thoughts), calls)


def _tool(fields: Fields) -> Json:
    kind = fields.text("type") or "custom"
    if kind != "custom":
        raise unsupported(fields.name("type"), f"tools of type {kind[:80]!r} are not supported, only 'custom'")
    fields.skip(cache_control="object", eager_input_streaming="flag", input_examples="list")
    return function_tool(fields, "input_schema")


def _tool_choice(fields: Fields | None, tools: tuple[Json, ...]) -> str:
    if fields is None:
        return "auto"
    kind = fields.choice("type", ("auto", "any", "none", "tool"))
    if kind is None:
        raise invalid("tool_choice.type", "is required")
    fields.skip(disable_parallel_tool_use="flag")
    name = tool_name(fields) if kind == "tool" else None
    fields.finish()
    if name is not None:
        return checked_choice(name, tools, is_name=True)
    return checked_choice("required" if kind == "any" else kind, tools)


_STOP_REASONS: Mapping[FinishReason | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _blocks(asked: Asked, answer: TurnAnswer) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    text = answer.text.removeprefix(asked.turn.prefill)
    if text or not answer.tool_calls:
        blocks.append({"type": "text", "text": text})
    for call in answer.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": orjson.loads(call.arguments)}
        )
    return blocks


def _message(asked: Asked, answer: TurnAnswer, blocks: list[Json]) -> Json:
    head = {"id": answer.turn_id, "type": "message", "role": "assistant", "model": asked.model, "content": blocks}
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.token_ids)}
    return {**head, "stop_reason": _STOP_REASONS.get(answer.finish_reason), "stop_sequence": None, "usage": usage}


def reply(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> Json:
    return _message(asked, answers[0], _blocks(asked, answers[0]))


class _Stream:
    """One block is open at a time. Reasoning after the text, which is known at the end, is a further block."""

    def __init__(self, asked: Asked, sent: Sent) -> None:
        self._asked = asked
        self._growth = Growth()
        self._kinds: list[str] = []  # Types of the blocks so far; the last one is open.

    def __call__(self, answers: Sequence[TurnAnswer]) -> list[bytes]:
        return [named_event(event) for answer in answers for event in self._events(answer)]

    def _events(self, answer: TurnAnswer) -> Iterator[Json]:
        is_first, is_whole, prefill = not self._growth.has_begun, answer.finish_reason, self._asked.turn.prefill
        is_prefill = prefill.startswith(answer.text) and not is_whole
        new = self._growth.of(replace(answer, text="" if is_prefill else answer.text.removeprefix(prefill)))
        if new is None:
            return
        whole = _message(self._asked, answer, [])
        if is_first:
            start = {**whole, "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
            yield {"type": "message_start", "message": start}
        follows_text = "text" in self._kinds
        if new.reasoning and not follows_text:
            yield from self._delta("thinking", new.reasoning)
        if new.text or (is_whole and not new.tool_calls and not follows_text):
            yield from self._delta("text", new.text)
        if new.reasoning and follows_text:
            yield from self._delta("thinking", new.reasoning.removeprefix("\n"))
        if is_whole:
            for call in new.tool_calls:
                arguments = orjson.dumps(orjson.loads(call.arguments)).decode()
                yield from self._start({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
                yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": arguments})
            yield self._block_event("stop")
            delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
            yield {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
            yield {"type": "message_stop"}

    def _delta(self, kind: str, text: str) -> Iterator[Json]:
        if self._kinds[-1:] != [kind]:
            yield from self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        yield self._block_event("delta", delta={"type": f"{kind}_delta", kind: text})

    def _start(self, block: Json) -> Iterator[Json]:
        if self._kinds:
            yield self._block_event("stop")
        self._kinds.append(block["type"])
        yield self._block_event("start", content_block=block)

    def _block_event(self, name: str, **fields: Json) -> Json:
        return {"type": f"content_block_{name}", "index": len(self._kinds) - 1, **fields}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error(refused: TurnRefused) -> Json:
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    about = {"type": kind, "message": str(refused), "code": refused.code, "param": refused.param}
    return {"type": "error", "error": about}


def error_event(refused: TurnRefused) -> bytes:
    return named_event(error(refused))


DIALECT = Dialect(
    name="messages",
    parse=parse,
    reply=reply,
    stream=_Stream,
    error=error,
    error_event=error_event,
    keep_alive=named_event({"type": "ping"}),
)
