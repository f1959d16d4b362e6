"""The dialect of `/v1/chat/completions` (OpenAI)."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import orjson

from areal.agent.dialects.dialect import (
    DONE,
    MAX_ITEMS,
    REPLAYED,
    Asked,
    Dialect,
    Fields,
    FieldTable,
    Growth,
    Json,
    Kind,
    Sent,
    data_event,
    invalid,
    unsupported,
)
from areal.agent.turns import (
    Message,
    TurnAnswer,
    TurnRefused,
    TurnRequest,
    TurnSettings,
    answer_message,
    assistant_message,
    function_call,
)
from areal.api.config import GenerationHyperparameters

# Messages, tools and sampling settings in OpenAI's form: checked, and brought to the form of `turns.Message`.

MAX_ANSWERS = 128
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MEDIA = {
    *("image", "image_url", "input_image", "input_audio", "audio", "file", "input_file", "document", "video"),
    *("video_url", "search_result", "container_upload"),
}


def joined_text(value: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> str | None:
    """Content as one text: a text, or parts of the `kinds`, which are joined by a newline. None stays None."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise invalid(path, f"must be a text or a list of at most {MAX_ITEMS} parts")
    return "\n".join(part_text(part, f"{path}[{index}]", kinds) for index, part in enumerate(value))


