"""The LoRA adapters that one server has loaded: a new name for each policy version, and none that no request uses."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from areal.api.columns import Packed, Runs, joined, to_runs
from areal.api.errors import RequestError
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk

# ----------------------------------------------------------------------------------------------------------------------
# Stop strings that start in an earlier part of an answer: foreign servers search them in the text of one part only.
#
# The first tokens of a part are held until it is certain that no stop string ends in them; the server finds all later
# ones itself.


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


Call = Callable[[str], Awaitable[None]]


class ServedAdapters:
    """What a client knows of the adapters of its server. Every folder of an update has its own name for all time."""

    def __init__(self, load: Callable[[str, str], Awaitable[None]], unload: Call) -> None:
        """`load` gets name and folder, `unload` the name; both raise RequestError when the server refuses."""
        self._load = load
        self._unload = unload
        self._current = ("", 0)
        """Name and policy version; empty = the base model."""
        self._loaded: list[str] = []
        self._users: Counter[str] = Counter()
        self._num_uses: Counter[str] = Counter()
        """By folder."""

    async def use(self, folder: str, version: int) -> None:
        """Requests from now on use the adapter in `folder`. RequestError when the server cannot load it.

        A folder that is used again, on a new process or after a failed comparison, is loaded under another name.
        """
        name, count = Path(folder).name, self._num_uses[folder]
        self._num_uses[folder] += 1
        name = f"{name}-{count}" if count else name
        try:
            await self._load(name, folder)
        except RequestError as error:
            if "already" not in str(error):  # an earlier client of this server loaded the same folder
                raise
        self._loaded.append(name)
        self._current = (name, version)

    async def drop_unused(self) -> None:
        """Unload the adapters before the current one that no request uses."""
        for name in [name for name in self._loaded if name != self._current[0] and not self._users[name]]:
            self._loaded.remove(name)
            try:
                await self._unload(name)
            except RequestError:
                continue  # a restarted server never had it

    @contextmanager
    def part(self, part: GenerationPart, on_chunk: OnChunk) -> Iterator[tuple[GenerationPart, OnChunk]]:
        """The part with the current adapter, and a callback that gives its version to all its tokens.

        The server counts the versions of the whole model, which says nothing about the adapter of a request.
        """
        name, version = self._current
        if part.adapter or not name:
            yield part, on_chunk
            return

        def on_own(chunk: PartChunk) -> None:
            on_chunk(chunk._replace(versions=[version] * len(chunk.token_ids), part_versions=None))

        self._users[name] += 1
        try:
            yield replace(part, adapter=name), on_own
        finally:
            self._users[name] -= 1
