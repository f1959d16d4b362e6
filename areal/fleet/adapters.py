"""What the clients of foreign servers add to an answer: stop strings across its parts, and versioned LoRA adapters."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from areal.api.columns import Packed, Runs, joined, to_runs
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError
from areal.fleet.replica import PartChunk

Parts = AsyncGenerator[PartChunk, None]


async def ended_by_stops(
    request: GenerationRequest, chunks: Parts, to_texts: Callable[[list[Sequence[int]]], Awaitable[list[str]]]
) -> Parts:
    """The chunks of a part, which ends where a stop string ends that started in an earlier part.

    Foreign servers search stop strings in the text of one part only. The first tokens are held until it is certain that
    none ends in them; the server finds all later ones itself. `to_texts` detokenizes lists of which each is a prefix of
    the next.
    """
    stops = request.gconfig.stop or []
    if not (stops and request.num_prior_output_tokens):
        async for chunk in chunks:
            yield chunk
        return
    reach = max(len(stop.encode()) for stop in stops)  # in tokens: each token has at least one byte
    num_before = min(request.num_prior_output_tokens, reach + 1)  # one more: the first token can lose its space
    held: list[PartChunk] = []
    async for chunk in chunks:
        held.append(chunk)
        if chunk.finish_reason is not None or sum(len(text.token_ids) for text in held) >= reach:
            break
    new = joined("i", (chunk.token_ids for chunk in held))
    before, reach = request.input_ids[-num_before:], min(reach, len(new))
    texts = await to_texts([joined("i", (before, new[:count])) for count in range(reach + 1)])
    # Not a stop string that is complete within the first min_new_tokens.
    for count in range(max(request.gconfig.min_new_tokens, 1), reach + 1):
        if any(texts[count].count(stop) > texts[count - 1].count(stop) for stop in stops):
            yield _cut(held, count)
            return
    for chunk in held:
        yield chunk
    async for chunk in chunks:
        yield chunk


def _cut(held: list[PartChunk], count: int) -> PartChunk:
    """The first tokens of several chunks, as a whole part that was stopped."""
    token_ids: Packed[int] = joined("i", (chunk.token_ids for chunk in held))
    logprobs: Packed[float] = joined("f", (chunk.logprobs for chunk in held))
    reported, experts = held[-1].part_versions, held[-1].routed_experts
    versions = reported or Runs(run for chunk in held for run in to_runs(chunk.versions).runs)
    known = reported and reported[:count]
    return PartChunk(token_ids[:count], logprobs[:count], versions[:count], "stop", known, experts)


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
        """Folder -> number of its uses."""

    @property
    def name(self) -> str:
        """The current adapter; empty = the base model."""
        return self._current[0]

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
    def chosen(self, request: GenerationRequest) -> Iterator[tuple[GenerationRequest, int | None]]:
        """The request with the current adapter, and its version; None when the server knows the versions of tokens.

        The server counts the versions of the whole model, which says nothing about the adapter of a request.
        """
        name, version = self._current
        if request.adapter or not name:
            yield request, None
            return
        self._users[name] += 1
        try:
            yield replace(request, adapter=name), version
        finally:
            self._users[name] -= 1


def with_version(chunk: PartChunk, version: int | None) -> PartChunk:
    """The chunk with the version of an adapter for all its tokens."""
    if version is None:
        return chunk
    return chunk._replace(versions=Runs.of(version, len(chunk.token_ids)), part_versions=None)
