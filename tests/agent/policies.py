"""A policy for tests that answers from a script."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence

from areal.api.data import GenerationRequest, GenerationResponse, TokenChunk
from areal.api.engine import InferenceEngine
from areal.data.tiny_model import template_tokenizer
from tests.agent.bridge.templates import CHATML


def tool_tokenizer():
    """A tokenizer with a chat template of tools."""
    return template_tokenizer(CHATML)


class ScriptedEngine(InferenceEngine):
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


class ChunkEngine(ScriptedEngine):
    """Yields the same answers in chunks of the sizes `cuts`, in turn. Chunks after the first wait for `gate`."""

    def __init__(self, answer: Callable[[str], str], cuts: Sequence[int], *, gate: asyncio.Event | None = None) -> None:
        super().__init__(answer)
        self._cuts = cuts
        self.gate = gate
        self.error: Exception | None = None
        """Raised instead of the second chunk."""
        self.num_given = 0
        """Chunks so far."""
        self.left = asyncio.Event()
        """Set when a stream was closed before its end."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        whole, done = await self.agenerate(request), 0
        sizes = itertools.cycle(self._cuts)
        columns = (whole.output_ids, whole.output_logprobs, whole.output_versions)
        try:
            while done < len(whole.output_ids):
                if self.gate is not None and done:
                    await self.gate.wait()
                if self.error is not None and done:
                    raise self.error
                place = slice(done, done + next(sizes))
                done = place.stop
                self.num_given += 1
                yield TokenChunk(*(column[place] for column in columns))
                await asyncio.sleep(0)
            yield TokenChunk((), (), (), whole)
        except (GeneratorExit, asyncio.CancelledError):
            self.left.set()
            raise
