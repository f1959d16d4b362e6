"""The dialect of `/v1/responses` (OpenAI)."""

from collections.abc import Iterator, Sequence

from areal.agent.dialects.chat_completions import NO_EFFECT, token_logprobs
from areal.agent.dialects.chat_messages import MAX_TOKENS, openai_tool_choice, openai_tools
from areal.agent.dialects.dialect import Asked, Dialect, Sent, named_event, openai_error
from areal.agent.dialects.fields import Fields, FieldTable, Json, unsupported
from areal.agent.dialects.response_items import input_messages
from areal.agent.turns import TurnAnswer, TurnRefused, TurnRequest, TurnSettings

_RUN = "the configuration of the run decides"
_STATE = "the server keeps no state between requests: send all items as input"
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
FIELDS = FieldTable(
    read={
        "input": "required: a text, or items of the types message, function_call, function_call_output and reasoning "
        "with text parts, which are joined by a newline",
        "instructions": "the system message",
        "model": "required; every name means the policy, and the reply repeats it",
        "max_output_tokens": "limit of generated tokens; at least 1",
        "temperature": "0 to 2; 0 is greedy",
        "top_p": "above 0, at most 1",
        "stream": "the whole answer is computed first, then sent as events",
        "stream_options": "`include_obfuscation` has no effect",
        "include": f"`{_LOGPROBS}`; `{_ENCRYPTED}` has no effect",
        "tools": "of type `function`; `strict` has no effect",
        "tool_choice": "auto, none, required, or one function",
        "metadata": "repeated in the reply",
    },
    ignored=NO_EFFECT,
    only={
        "top_logprobs": ((0,), "only the log-probability of the sampled token is known: use 0"),
        "truncation": (("disabled",), "a prompt is never shortened"),
        "background": ((False,), "the answer is part of the reply"),
        "text": (({}, {"format": {"type": "text"}}), "answers are not constrained to a format"),
        "reasoning": (({},), _RUN),
    },
    refused={
        "previous_response_id": _STATE,
        "conversation": _STATE,
        "prompt": "is not supported",
        "max_tool_calls": "there are no tools on the server",
        "context_management": "is not supported",
        "moderation": "is not supported",
    },
)


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
    metadata = given.object("metadata")
    given.finish(FIELDS)
    turn = TurnRequest(messages=messages, tools=tools, tool_choice=choice, settings=settings)
    repeated = {
        "instructions": body.get("instructions"),
        "max_output_tokens": settings.max_new_tokens,
        "metadata": metadata or {},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": settings.temperature,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": settings.top_p,
    }
    return Asked(turn=turn, model=model, stream=stream, logprobs=_LOGPROBS in include, repeated=repeated)


def _items(asked: Asked, answer: TurnAnswer, sent: Sent) -> list[Json]:
    """The output: reasoning, a message, calls."""
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
        "text": {"format": {"type": "text"}},
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
        yield {
            "type": "response.function_call_arguments.done",
            **where,
            "arguments": arguments,
            "name": item["name"],
        }
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
    """With `error` too, at which the SDK raises."""
    body = openai_error(refused)
    event = {"type": "error", "code": refused.code, "message": str(refused), "param": refused.param}
    return named_event({**event, "sequence_number": 0, **body})


DIALECT = Dialect(name="responses", parse=parse, reply=reply, events=events, error_event=error_event)