def part_text(value: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> str:
    part = Fields(value, path)
    kind = part.required_text("type")
    if kind not in kinds:
        raise refused_part(part, kind)
    text = part.text("refusal" if kind == "refusal" else "text")
    if text is None:
        raise invalid(part.name("text"), "is required")
    part.skip(
        annotations="list", logprobs="list", citations="list", cache_control="object", prompt_cache_breakpoint="object"
    )
    part.finish()
    return text


def joined_content(value: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> str | list[Json] | None:
    """The text of content; with image parts a list in the form of `turns.Message`."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise invalid(path, f"must be a text or a list of at most {MAX_ITEMS} parts")
    return merged([content_part(part, f"{path}[{index}]", kinds) for index, part in enumerate(value)])


def merged(parts: list[Json]) -> str | list[Json]:
    """Parts whose neighbouring texts are joined by a newline; one text instead of a list without images."""
    blocks: list[Json] = []
    for kind, group in groupby(parts, lambda part: part["type"]):
        if kind == "text":
            blocks.append({"type": "text", "text": "\n".join(part["text"] for part in group)})
        else:
            blocks += group
    if all(part["type"] == "text" for part in blocks):
        return blocks[0]["text"] if blocks else ""
    return blocks


def content_part(value: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> Json:
    """A text part, or an image part of any dialect."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("image_url", "input_image", "image"):
        return {"type": "text", "text": part_text(value, path, kinds)}
    part = Fields(value, path)
    part.skip(type="text", detail="text", cache_control="object", prompt_cache_breakpoint="object")
    if kind == "image":  # Anthropic's
        source, name = part.fields("source"), part.name("source")
        if source is None:
            raise invalid(name, "is required")
        url = ""
        if source.text("type") == "base64":
            url = f"data:{source.text('media_type') or ''};base64,{source.text('data') or ''}"
            source.finish()
    elif kind == "image_url":
        source = part.fields("image_url")
        url, name = source.text("url") if source else None, part.name("image_url.url")
        if source:
            source.skip(detail="text")
            source.finish()
    else:
        url, name = part.text("image_url"), part.name("image_url")
    if url is None:
        raise invalid(name, "is required")
    if not url.startswith("data:image/") or ";base64," not in url[:64]:
        message = f"{name}: images are taken as data URLs only (data:image/png;base64,...), none is downloaded"
        raise TurnRefused(message, code="agent.remote_image", status=400, param=name)
    part.finish()
    return {"type": "image", "url": url}


def refused_part(part: Fields, kind: str) -> TurnRefused:
    """Why a part of content is not taken."""
    path = part.name("type")
    if kind in _MEDIA:
        message = f"{path}: parts of type {kind!r} are not supported, only text"
        return TurnRefused(message, code="agent.multimodal", status=400, param=path)
    return unsupported(path, f"parts of type {kind[:80]!r} are not supported here")


def chat_messages(values: list[Any], path: str = "messages") -> tuple[Message, ...]:
    if not values:
        raise invalid(path, "must be a list with at least one message")
    return tuple(_chat_message(Fields(value, f"{path}[{index}]")) for index, value in enumerate(values))


def _chat_message(fields: Fields) -> Message:
    role = fields.required_text("role")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    value, path = fields.take("content"), fields.name("content")
    content = None if role in ("user", "tool") else joined_text(value, path, kinds)
    name = fields.text("name")
    match role:
        case "user":
            message = {"role": "user", "content": _required(joined_content(value, path), fields)}
        case "system" | "developer":
            message = {"role": "system", "content": _required(content, fields)}
        case "assistant":
            message = _assistant_message(fields, content)
        case "tool":
            call_id = fields.required_text("tool_call_id")
            message = {
                "role": "tool",
                "tool_call_id": call_id,
                "content": _required(joined_content(value, path), fields),
            }
        case "function":
            raise unsupported(fields.name("role"), "functions are replaced by tools: use the role 'tool'")
        case _:
            raise invalid(fields.name("role"), "must be system, developer, user, assistant or tool")
    fields.finish()
    return message if name is None else {**message, "name": name}


def _required(content: str | list[Json] | None, fields: Fields) -> str | list[Json]:
    if content is None:
        raise invalid(fields.name("content"), "is required")
    return content


def _assistant_message(fields: Fields, content: str | None) -> Message:
    fields.skip(refusal="text", annotations="list", **REPLAYED)
    for name in ("audio", "function_call"):
        if fields.take(name) is not None:
            raise unsupported(fields.name(name), "is not supported")
    reasoning = fields.text("reasoning_content")
    calls = [
        _tool_call(Fields(value, f"{fields.name('tool_calls')}[{index}]"))
        for index, value in enumerate(fields.items("tool_calls"))
    ]
    if content is None and not calls and not reasoning:
        content = ""  # an answer without text is delivered as null
    return assistant_message(content, reasoning, calls)


def _tool_call(fields: Fields) -> Json:
    if (kind := fields.text("type") or "function") != "function":
        raise unsupported(fields.name("type"), f"calls of type {kind[:80]!r} are not supported, only 'function'")
    fields.skip(index="number")  # of a call that was put together from a stream
    call_id = fields.required_text("id")
    function = _nested(fields)
    name = tool_name(function)
    arguments = checked_arguments(function.text("arguments"), function.name("arguments"))
    function.finish()
    return function_call(call_id, name, arguments)


def checked_arguments(text: str | None, path: str) -> str:
    """The JSON text of an object; no text is the empty object."""
    if not text:
        return "{}"
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError):  # TypeError: it is too deep
        value = None
    if not isinstance(value, dict):
        raise invalid(path, "must be the JSON text of an object")
    return text


def tool_name(fields: Fields) -> str:
    name = fields.required_text("name")
    if not _NAME.fullmatch(name):
        raise invalid(fields.name("name"), "must be 1 to 128 letters, digits, '_', '-' or '.'")
    return name


def function_tool(fields: Fields, parameters: str = "parameters") -> Json:
    """A tool from an object with name, description and `parameters`, in OpenAI's form."""
    function: Json = {"name": tool_name(fields), "description": fields.text("description") or ""}
    function["parameters"] = fields.object(parameters) or {"type": "object", "properties": {}}
    fields.skip(strict="flag")  # answers are not constrained
    fields.finish()
    return {"type": "function", "function": function}


def openai_tools(values: list[Any], *, nested: bool) -> tuple[Json, ...]:
    """The tools of a request in OpenAI's dialects; `nested`: each in its field `function`, as in chat completions."""
    tools: list[Json] = []
    for index, value in enumerate(values):
        fields = Fields(value, f"tools[{index}]")
        kind = fields.required_text("type")
        if kind != "function":
            raise unsupported(fields.name("type"), f"tools of type {kind[:80]!r} are not supported, only 'function'")
        tools.append(function_tool(_nested(fields) if nested else fields))
    return unique_tools(tools)


def _nested(fields: Fields) -> Fields:
    function = fields.fields("function")
    if function is None:
        raise invalid(fields.name("function"), "is required")
    fields.finish()
    return function


def unique_tools(tools: list[Json]) -> tuple[Json, ...]:
    names: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise invalid("tools", f"two tools have the name {name!r}")
        names.add(name)
    return tuple(tools)


def checked_choice(choice: str, tools: tuple[Json, ...], *, is_name: bool = False) -> str:
    """A tool choice of `TurnRequest`; `is_name`: it is the name of one tool."""
    names = {tool["function"]["name"] for tool in tools}
    if is_name and choice not in names:
        raise invalid("tool_choice", f"no tool has the name {choice[:80]!r}")
    if is_name and choice in ("auto", "none", "required"):
        raise invalid("tool_choice", f"a tool cannot be chosen by the name {choice!r}: rename it")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "requires a tool, but the request has none")
    return choice


