"""A character tokenizer and an inference engine that answers from a list: enough to run workflows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.engine import InferenceEngine


class CharTokenizer:
    """One id per character; <e> is the end, <p> the pad token, and a chat template of one-line headers."""

    specials = ("<p>", "<e>", "<s>")
    pad_token_id, eos_token_id = 0, 1
    chat_template = "yes"
    added_tokens_decoder = {i: SimpleNamespace(content=s, special=True) for i, s in enumerate(specials)}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids, position = [], 0
        while position < len(text):
            special = next((s for s in self.specials if text.startswith(s, position)), None)
            ids.append(self.specials.index(special) if special else ord(text[position]) + 3)
            position += len(special or "x")
        return ids

    def decode(self, token_ids, *, skip_special_tokens: bool = False) -> str:
        parts = (self.specials[i] if i < 3 else chr(i - 3) for i in token_ids)
        return "".join(p for p in parts if not (skip_special_tokens and p in self.specials))

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, enable_thinking) -> str:
        assert not tokenize
        text = "".join(f"<s>{m['role']}\n{m['content']}<e>\n" for m in conversation)
        text += "<s>assistant\n" if add_generation_prompt else ""
        return text + ("(think)" if enable_thinking and add_generation_prompt else "")


class ScriptedEngine(InferenceEngine):
    """Answers from `answers`, in the order of the request numbers; text without <e> is cut by the length limit."""

    version = 7

    def __init__(self, answers: list[str], tokenizer: CharTokenizer | None = None) -> None:
        self.answers = answers
        self.tokenizer = tokenizer or CharTokenizer()
        self.requests: list[GenerationRequest] = []
        self.in_flight = self.most_in_flight = 0

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        answer = self.answers[len(self.requests)]
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        ids = self.tokenizer.encode(answer)
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=ids,
            output_logprobs=[-0.5 - k for k in range(len(ids))],
            output_versions=[self.version] * len(ids),
            stop_reason="stop" if ids[-1:] == [1] else "length",
        )


@pytest.fixture
def tokenizer():
    return CharTokenizer()


@pytest.fixture
def engine_of():
    """Makes an engine from its answers."""
    return ScriptedEngine
