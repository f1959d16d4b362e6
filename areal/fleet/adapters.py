"""The LoRA adapters that one server has loaded: a new name for each policy version, and none that no request uses."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from areal.api.errors import RequestError
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk

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