def openai_tool_choice(value: Any, tools: tuple[Json, ...], *, nested: bool) -> str:
    """The field `tool_choice` of OpenAI's dialects; `nested` as in `openai_tools`."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise invalid("tool_choice", "must be auto, none, required or an object that names a tool")
        return checked_choice(value, tools)
    fields = Fields(value, "tool_choice")
    if fields.required_text("type") != "function":
        raise unsupported("tool_choice.type", "only the choice of one tool of type 'function' is supported")
    function = _nested(fields) if nested else fields
    name = tool_name(function)
    function.finish()
    return checked_choice(name, tools, is_name=True)


def stops(value: Any, path: str = "stop") -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS:
        raise invalid(path, f"must be a text or a list of at most {MAX_STOPS} texts")
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts):
        raise invalid(path, f"must be texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(texts)


_RUN = "the configuration of the run decides"
FORMAT = "not enforced: `format_errors` counts other answers"
FOREIGN: Mapping[str, str] = {
    "reasoning_effort": _RUN, "verbosity": _RUN, "chat_template_kwargs": _RUN, "thinking": _RUN, "reasoning": _RUN,
    "enable_thinking": _RUN, "min_p": _RUN, "repetition_penalty": _RUN, "min_tokens": _RUN, "max_tool_calls": _RUN,
    "prediction": "is no input of a policy",
    "moderation": "nothing is moderated", "context_management": "a prompt is never shortened",
}  # fmt: skip
"""Fields that OpenAI's dialects know, or other servers."""
NO_EFFECT: Mapping[str, tuple[Kind, str]] = {
    "user": ("text", "metadata"),
    "safety_identifier": ("text", "metadata"),
    "store": ("flag", "nothing is stored outside of the run"),
    "service_tier": ("text", "there is one tier"),
    "prompt_cache_key": ("text", "the cache needs no hint"),
    "prompt_cache_retention": ("text", "the cache needs no hint"),
    "prompt_cache_options": ("object", "the cache needs no hint"),
    "parallel_tool_calls": ("flag", "the policy decides how many tools it calls"),
}
"""Fields that chat completions and responses accept and that change nothing."""
SAMPLING: Mapping[str, str] = {
    "temperature": "0 to 2; 0 is greedy", "top_p": "above 0, at most 1",
    "top_k": "extension: at least 1; -1 and 0: all tokens",
    "frequency_penalty": "-2 to 2", "presence_penalty": "-2 to 2; native servers only", "seed": "0 to 2^63 - 1",
    "stop": "one text or at most 16",
    "n": "1 to 128 answers; each is a leaf of the transcript",
    "stream": "calls come at the end",
    "stream_options": "`include_usage`; `include_obfuscation` has no effect",
    "return_token_ids": "extension: `prompt_token_ids`, and `token_ids` of each choice",
}  # fmt: skip
"""Fields of chat completions and completions."""
FIELDS = FieldTable(
    read={
        "messages": "roles system, developer (read as system), user, assistant, tool; content is text or text parts, "
        "which are joined by a newline; `reasoning_content` of assistant messages is read",
        "model": "required; every name means the policy",
        "max_tokens": "most generated tokens; at least 1",
        "max_completion_tokens": "as max_tokens; the smaller one counts",
        **SAMPLING,
        "logprobs": "log-probabilities of the generated tokens, also of reasoning and tool calls",
        "tools": "of type `function`; `strict` has no effect",
        "tool_choice": "auto, none, required, or one function",
        "response_format": f"text, json_object or json_schema; {FORMAT}",
    },
    ignored={**NO_EFFECT, "metadata": ("object", "metadata")},
    only={
        "top_logprobs": ((0,), "only the log-probability of the sampled token is known: use 0"),
        "modalities": ((["text"],), "only text is supported"),
    },
    foreign=FOREIGN,
    refused={
        "audio": "only text is supported", "functions": "is replaced by tools",
        "function_call": "is replaced by tool_choice", "web_search_options": "is not supported",
    },
)  # fmt: skip


