"""The dialect of `/v1/responses` (OpenAI)."""

from collections.abc import Iterator, Sequence
from typing import Any

from areal.agent.dialects.chat_completions import (
    FOREIGN,
    FORMAT,
    MAX_TOKENS,
    NO_EFFECT,
    answer_schema,
    checked_arguments,
    joined_content,
    joined_text,
    openai_tool_choice,
    openai_tools,
    refused_part,
    token_logprobs,
    tool_name,
)
from areal.agent.dialects.dialect import (
    MAX_ITEMS,
    Asked,
    Dialect,
    Fields,
    FieldTable,
    Json,
    Sent,
    invalid,
    named_event,
    openai_error,
    unsupported,
)
from areal.agent.turns import (
    Message,
    TurnAnswer,
    TurnRefused,
    TurnRequest,
    TurnSettings,
    assistant_message,
    function_call,
)

# Items of the responses dialect, in OpenAI's chat form and back.

_INPUT = ("input_text", "text")
_OUTPUT = ("output_text", "input_text", "text", "refusal")


class _Assistant:
    """Collects the items of one assistant message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning: str | None = None
        self._text: str | None = None
        self._calls: list[Json] = []

    def reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.close()
        self._reasoning = f"{self._reasoning}\n{text}" if self._reasoning else text

    def text(self, text: str) -> None:
        if self._text is not None or self._calls:
            self.close()
        self._text = text

    def call(self, call: Json) -> None:
        self._calls.append(call)

    def close(self) -> None:
        if self._text is not None or self._calls or self._reasoning:
            self.messages.append(assistant_message(self._text, self._reasoning, self._calls))
        self._reasoning, self._text, self._calls = None, None, []

    def add(self, message: Message) -> None:
        self.close()
        self.messages.append(message)


def input_messages(value: Any, instructions: str | None) -> tuple[Message, ...]:
    found = _Assistant()
    if instructions:
        found.add({"role": "system", "content": instructions})
    if isinstance(value, str) and value:
        found.add({"role": "user", "content": value})
    elif isinstance(value, list) and 0 < len(value) <= MAX_ITEMS:
        for index, item in enumerate(value):
            _add_item(found, Fields(item, f"input[{index}]"))
    else:
        raise invalid("input", f"must be a text or a list of 1 to {MAX_ITEMS} items")
    found.close()
    return tuple(found.messages)


def _add_item(found: _Assistant, given: Fields) -> None:
    kind = given.text("type") or "message"
    match kind:
        case "message":
            _add_message(found, given)
        case "function_call":
            call_id, name = given.required_text("call_id"), tool_name(given)
            arguments = checked_arguments(given.text("arguments"), given.name("arguments"))
            found.call(function_call(call_id, name, arguments))
            if (caller := given.object("caller")) and caller.get("type") != "direct":
                raise unsupported(given.name("caller"), "only direct calls are supported")
            if given.text("namespace"):
                raise unsupported(given.name("namespace"), "is not supported")
        case "function_call_output":
            call_id = given.required_text("call_id")
            output = joined_content(given.take("output"), given.name("output"), _INPUT)
            if output is None:
                raise invalid(given.name("output"), "is required")
            found.add({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            found.reasoning(_reasoning(given))
        case _:
            raise refused_part(given, kind)
    given.skip(id="text", status="text")
    given.finish()


def _add_message(found: _Assistant, given: Fields) -> None:
    role = given.required_text("role")
    value, path = given.take("content"), given.name("content")
    if value is None:
        raise invalid(path, "is required")
    match role:
        case "assistant":
            given.skip(phase="text")
            found.text(joined_text(value, path, _OUTPUT) or "")
        case "user":
            found.add({"role": "user", "content": joined_content(value, path, _INPUT)})
        case "system" | "developer":
            found.add({"role": "system", "content": joined_text(value, path, _INPUT)})
        case _:
            raise invalid(given.name("role"), "must be system, developer, user or assistant")


def _reasoning(given: Fields) -> str:
    content = joined_text(given.items("content"), given.name("content"), ("reasoning_text", "text"))
    summary = joined_text(given.items("summary"), given.name("summary"), ("summary_text",))
    if given.text("encrypted_content"):
        raise unsupported(given.name("encrypted_content"), "reasoning is not encrypted here")
    return content or summary or ""


_STATE = "the server keeps no state between requests: send all items as input"
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
FIELDS = FieldTable(
    read={
        "input": "required: a text, or items of the types message, function_call, function_call_output and reasoning "
        "with text parts, which are joined by a newline",
        "instructions": "the system message",
        "model": "required; every name means the policy",
        "max_output_tokens": "most generated tokens; at least 1",
        "temperature": "0 to 2; 0 is greedy",
        "top_p": "above 0, at most 1",
        "stream": "the answer is computed first",
        "stream_options": "`include_obfuscation` has no effect",
        "include": f"`{_LOGPROBS}`; `{_ENCRYPTED}` has no effect",
        "tools": "of type `function`; `strict` has no effect",
        "tool_choice": "auto, none, required, or one function",
        "metadata": "repeated in the reply",
        "text": f"`format`: text, json_object or json_schema; {FORMAT}; `verbosity` has no effect",
    },
    ignored=NO_EFFECT,
    only={
        "top_logprobs": ((0,), "only the log-probability of the sampled token is known: use 0"),
        "truncation": (("disabled", "auto"), "a prompt is never shortened"),
        "background": ((False,), "the answer is part of the reply"),
        "reasoning": (({},), ""),
    },
    foreign={name: FOREIGN[name] for name in ("reasoning", "max_tool_calls", "moderation", "context_management")},
    refused={
        "previous_response_id": _STATE, "conversation": _STATE, "prompt": "is not supported",
    },
)  # fmt: skip


def parse(body: Json) -> Asked:
    given = Fields(body)
    model = given.required_text("model")
    messages = input_messages(given.take("input"), given.text("instructions"))
    tools = openai_tools(given.items("tools"), nested=False)
    choice = openai_tool_choice(given.take("tool_choice"), tools, nested=False)
    settings = TurnSettings(
        max_new_tokens=given.integer("max_output_tokens", 1, MAX_TOKENS),
        temperature=given.number("temperature", 0, 2),
        top_p=given.number("top_p", 1e-9, 1),
    )
    stream = given.flag("stream")
    if (options := given.fields("stream_options")) is not None:
        options.skip(include_obfuscation="flag")
        options.finish()
    include = given.items("include")
    for one in include:
        if one not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported("include", f"{str(one)[:80]!r} is not supported")
    metadata, schema, foreign = given.object("metadata"), None, dict[str, str]()
    if (text := given.fields("text")) is not None:
        wanted = text.fields("format")
        schema = None if wanted is None else answer_schema(wanted, nested=False)
        if text.text("verbosity"):
            foreign["text.verbosity"] = FOREIGN["verbosity"]
        text.finish()
    given.finish(FIELDS)
    turn = TurnRequest(messages=messages, tools=tools, tool_choice=choice, answer_schema=schema, settings=settings)
    repeated = {
        "instructions": body.get("instructions"), "max_output_tokens": settings.max_new_tokens,
        "metadata": metadata or {}, "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": settings.temperature, "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [], "top_p": settings.top_p,
        "text": body.get("text") or {"format": {"type": "text"}},
    }  # fmt: skip
    foreign |= given.foreign
    return Asked(
        turn=turn, model=model, stream=stream, logprobs=_LOGPROBS in include, foreign=foreign, repeated=repeated
    )


def _items(asked: Asked, answer: TurnAnswer, sent: Sent) -> list[Json]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Json] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        head = {"type": "reasoning", "id": f"rs_{answer.turn_id}", "summary": []}
        items.append({**head, "content": content, "status": status})
    if answer.text or not answer.tool_calls:
        part: Json = {"type": "output_text", "text": answer.text, "annotations": []}
        part["logprobs"] = token_logprobs(answer, sent)["content"] if asked.logprobs else []
        head = {"type": "message", "id": f"msg_{answer.turn_id}", "role": "assistant"}
        items.append({**head, "content": [part], "status": status})
    for index, call in enumerate(answer.tool_calls):
        head = {"type": "function_call", "id": f"fc_{answer.turn_id}_{index}", "call_id": call.call_id}
        items.append({**head, "name": call.name, "arguments": call.arguments, "status": "completed"})
    return items


def _response(asked: Asked, answer: TurnAnswer, sent: Sent, items: list[Json]) -> Json:
    is_cut = answer.finish_reason == "length"
    prompt, generated = answer.num_prompt_tokens, len(answer.token_ids)
    return {
        "id": answer.turn_id,
        "object": "response",
        "created_at": sent.created_s,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": asked.model,
        "output": items,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
        **(asked.repeated or {}),
    }


def reply(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> Json:
    return _response(asked, answers[0], sent, _items(asked, answers[0], sent))


def events(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> list[bytes]:
    answer = answers[0]
    items = _items(asked, answer, sent)
    whole = _response(asked, answer, sent, items)
    started = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    found: list[Json] = [{"type": f"response.{name}", "response": started} for name in ("created", "in_progress")]
    for index, item in enumerate(items):
        found += _item_events(index, item)
    found.append({"type": f"response.{whole['status']}", "response": whole})
    return [named_event({**event, "sequence_number": number}) for number, event in enumerate(found)]


def _item_events(index: int, item: Json) -> Iterator[Json]:
    where = {"output_index": index, "item_id": item["id"]}
    empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, **empty, "status": "in_progress"},
    }
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **where, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **where, "arguments": arguments, "name": item["name"]}
    else:
        (part,) = item["content"]
        where["content_index"] = 0
        name = f"response.{part['type']}"
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        blank = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
        yield {"type": "response.content_part.added", **where, "part": blank}
        yield {"type": f"{name}.delta", **where, "delta": part["text"], **logprobs}
        yield {"type": f"{name}.done", **where, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def error_event(refused: TurnRefused) -> bytes:
    """The event of an error, with the field `error`, at which the SDK raises."""
    body = openai_error(refused)
    event = {"type": "error", "code": refused.code, "message": str(refused), "param": refused.param}
    return named_event({**event, "sequence_number": 0, **body})


DIALECT = Dialect(name="responses", parse=parse, reply=reply, events=events, error_event=error_event)
