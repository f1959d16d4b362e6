"""The dialect of `/v1/completions` (OpenAI): plain prompts without a chat template."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from areal.agent.dialects.chat_completions import (
    FOREIGN,
    MAX_ANSWERS,
    MAX_TOKENS,
    SAMPLING,
    openai_settings,
    stream_fields,
    usage,
)
from areal.agent.dialects.dialect import (
    DONE,
    Asked,
    Dialect,
    Fields,
    FieldTable,
    Growth,
    Json,
    Sent,
    data_event,
    invalid,
    unsupported,
)
from areal.agent.turns import TurnAnswer, TurnRequest

MAX_PROMPT_TOKENS = 2**21
DEFAULT_MAX_TOKENS = 16  # OpenAI's default.
FIELDS = FieldTable(
    read={
        "prompt": "required: a text or a list of token ids, or a list with one of them",
        "model": "required; every name means the policy",
        "max_tokens": f"most generated tokens; at least 1; without it {DEFAULT_MAX_TOKENS}",
        **SAMPLING,
        "logprobs": "0: log-probabilities of the generated tokens; others are refused",
    },
    ignored={"user": ("text", "metadata")},
    only={
        "echo": ((False,), "the prompt is not repeated"),
        "best_of": ((1,), "use n"),
        "add_special_tokens": ((True,), "a prompt begins with the BOS of the tokenizer"),
    },
    foreign={name: FOREIGN[name] for name in ("min_p", "repetition_penalty", "min_tokens")},
    refused={"suffix": "is not supported"},
)


def parse(body: Json) -> Asked:
    fields = Fields(body)
    model = fields.required_text("model")
    prompt = _prompt(fields.take("prompt"))
    settings = openai_settings(fields, ("max_tokens",), default=DEFAULT_MAX_TOKENS)
    num_answers = fields.integer("n", 1, MAX_ANSWERS) or 1
    stream, include_usage = stream_fields(fields)
    top, token_ids = fields.integer("logprobs", 0, MAX_TOKENS), fields.flag("return_token_ids")
    if top:
        raise unsupported("logprobs", "only the log-probability of the sampled token is known: use 0")
    fields.finish(FIELDS)
    turn = TurnRequest(prompt=prompt, num_answers=num_answers, settings=settings, shows_prompt=token_ids)
    return Asked(
        turn=turn, model=model, stream=stream, include_usage=include_usage, logprobs=top == 0, token_ids=token_ids,
        foreign=fields.foreign,
    )  # fmt: skip


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPT_TOKENS:
        raise invalid("prompt", f"must be a text or a list of 1 to {MAX_PROMPT_TOKENS} token ids")
    if any(isinstance(part, str | list) for part in value):
        raise unsupported("prompt", "several prompts in one request are not supported: send a request for each")
    if not all(type(token) is int and 0 <= token <= MAX_TOKENS for token in value):
        raise invalid("prompt", "must be a text or a list of token ids")
    return tuple(value)


def _body(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent, choices: list[Json]) -> Json:
    head = {"id": answers[0].turn_id, "object": "text_completion", "created": sent.created_s, "model": asked.model}
    return {**head, "choices": choices}


def _choice(asked: Asked, index: int, answer: TurnAnswer, logprobs: Json | None, *, is_first: bool = True) -> Json:
    choice: Json = {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
    if asked.token_ids:
        choice["prompt_token_ids"] = list(answer.prompt_ids) if is_first else None
        choice["token_ids"] = list(answer.token_ids)
    return choice


def _logprobs(asked: Asked, answer: TurnAnswer, sent: Sent, start: int = 0) -> Json | None:
    """`start`: characters of the tokens before."""
    if not asked.logprobs:
        return None
    tokens = [sent.token_text(token_id) for token_id in answer.token_ids]
    offsets = list(itertools.accumulate(map(len, tokens[:-1]), initial=start))[: len(tokens)]
    return {"tokens": tokens, "token_logprobs": list(answer.logprobs), "top_logprobs": None, "text_offset": offsets}


def reply(asked: Asked, answers: Sequence[TurnAnswer], sent: Sent) -> Json:
    choices = [_choice(asked, index, answer, _logprobs(asked, answer, sent)) for index, answer in enumerate(answers)]
    return {**_body(asked, answers, sent, choices), "usage": usage(answers)}


class _Stream:
    def __init__(self, asked: Asked, sent: Sent) -> None:
        self._asked, self._sent = asked, sent
        self._growths = defaultdict[int, Growth](Growth)
        self._lengths = Counter[int]()  # Characters of the tokens that were sent, by answer.

    def __call__(self, answers: Sequence[TurnAnswer]) -> list[bytes]:
        asked, sent = self._asked, self._sent
        more = {"usage": None} if asked.include_usage else {}
        events: list[bytes] = []
        for index, answer in enumerate(answers):
            is_first = not self._growths[index].has_begun
            if (new := self._growths[index].of(answer)) is not None:
                logprobs = _logprobs(asked, new, sent, self._lengths[index])
                self._lengths[index] += sum(map(len, logprobs["tokens"])) if logprobs else 0
                choice = _choice(asked, index, new, logprobs, is_first=is_first)
                events.append(data_event({**_body(asked, answers, sent, [choice]), **more}))
        if not answers or answers[0].finish_reason is None:
            return events
        if asked.include_usage:
            events.append(data_event({**_body(asked, answers, sent, []), "usage": usage(answers)}))
        return [*events, DONE]


DIALECT = Dialect(name="completions", parse=parse, reply=reply, stream=_Stream)