def parse(body: Json) -> Asked:
    fields = Fields(body)
    model = fields.required_text("model")
    messages = chat_messages(fields.items("messages"))
    tools = openai_tools(fields.items("tools"), nested=True)
    choice = openai_tool_choice(fields.take("tool_choice"), tools, nested=True)
    settings = openai_settings(fields, ("max_tokens", "max_completion_tokens"))
    num_answers = fields.integer("n", 1, MAX_ANSWERS) or 1
    stream, include_usage = stream_fields(fields)
    logprobs, token_ids = fields.flag("logprobs"), fields.flag("return_token_ids")
    wanted = fields.fields("response_format")
    schema = None if wanted is None else answer_schema(wanted, nested=True)
    fields.finish(FIELDS)
    turn = TurnRequest(
        messages=messages, tools=tools, tool_choice=choice, answer_schema=schema, num_answers=num_answers,
        settings=settings, shows_prompt=token_ids,
    )  # fmt: skip
    return Asked(
        turn=turn, model=model, stream=stream, include_usage=include_usage, logprobs=logprobs, token_ids=token_ids,
        foreign=fields.foreign,
    )  # fmt: skip


def answer_schema(fields: Fields, *, nested: bool) -> Json | None:
    """The JSON schema of a wanted format; None: text. `nested`: in its field `json_schema`, as in chat completions."""
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    schema: Json | None = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        inner = fields.fields("json_schema") if nested else fields
        if inner is None:
            raise invalid(fields.name("json_schema"), "is required")
        schema = inner.object("schema") or {}
        inner.skip(name="text", description="text", strict="flag")
        inner.finish()
    fields.finish()
    return schema


def openai_settings(fields: Fields, limits: tuple[str, ...], default: int | None = None) -> TurnSettings:
    """The sampling settings of OpenAI's dialects; the smallest of the fields `limits` counts, without one `default`."""
    sizes = [size for name in limits if (size := fields.integer(name, 1, MAX_TOKENS)) is not None]
    return TurnSettings(
        max_new_tokens=min(sizes, default=default),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 1e-9, 1),
        top_k=top_k(fields),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        seed=fields.integer("seed", 0, MAX_SEED),
        stop=stops(fields.take("stop")),
    )


def top_k(fields: Fields) -> int | None:
    size = fields.integer("top_k", -1, MAX_TOKENS)
    return GenerationHyperparameters().top_k if size in (-1, 0) else size  # the default is all tokens


