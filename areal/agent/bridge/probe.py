"""What a chat template takes and writes, found by rendering short dialogues: forms of messages, and end tokens."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.api.errors import InputError
from areal.data.chat_template import ChatTemplate, MessageForms

QUESTION, RESULT, MARK = "areal1question", "areal2result", "areal3answer"
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "The word."}},
                "required": ["word"],
            },
        },
    },
)
_CLOSING_TAG = re.compile(r"""split\(\s*["']\s*(?:\\n)*(</(\w+)>)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What probing found."""

    forms: MessageForms
    stops: tuple[str, ...]
    """Texts of the tokens that end an answer, those that the user declares first."""
    takes_system: bool
    takes_tools: bool
    """Whether a call and its result are rendered."""
    refusal: str
    """The error of the template for a call and its result."""
    takes_reasoning: bool


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(*, reasoning: bool = False, content: bool = True, num_calls: int = 0, first_call: int = 0) -> dict[str, Any]:
    """An answer with MARK in each of its texts. Ids of calls have nine letters and digits, as some templates demand."""
    message: dict[str, Any] = {"role": "assistant", "content": MARK if content else ""}
    if reasoning:
        message["reasoning_content"] = MARK
    if num_calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:05d}",
                "type": "function",
                "function": {"name": "lookup", "arguments": f'{{"word": "{MARK}"}}'},
            }
            for number in range(first_call, first_call + num_calls)
        ]
    return message


def result_of(call: Mapping[str, Any], text: str = RESULT) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def probe(template: ChatTemplate, declared_stops: Sequence[str]) -> TemplateFacts:
    """Find the forms and the end tokens. Raises InputError when not even a question and an answer are rendered."""
    forms = _content_form(template)
    template = template.with_forms(forms)
    call_forms = _call_forms(template)
    if call_forms is not None:
        template = template.with_forms(call_forms)
    reasoning_forms = _reasoning_form(template)
    if reasoning_forms is not None:
        template = template.with_forms(reasoning_forms)
    system = _render(template, [{"role": "system", "content": "areal0system"}, user()])
    return TemplateFacts(
        forms=template.forms,
        stops=_stops(template, declared_stops, with_calls=call_forms is not None),
        takes_system=system is not None and "areal0system" in system,
        takes_tools=call_forms is not None,
        refusal="" if call_forms is not None else _refusal(template),
        takes_reasoning=reasoning_forms is not None,
    )


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> str | None:
    for schemas in (TOOLS,) if tools else ((), TOOLS):  # some templates render nothing without tools
        try:
            return template.render(messages, schemas)
        except InputError:
            continue
    return None


def _content_form(template: ChatTemplate) -> MessageForms:
    """Content as text, or as a list of parts. Raises InputError."""
    dialogue = [user(), answer(), user("areal4again")]
    for form in ("text", "parts"):
        forms = replace(template.forms, content=form)
        text = _render(template.with_forms(forms), dialogue)
        if text is not None and QUESTION in text and MARK in text:
            return forms
    template.render(dialogue)  # raises the template's own error
    message = "the chat template does not show a question and its answer, so it supports no further turns"
    raise InputError(message, code="data.chat_template")


def _call_forms(template: ChatTemplate) -> MessageForms | None:
    """Arguments as text or mapping, and empty content. None: the template shows no calls or no results.

    Text that the template inserts as it is comes first, because a policy's own spelling of the JSON is then kept.
    """
    question = answer(content=False, num_calls=1)
    written = question["tool_calls"][0]["function"]["arguments"]
    shown: list[MessageForms] = []
    for arguments in ("text", "mapping"):
        for empty in ("text", "missing"):
            forms = replace(template.forms, arguments=arguments, empty_content=empty)
            text = _render(
                template.with_forms(forms), [user(), question, result_of(question["tool_calls"][0])], tools=True
            )
            if text is None or MARK not in text or RESULT not in text:
                continue
            if arguments == "text" and written not in text:  # escaped twice
                continue
            shown.append(forms)
    return shown[0] if shown else None


def _refusal(template: ChatTemplate) -> str:
    called = answer(content=False, num_calls=1)
    try:
        template.render([user(), called, result_of(called["tool_calls"][0])], TOOLS)
    except InputError as error:
        return f"{type(error.__cause__).__name__}: {error.__cause__}"
    return ""


def _reasoning_form(template: ChatTemplate) -> MessageForms | None:
    """Where the template reads the reasoning of an answer. None: it shows none, not even of the last answer."""
    thought = {**answer(content=True), "reasoning_content": "areal5thought"}
    last = [user(), thought]
    called = answer(content=False, num_calls=1)
    loop = [user(), {**called, "reasoning_content": "areal5thought"}, result_of(called["tool_calls"][0])]
    for key in ("reasoning_content", "reasoning", "thinking"):
        forms = replace(template.forms, reasoning_key=key)
        for dialogue, tools in ((last, False), ([*last, user()], False), (loop, True)):
            text = _render(template.with_forms(forms), dialogue, tools=tools)
            if text is not None and "areal5thought" in text:
                return forms
    tags = _CLOSING_TAG.search(template.source)
    if tags is None:
        return None
    return replace(template.forms, reasoning_key="", reasoning_tags=(f"<{tags[2]}>", tags[1]))


def _stops(template: ChatTemplate, declared: Sequence[str], *, with_calls: bool) -> tuple[str, ...]:
    """The end tokens: the declared ones, and the first control token after an answer where none of them follows it.

    A template may end an answer by the header of the next message, and a call by another token than a text.
    """
    stops = list(declared)
    for end in _ends(template, with_calls=with_calls):
        if any(stop in end for stop in stops):
            continue
        for found in (
            _first_of(end, control_texts(template, special=True)),
            _first_of(end, control_texts(template, special=False)),
        ):
            if found is not None:
                stops.append(found)
                break
    return tuple(stops)


def _ends(template: ChatTemplate, *, with_calls: bool) -> Iterator[str]:
    """The texts between an answer and the content of the next message."""
    dialogues: list[tuple[list[dict[str, Any]], str]] = [([user(), answer(), user("areal4again")], "areal4again")]
    if with_calls:
        called = answer(content=False, num_calls=1)
        dialogues.append(([user(), called, result_of(called["tool_calls"][0])], RESULT))
    for messages, following in dialogues:
        text = _render(template, messages, tools=following == RESULT)
        if text is not None:
            start = text.rfind(MARK) + len(MARK)
            yield text[start : text.find(following, start)]


def _first_of(text: str, tokens: Iterable[str]) -> str | None:
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return min(places)[2] if places else None


def control_texts(template: ChatTemplate, *, special: bool) -> list[str]:
    """Texts of the added tokens; `special`: only of those that decoding leaves out."""
    tokens = template.tokenizer.added_tokens_decoder.values()
    return [token.content for token in tokens if token.special or not special]
