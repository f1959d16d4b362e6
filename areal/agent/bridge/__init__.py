"""The template bridge: what a chat template writes between an answer and the next answer, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from areal.agent.turns import Message
from areal.data.chat import checked_messages, render_chat, tokens_after_answer
from areal.data.tokenizer import Tokenizer

GapReason = Literal["history_edited", "tail_differs", "refused", "no_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeGap:
    """Why no bridge extends a history: the next prompt needs a fork or a realignment."""

    reason: GapReason
    """history_edited: the template changes earlier text once the new messages follow. tail_differs: the text after
    the answer depends on the answer. refused: the template raises. no_answer: the history does not end with an answer
    that the template shows."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateScenario:
    """What the user declares about a chat template."""

    enable_thinking: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template, for example {"preserve_thinking": True}."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, besides the end token of the tokenizer."""


class PromptBridge(Protocol):
    """Token ids of prompts, and of what extends a prompt and its answer to the next prompt."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The full rendering with the generation prompt."""
        ...

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        """The tokens from the end token of the last answer, with it, to the end of the next generation prompt.

        `history` ends with the assistant message as delivered to the client; `new_messages` follow it. The caller
        leaves out the end token when the policy generated it.
        """
        ...


class TemplateBridge:
    """The bridge of a tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, scenario: TemplateScenario) -> None:
        self._tokenizer = tokenizer
        self._scenario = scenario
        ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._stop_token_ids = scenario.stop_token_ids.union(ends)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stop_token_ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        text = render_chat(
            self._tokenizer,
            checked_messages(list(messages)),
            add_generation_prompt=True,
            enable_thinking=self._scenario.enable_thinking,
            tools=list(tools) or None,
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def extension(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | BridgeGap:
        if not history or history[-1].get("role") != "assistant":
            return BridgeGap(reason="no_answer", detail="the history does not end with an assistant message")
        return tokens_after_answer(self._tokenizer, list(new_messages), enable_thinking=self._scenario.enable_thinking)


def template_bridge(tokenizer: Tokenizer, scenario: TemplateScenario | None = None) -> PromptBridge:
    """The bridge of the tokenizer's chat template. Raises InputError when it has no usable template."""
    return TemplateBridge(tokenizer, scenario or TemplateScenario())