def stream_fields(fields: Fields) -> tuple[bool, bool]:
    stream, include_usage = fields.flag("stream"), False
    if (options := fields.fields("stream_options")) is not None:
        include_usage = options.flag("include_usage")
        options.skip(include_obfuscation="flag")
        options.finish()
    return stream, include_usage


def reply(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> Json:
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": token_logprobs(answer, sent) if asked.logprobs else None,
            "finish_reason": answer.finish_reason,
            **({"token_ids": list(answer.token_ids)} if asked.token_ids else {}),
        }
        for index, answer in enumerate(answers)
    ]
    prompt = {"prompt_token_ids": list(answers[0].prompt_ids)} if asked.token_ids else {}
    return {**_head(asked, answers, sent, "chat.completion"), "choices": choices, "usage": usage(answers), **prompt}


def _message(answer: TurnAnswer) -> Json:
    message = answer_message(answer)
    if not answer.tool_calls:
        message["content"] = answer.text  # clients expect a text, also an empty one
    return {**message, "refusal": None}


def _head(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent, kind: str) -> Json:
    return {"id": answers[0].turn_id, "object": kind, "created": sent.created_s, "model": asked.model}


def usage(answers: Sequence[TurnAnswer]) -> Json:
    prompt, generated = answers[0].num_prompt_tokens, sum(len(answer.token_ids) for answer in answers)
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {**counts, "prompt_tokens_details": {"cached_tokens": answers[0].num_cached_tokens}}


def token_logprobs(answer: TurnAnswer, sent: Sent) -> Json:
    entries: list[Json] = []
    for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
        text = sent.token_text(token_id)
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


class _Stream:
    def __init__(self, asked: Asked, sent: Sent) -> None:
        self._asked, self._sent = asked, sent
        self._growths = defaultdict[int, Growth](Growth)

    def __call__(self, answers: Sequence[TurnAnswer]) -> list[bytes]:
        events: list[Json] = []
        usages: Json = {"usage": None} if self._asked.include_usage else {}
        for index, answer in enumerate(answers):
            is_first = not self._growths[index].has_begun
            if (new := self._growths[index].of(answer)) is None:
                continue
            for number, delta in enumerate(deltas := _deltas(new, is_first)):
                choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                if number == len(deltas) - 1:
                    choice["finish_reason"] = answer.finish_reason
                if number == 0 and self._asked.logprobs:
                    choice["logprobs"] = token_logprobs(new, self._sent)
                if number == 0 and self._asked.token_ids:
                    choice["token_ids"] = list(new.token_ids)
                prompt: Json = {}
                if is_first and number == 0 and self._asked.token_ids:
                    prompt = {"prompt_token_ids": list(answer.prompt_ids)}
                events.append({"choices": [choice], **usages, **prompt})
        is_whole = bool(answers) and answers[0].finish_reason is not None
        if is_whole and usages:
            events.append({"choices": [], "usage": usage(answers)})
        if not events:
            return []
        head = _head(self._asked, answers, self._sent, "chat.completion.chunk")
        return [*(data_event({**head, **event}) for event in events), *([DONE] if is_whole else [])]


def _deltas(answer: TurnAnswer, is_first: bool) -> list[dict[str, Any]]:
    """What the chunks add; the first of all has the role, the last of all is empty."""
    deltas: list[dict[str, Any]] = []
    if is_first:
        deltas.append({"role": "assistant", "content": None if answer.tool_calls else ""})
    if answer.reasoning:
        deltas.append({"reasoning_content": answer.reasoning})
    if answer.text:
        deltas.append({"content": answer.text})
    for index, call in enumerate(answer.tool_calls):
        start = {"index": index, "id": call.call_id, "type": "function"}
        deltas.append({"tool_calls": [{**start, "function": {"name": call.name, "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    return deltas if answer.finish_reason is None else [*deltas, {}]


DIALECT = Dialect(name="chat_completions", parse=parse, reply=reply, stream=_Stream)
