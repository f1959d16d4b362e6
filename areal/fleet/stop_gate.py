"""Stop strings that start in an earlier part of an answer: foreign servers search them in the text of one part only.

The first tokens of a part are held until it is certain that no stop string ends in them; the server finds all later
ones itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from areal.api.columns import Packed, Runs, joined, to_runs
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk


class BoundaryGate:
    """Passes the chunks of one part on once the text across its beginning is known."""

    def __init__(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        self._stops = part.gconfig.stop or []
        self._on_chunk = on_chunk
        self._reach = max(len(stop.encode()) for stop in self._stops)
        """In tokens: each token has at least one byte."""
        num_before = min(part.num_prior_output_tokens, self._reach + 1)  # one more: the first token can lose its space
        self._before = part.input_ids[-num_before:]
        self._min_new_tokens = part.min_new_tokens
        self._held: list[PartChunk] = []
        self._is_open = False
        self.filled = asyncio.Event()
        """Set when all tokens that could end a stop string have arrived, or the part has ended."""

    def take(self, chunk: PartChunk) -> None:
        if self._is_open:
            self._on_chunk(chunk)
            return
        self._held.append(chunk)
        if chunk.finish_reason is not None or len(self._new_ids()) >= self._reach:
            self.filled.set()

    def token_lists(self) -> list[Sequence[int]]:
        """The tokens to detokenize: the end of the earlier parts, alone and with 1, 2, ... of the first new tokens."""
        new = self._new_ids()[: self._reach]
        return [joined("i", (self._before, new[:count])) for count in range(len(new) + 1)]

    def settle(self, texts: list[str]) -> bool:
        """Pass on the held tokens, given the texts of `token_lists`; True when a stop string ended the answer."""
        self._is_open = True
        count = next((i for i in range(1, len(texts)) if self._ends_at(i, texts)), None)
        if count is None:
            for chunk in self._held:
                self._on_chunk(chunk)
            return False
        ids = self._new_ids()[:count]
        logprobs = joined("f", (chunk.logprobs for chunk in self._held))[:count]
        reported = self._held[-1].part_versions
        versions = reported or Runs(run for chunk in self._held for run in to_runs(chunk.versions).runs)
        experts = self._held[-1].routed_experts
        self._on_chunk(PartChunk(ids, logprobs, versions[:count], "stop", reported and reported[:count], experts))
        return True

    def _ends_at(self, count: int, texts: list[str]) -> bool:
        """Whether new token number `count` completes a stop string, other than one within the first min_new_tokens."""
        return count >= self._min_new_tokens and any(
            texts[count].count(stop) > texts[count - 1].count(stop) for stop in self._stops
        )

    def _new_ids(self) -> Packed[int]:
        return joined("i", (chunk.token_ids for chunk in self._held))


async def generate_with_stops(
    part: GenerationPart,
    generate: Callable[[OnChunk], Awaitable[None]],
    to_texts: Callable[[list[Sequence[int]]], Awaitable[list[str]]],
    on_chunk: OnChunk,
) -> None:
    """Let `generate` run a part, and end it where a stop string ends that started in an earlier part.

    A part that can have none runs as it is. Otherwise the first tokens or the end of the part are awaited.
    """
    if not (part.num_prior_output_tokens and part.gconfig.stop):
        await generate(on_chunk)
        return

    async def run() -> None:
        await generate(gate.take)

    gate = BoundaryGate(part, on_chunk)
    running = asyncio.create_task(run(), name=f"generate {part.part_id}")
    filled = asyncio.create_task(gate.filled.wait(), name=f"first tokens of {part.part_id}")
    try:
        await asyncio.wait((running, filled), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises its error
        lists = gate.token_lists()
        if not gate.settle(await to_texts(lists) if lists else []):
            await running
    finally:
        running.cancel()
        filled.cancel()
        await asyncio.gather(running, filled, return_exceptions=True)
