"""The template bridge: what a chat template writes between an answer and the next answer, as token ids."""

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal.agent.bridge.call_start import CallStart, start_text
from areal.agent.bridge.probe import TemplateFacts, control_texts, probe
from areal.agent.bridge.proof import Row, Scope, next_of, shape_of, table
from areal.agent.turns import Message
from areal.api.errors import InputError
from areal.data.answer_tail import BridgeGap, answer_tail
from areal.data.chat_template import ChatTemplate
from areal.data.plain_spans import PlainSpans
from areal.data.tokenizer import Tokenizer

__all__ = ["BridgeGap", "CallStart", "PromptBridge", "TemplateBridge", "TemplateScenario", "template_bridge"]

_LOCAL_GAPS = ("tail_differs", "no_prompt", "no_stop")
"""Reasons that a check of one dialogue at run time does not find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateScenario:
    """What the user declares about a chat template."""

    enable_thinking: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Further variables of the template, for example {"preserve_thinking": True}."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, besides the end token of the tokenizer and those that the template shows."""
    date: datetime.date | None = None
    """The date that the template prints; None = today."""


class PromptBridge(Protocol):
    """Token ids of prompts, and of what extends a prompt and its answer to the next prompt."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, also those that the template itself never writes."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The full rendering with the generation prompt. Raises InputError when the template refuses the messages."""
        ...

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        """The tokens from the end token of the last answer, with it, to the end of the next generation prompt.

        `history` ends with the assistant message as delivered to the client; `new_messages` follow it. The caller
        leaves out the first token when the policy generated it. An answer that ends with another of `stop_token_ids`
        is not what the template writes: its next prompt is the full rendering.
        """
        ...

    def call_start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> CallStart | None:
        """What an answer begins with that calls the tool `name`, or any tool if `name` is empty.

        None: the template writes no such answer after the prompt of these messages.
        """
        ...


class TemplateBridge:
    """The bridge of a tokenizer's chat template, derived by rendering. See docs/templates.md."""

    def __init__(self, tokenizer: Tokenizer, scenario: TemplateScenario) -> None:
        """Raises InputError when the template does not render a question with its answer, or shows no end token."""
        template = ChatTemplate(
            tokenizer, enable_thinking=scenario.enable_thinking, options=scenario.options, date=scenario.date
        )
        self.facts: TemplateFacts = probe(template, declared_stops(tokenizer, scenario.stop_token_ids))
        self.template = template.with_forms(self.facts.forms)
        self._stops = {stop: tokenizer.encode(stop, add_special_tokens=False) for stop in self.facts.stops}
        broken = [stop for stop, ids in self._stops.items() if len(ids) != 1]
        if broken or not self._stops:
            what = f"{broken} are no single tokens" if broken else "no token follows an answer"
            message = f"the chat template has no usable end token: {what}; declare the stop tokens"
            raise InputError(message, code="data.template_stop")
        self._spans = PlainSpans(tokenizer, sorted({*control_texts(template, special=True), *self._stops}))
        self._local_gaps = {
            (row.shape, row.following): row.gap
            for row in table(self.template, self.facts, max_answers=1)
            if row.gap is not None and row.gap.reason in _LOCAL_GAPS
        }

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(ids[0] for ids in self._stops.values())

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        marks = self._spans.marks_for(messages)
        text = self.template.render([self._spans.marked(message, marks) for message in messages], tools)
        return self._spans.encode(text, marks)

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        found = self.tail(history, new_messages, tools)
        if isinstance(found, BridgeGap):
            return found
        return self._local_gaps.get((shape_of(history[-1]), next_of(new_messages))) or found

    def tail(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        may_edit: bool = False,
    ) -> list[int] | BridgeGap:
        """The tokens after the last answer of `history`. `may_edit`: also where the template edits the history."""
        marks = self._spans.marks_for([*history, *new_messages])
        old, new = ([self._spans.marked(message, marks) for message in part] for part in (history, new_messages))
        found = answer_tail(self.template, old, new, tools, stops=self.facts.stops)
        if isinstance(found, BridgeGap):
            return found
        if found.edit is not None and not may_edit:
            return found.edit
        token_ids = self._spans.encode(found.text, marks)
        if token_ids[0] not in self.stop_token_ids:  # text of a message that looks like an end token
            return BridgeGap(reason="no_stop", detail="no end token follows the answer")
        return token_ids

    def call_start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], name: str) -> CallStart | None:
        found = start_text(self.template, messages, tools, name)
        if found is None:
            return None
        text, example, called = found
        end = min((place for stop in self.facts.stops if (place := example.find(stop, len(text))) >= 0), default=None)
        return CallStart(token_ids=self._spans.inner(text), example=example[:end], name=called)

    def table(self, *, max_answers: int = 3, scope: Scope = "all") -> tuple[Row, ...]:
        """The proof over all dialogues of up to `max_answers` answers."""
        return table(self.template, self.facts, max_answers=max_answers, scope=scope)


def declared_stops(tokenizer: Tokenizer, token_ids: frozenset[int]) -> list[str]:
    """Texts of the end token of the tokenizer and of further tokens."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer.decode([token]) for token in [*ends, *sorted(token_ids.difference(ends))]]


def template_bridge(tokenizer: Tokenizer, scenario: TemplateScenario | None = None) -> TemplateBridge:
    """The bridge of the tokenizer's chat template, made once for each template and scenario. Raises InputError."""
    return _made(tokenizer, repr(tokenizer.chat_template), scenario or TemplateScenario(), datetime.date.today())


@functools.lru_cache(maxsize=32)
def _made(tokenizer: Tokenizer, template: str, scenario: TemplateScenario, today: datetime.date) -> TemplateBridge:
    return TemplateBridge(tokenizer, scenario)
