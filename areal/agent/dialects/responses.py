"""The dialect of `/v1/responses` (OpenAI)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.agent.dialects.chat_completions import (
    FOREIGN,
    FORMAT,
    MAX_TOKENS,
    NO_EFFECT,
    SAMPLING,
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
    REPLAYED,
    Asked,
    Dialect,
    Fields,
    FieldTable,
    Growth,
    Json,
    Sent,
    invalid,
    named_event,
    openai_error,
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
    assistant = _Assistant()
    if instructions:
        assistant.add({"role": "system", "content": instructions})
    if isinstance(value, str) and value:
        assistant.add({"role": "user", "content": value})
    elif isinstance(value, list) and 0 < len(value) <= MAX_ITEMS:
        for index, item in enumerate(value):
            _add_item(assistant, Fields(item, f"input[{index}]"))
    else:
        raise invalid("input", f"must be a text or a list of 1 to {MAX_ITEMS} items")
    assistant.close()
    return tuple(assistant.messages)


def _add_item(assistant: _Assistant, fields: Fields) -> None:
    kind = fields.text("type") or "message"
    match kind:
        case "message":
            _add_message(assistant, fields)
        case "function_call":
            call_id, name = fields.required_text("call_id"), tool_name(fields)
            arguments = checked_arguments(fields.text("arguments"), fields.name("arguments"))
            assistant.call(function_call(call_id, name, arguments))
            if (caller := fields.object("caller")) and caller.get("type") != "direct":
                raise unsupported(fields.name("caller"), "only direct calls are supported")
            if fields.text("namespace"):
                raise unsupported(fields.name("namespace"), "is not supported")
        case "function_call_output":
            call_id = fields.required_text("call_id")
            output = joined_content(fields.take("output"), fields.name("output"), _INPUT)
            if output is None:
                raise invalid(fields.name("output"), "is required")
            assistant.add({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            assistant.reasoning(_reasoning(fields))
        case _:
            raise refused_part(fields, kind)
    fields.skip(id="text", status="text", **REPLAYED)
    fields.finish()


def _add_message(assistant: _Assistant, fields: Fields) -> None:
    role = fields.required_text("role")
    value, path = fields.take("content"), fields.name("content")
    if value is None:
        raise invalid(path, "is required")
    match role:
        case "assistant":
            fields.skip(phase="text")
            assistant.text(joined_text(value, path, _OUTPUT) or "")
        case "user":
            assistant.add({"role": "user", "content": joined_content(value, path, _INPUT)})
        case "system" | "developer":
            assistant.add({"role": "system", "content": joined_text(value, path, _INPUT)})
        case _:
            raise invalid(fields.name("role"), "must be system, developer, user or assistant")


def _reasoning(fields: Fields) -> str:
    content = joined_text(fields.items("content"), fields.name("content"), ("reasoning_text", "text"))
    summary = joined_text(fields.items("summary"), fields.name("summary"), ("summary_text",))
    if fields.text("encrypted_content"):
        raise unsupported(fields.name("encrypted_content"), "reasoning is not encrypted here")
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
        "stream": SAMPLING["stream"],
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
    fields = Fields(body)
    model = fields.required_text("model")
    messages = input_messages(fields.take("input"), fields.text("instructions"))
    tools = openai_tools(fields.items("tools"), nested=False)
    choice = openai_tool_choice(fields.take("tool_choice"), tools, nested=False)
    settings = TurnSettings(
        max_new_tokens=fields.integer("max_output_tokens", 1, MAX_TOKENS),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 1e-9, 1),
    )
    stream = fields.flag("stream")
    if (options := fields.fields("stream_options")) is not None:
        options.skip(include_obfuscation="flag")
        options.finish()
    include = fields.items("include")
    for entry in include:
        if entry not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported("include", f"{str(entry)[:80]!r} is not supported")
    metadata, schema, foreign = fields.object("metadata"), None, dict[str, str]()
    if (text := fields.fields("text")) is not None:
        wanted = text.fields("format")
        schema = None if wanted is None else answer_schema(wanted, nested=False)
        if text.text("verbosity"):
            foreign["text.verbosity"] = FOREIGN["verbosity"]
        text.finish()
    fields.finish(FIELDS)
    turn = TurnRequest(messages=messages, tools=tools, tool_choice=choice, answer_schema=schema, settings=settings)
    repeated = {
        "instructions": body.get("instructions"), "max_output_tokens": settings.max_new_tokens,
        "metadata": metadata or {}, "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": settings.temperature, "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [], "top_p": settings.top_p,
        "text": body.get("text") or {"format": {"type": "text"}},
    }  # fmt: skip
    foreign |= fields.foreign
    return Asked(
        turn=turn, model=model, stream=stream, logprobs=_LOGPROBS in include, foreign=foreign, repeated=repeated
    )


def _items(asked: Asked, answer: TurnAnswer, sent: Sent) -> list[Json]:
    has_text, status = answer.text or not answer.tool_calls, _STATUS.get(answer.finish_reason)
    items: list[Json] = []
    if answer.reasoning:
        ended = "completed" if answer.text else status
        items.append(_reasoning_item(answer, 0, answer.reasoning) | {"status": ended})
    if has_text:
        logprobs = token_logprobs(answer, sent)["content"] if asked.logprobs else []
        items.append(_text_item(answer, answer.text, logprobs) | {"status": status})
    return [*items, *_call_items(answer)]


_STATUS: Mapping[FinishReason | None, str] = {"length": "incomplete", "stop": "completed", "tool_calls": "completed"}


def _reasoning_item(answer: TurnAnswer, number: int, text: str) -> Json:
    head = {"type": "reasoning", "id": f"rs_{answer.turn_id}" + (f"_{number}" if number else ""), "summary": []}
    return {**head, "content": [{"type": "reasoning_text", "text": text}], "status": "completed"}


def _text_item(answer: TurnAnswer, text: str, logprobs: list[Json]) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    head = {"type": "message", "id": f"msg_{answer.turn_id}", "role": "assistant"}
    return {**head, "content": [part], "status": "completed"}


def _call_items(answer: TurnAnswer) -> list[Json]:
    items: list[Json] = []
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
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
        **(asked.repeated or {}),
    }


def reply(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> Json:
    return _response(asked, answers[0], sent, _items(asked, answers[0], sent))


class _Stream:
    """One item is open at a time. Reasoning after the text, which is known at the end, is a further item."""

    def __init__(self, asked: Asked, sent: Sent) -> None:
        self._asked, self._sent = asked, sent
        self._growth = Growth()
        self._items: list[Json] = []  # Each has its content so far; the last one is open.
        self._new_logprobs: list[Json] = []  # Those of the tokens since the last delta of the text.
        self._numbers = itertools.count()

    def __call__(self, answers: Sequence[TurnAnswer]) -> list[bytes]:
        events = (event for answer in answers for event in self._events(answer))
        return [named_event({**event, "sequence_number": next(self._numbers)}) for event in events]

    def _events(self, answer: TurnAnswer) -> Iterator[Json]:
        is_first, is_whole = not self._growth.has_begun, answer.finish_reason is not None
        status = _STATUS.get(answer.finish_reason, "completed")
        if (new := self._growth.of(answer)) is None:
            return
        if self._asked.logprobs:
            self._new_logprobs += token_logprobs(new, self._sent)["content"]
        if is_first:
            started = _response(self._asked, answer, self._sent, [])
            started |= {"status": "in_progress", "usage": None, "incomplete_details": None}
            yield from ({"type": f"response.{name}", "response": started} for name in ("created", "in_progress"))
        follows_text = any(item["type"] == "message" for item in self._items)
        if new.reasoning and not follows_text:
            yield from self._delta(_reasoning_item(answer, 0, ""), new.reasoning)
        if new.text or (is_whole and (self._new_logprobs if follows_text else not new.tool_calls)):
            yield from self._delta(_text_item(answer, "", []), new.text, "completed" if new.text else status)
        if new.reasoning and follows_text:
            number = sum(item["type"] == "reasoning" for item in self._items)
            yield from self._delta(_reasoning_item(answer, number, ""), new.reasoning.removeprefix("\n"), status)
        if is_whole:
            yield from self._close(status)
            for call in _call_items(answer):
                yield from self._call(call)
            whole = _response(self._asked, answer, self._sent, self._items)
            yield {"type": f"response.{whole['status']}", "response": whole}

    def _delta(self, item: Json, text: str, status_before: str = "completed") -> Iterator[Json]:
        """Add text to `item`, a new one unless it is open. `status_before`: status of the item that is closed."""
        if not self._items or self._items[-1]["id"] != item["id"]:
            yield from self._close(status_before)
            self._items.append(item)
            yield self._item_event("added", {**item, "content": [], "status": "in_progress"})
            yield self._part_event("response.content_part.added", part=item["content"][0])
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs: Json = {}
        if "logprobs" in part:
            logprobs, self._new_logprobs = {"logprobs": self._new_logprobs}, []
            part["logprobs"] += logprobs["logprobs"]
        yield self._part_event(f"response.{part['type']}.delta", delta=text, **logprobs)

    def _close(self, status: str) -> Iterator[Json]:
        if self._items:
            item = self._items[-1]
            item["status"], part = status, item["content"][0]
            texts = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._part_event(f"response.{part['type']}.done", **texts)
            yield self._part_event("response.content_part.done", part=part)
            yield self._item_event("done", item)

    def _call(self, item: Json) -> Iterator[Json]:
        self._items.append(item)
        where = {"output_index": len(self._items) - 1, "item_id": item["id"]}
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield {"type": f"{name}.delta", **where, "delta": arguments}
        yield {"type": f"{name}.done", **where, "arguments": arguments, "name": item["name"]}
        yield self._item_event("done", item)

    def _item_event(self, name: str, item: Json) -> Json:
        return {"type": f"response.output_item.{name}", "output_index": len(self._items) - 1, "item": item}

    def _part_event(self, kind: str, **fields: Any) -> Json:
        where = {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"], "content_index": 0}
        return {"type": kind, **where, **fields}


def error_event(refused: TurnRefused) -> bytes:
    """The event of an error, with the field `error`, at which the SDK raises."""
    body = openai_error(refused)
    event = {"type": "error", "code": refused.code, "message": str(refused), "param": refused.param}
    return named_event({**event, "sequence_number": 0, **body})


DIALECT = Dialect(name="responses", parse=parse, reply=reply, stream=_Stream, error_event=error_event)
