"""A policy for tests that answers from a script."""

import asyncio
from collections.abc import Callable

from areal.api.data import GenerationRequest, GenerationResponse
from areal.data.tiny_model import template_tokenizer
from tests.agent.bridge.templates import CHATML


def tool_tokenizer():
    """A tokenizer with a chat template of tools."""
    return template_tokenizer(CHATML)


class ScriptedEngine:
    """Answers with what `answer` makes of the text of the prompt. Implements InferenceEngine."""

    version = 3

    def __init__(self, answer: Callable[[str], str], *, gate: asyncio.Event | None = None) -> None:
        """`gate`: answers wait for it."""
        self._answer = answer
        self._gate = gate
        self._tokenizer = tool_tokenizer()
        self._end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.requests: list[GenerationRequest] = []
        self.arrived = asyncio.Event()

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        self.requests.append(request)
        self.arrived.set()
        if self._gate is not None:
            await self._gate.wait()
        text = self._answer(self._tokenizer.decode(list(request.input_ids)))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._end]
        cut = ids[: request.gconfig.max_new_tokens]
        return GenerationResponse(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=cut,
            output_logprobs=[-0.5] * len(cut),
            output_versions=[self.version] * len(cut),
            stop_reason="stop" if cut == ids else "length",
        )
