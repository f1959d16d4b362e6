"""The dialect of `/v1/chat/completions` (OpenAI)."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal.agent.dialects.chat_messages import (
    MAX_ANSWERS,
    MAX_SEED,
    MAX_TOKENS,
    chat_messages,
    openai_tool_choice,
    openai_tools,
    stops,
)
from areal.agent.dialects.dialect import DONE, Asked, Dialect, Sent, data_event
from areal.agent.dialects.fields import Fields, FieldTable, Json, Kind
from areal.agent.turns import TurnAnswer, TurnRequest, TurnSettings, answer_message

_RUN = "the configuration of the run decides"
_CONSTRAINED = "answers are not constrained to a format"
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
    "temperature": "0 to 2; 0 is greedy",
    "top_p": "above 0, at most 1",
    "top_k": "extension: at least 1",
    "frequency_penalty": "-2 to 2",
    "seed": "0 to 2^63 - 1",
    "stop": "one text or at most 16",
    "n": "1 to 128 answers; each is a leaf of the transcript",
    "stream": "the whole answer is computed first, then sent as events",
    "stream_options": "`include_usage`; `include_obfuscation` has no effect",
}
"""Fields of chat completions and completions."""
FIELDS = FieldTable(
    read={
        "messages": "roles system, developer (read as system), user, assistant, tool; content is text or text parts, "
        "which are joined by a newline; `reasoning_content` of assistant messages is read",
        "model": "required; every name means the policy, and the reply repeats it",
        "max_tokens": "limit of generated tokens; at least 1",
        "max_completion_tokens": "as max_tokens; the smaller one counts",
        **SAMPLING,
        "logprobs": "log-probabilities of the generated tokens, also of reasoning and tool calls",
        "tools": "of type `function`; `strict` has no effect",
        "tool_choice": "auto, none, required, or one function",
    },
    ignored={**NO_EFFECT, "metadata": ("object", "metadata")},
    only={
        "top_logprobs": ((0,), "only the log-probability of the sampled token is known: use 0"),
        "presence_penalty": ((0, 0.0), "is not supported: use 0, or frequency_penalty"),
        "logit_bias": (({},), "is not supported"),
        "response_format": (({"type": "text"},), _CONSTRAINED),
        "modalities": ((["text"],), "only text is supported"),
    },
    refused={
        "audio": "only text is supported",
        "functions": "is replaced by tools",
        "function_call": "is replaced by tool_choice",
        "reasoning_effort": _RUN,
        "verbosity": _RUN,
        "prediction": "is not supported",
        "moderation": "is not supported",
        "web_search_options": "is not supported",
        "chat_template_kwargs": _RUN,
    },
)


def parse(body: Json) -> Asked:
    given = Fields(body)
    model = given.required_text("model")
    messages = chat_messages(given.items("messages"))
    tools = openai_tools(given.items("tools"), nested=True)
    choice = openai_tool_choice(given.take("tool_choice"), tools, nested=True)
    settings = openai_settings(given, ("max_tokens", "max_completion_tokens"))
    num_answers = given.integer("n", 1, MAX_ANSWERS) or 1
    stream, include_usage = stream_fields(given)
    logprobs = given.flag("logprobs")
    given.finish(FIELDS)
    turn = TurnRequest(messages=messages, tools=tools, tool_choice=choice, num_answers=num_answers, settings=settings)
    return Asked(turn=turn, model=model, stream=stream, include_usage=include_usage, logprobs=logprobs)


def openai_settings(given: Fields, limits: tuple[str, ...], default: int | None = None) -> TurnSettings:
    """The sampling settings of OpenAI's dialects; the smallest of the fields `limits` counts, without one `default`."""
    sizes = [size for name in limits if (size := given.integer(name, 1, MAX_TOKENS)) is not None]
    return TurnSettings(
        max_new_tokens=min(sizes, default=default),
        temperature=given.number("temperature", 0, 2),
        top_p=given.number("top_p", 1e-9, 1),
        top_k=given.integer("top_k", 1, MAX_TOKENS),
        frequency_penalty=given.number("frequency_penalty", -2, 2),
        seed=given.integer("seed", 0, MAX_SEED),
        stop=stops(given.take("stop")),
    )


def stream_fields(given: Fields) -> tuple[bool, bool]:
    """(stream, include_usage)"""
    stream, include_usage = given.flag("stream"), False
    if (options := given.fields("stream_options")) is not None:
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
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(asked, answers, sent, "chat.completion"), "choices": choices, "usage": usage(answers)}


def _message(answer: TurnAnswer) -> Json:
    message = answer_message(answer)
    if not answer.tool_calls:
        message["content"] = answer.text  # clients expect a text, also an empty one
    return {**message, "refusal": None}


def _head(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent, kind: str) -> Json:
    return {"id": answers[0].turn_id, "object": kind, "created": sent.created_s, "model": asked.model}


def usage(answers: Sequence[TurnAnswer]) -> Json:
    prompt, generated = answers[0].num_prompt_tokens, sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def token_logprobs(answer: TurnAnswer, sent: Sent) -> Json:
    """Log-probabilities of all generated tokens."""
    entries: list[Json] = []
    for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
        text = sent.token_text(token_id)
        entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def events(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> list[bytes]:
    head = _head(asked, answers, sent, "chat.completion.chunk")
    if asked.include_usage:
        head["usage"] = None
    found: list[bytes] = []
    for index, answer in enumerate(answers):
        for number, delta in enumerate(deltas := _deltas(answer)):
            choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if number == len(deltas) - 1:
                choice["finish_reason"] = answer.finish_reason
            if number == 0 and asked.logprobs:
                choice["logprobs"] = token_logprobs(answer, sent)
            found.append(data_event({**head, "choices": [choice]}))
    if asked.include_usage:
        found.append(data_event({**head, "choices": [], "usage": usage(answers)}))
    return [*found, DONE]


def _deltas(answer: TurnAnswer) -> list[dict[str, Any]]:
    """What the chunks of one answer add; the first has its role, the last is empty."""
    found: list[dict[str, Any]] = [{"role": "assistant", "content": None if answer.tool_calls else ""}]
    if answer.reasoning:
        found.append({"reasoning_content": answer.reasoning})
    if answer.text:
        found.append({"content": answer.text})
    for index, call in enumerate(answer.tool_calls):
        start = {"index": index, "id": call.call_id, "type": "function"}
        found.append({"tool_calls": [{**start, "function": {"name": call.name, "arguments": ""}}]})
        found.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    return [*found, {}]


DIALECT = Dialect(name="chat_completions", parse=parse, reply=reply, events=events)
