"""Parts of one prompt that are requested at the same time leave as one request of the native server."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")


@dataclass(slots=True, eq=False)
class Member:
    """A part in a group."""

    part: GenerationPart
    on_chunk: OnChunk
    ended: asyncio.Future[None]

    def add(self, parse: Callable[[_Answer], PartChunk], answer: _Answer) -> None:
        """Give the chunk in an answer to the caller. An error ends this member alone."""
        if self.ended.done():
            return
        try:
            chunk = parse(answer)
            self.on_chunk(chunk)
        except ArealError as error:
            self.ended.set_exception(error)
            return
        if chunk.finish_reason is not None:
            self.ended.set_result(None)


@dataclass(slots=True, eq=False)
class _Group:
    members: list[Member] = field(default_factory=list[Member])
    task: asyncio.Task[None] | None = None
    is_sent: bool = False


class GroupCalls:
    """Collects the parts that are requested within one turn of the event loop and differ in id and seed only."""

    def __init__(
        self,
        name: str,
        send: Callable[[list[Member]], Awaitable[None]],
        abort: Callable[[str], Awaitable[object]],
    ) -> None:
        """`send` requests the parts of all members; `abort` ends one part, by its id, that the server computes."""
        self._name = name
        self._send = send
        self._abort = abort
        self._open: dict[str, list[_Group]] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    async def generate(self, part: GenerationPart, on_chunk: OnChunk) -> None:
        """See `areal.fleet.replica.Replica`. A cancelled call ends its part on the server."""
        member = Member(part, on_chunk, asyncio.get_running_loop().create_future())
        group = self._group_of(part)
        group.members.append(member)
        try:
            await member.ended
        except (asyncio.CancelledError, ArealError):
            self._left(group, part)
            raise

    def _left(self, group: _Group, part: GenerationPart) -> None:
        """Nobody waits for a part any more."""
        assert group.task is not None
        if all(one.ended.done() for one in group.members):
            group.task.cancel()  # drops the connection, which ends all parts
        elif group.is_sent and not group.task.done():
            self._start(self._abort_quietly(part.part_id), "abort a part")

    def _group_of(self, part: GenerationPart) -> _Group:
        """The group that waits for parts like this one, or a new one. Without a group id the part is alone."""
        groups = self._open.setdefault(part.group_id, []) if part.group_id else []
        for group in groups:
            first = group.members[0].part
            # equal fields are mostly the same objects, which are not compared in full
            if replace(part, part_id=first.part_id, seed=first.seed) == first:
                return group
        group = _Group()
        groups.append(group)
        # Starts in the next turn of the loop: the other parts of this turn have joined by then.
        group.task = self._start(self._run(part.group_id, groups, group), "generate")
        return group

    async def _run(self, group_id: str, groups: list[_Group], group: _Group) -> None:
        groups.remove(group)
        if group_id and not groups:
            del self._open[group_id]
        group.is_sent = True
        members = [member for member in group.members if not member.ended.done()]
        if not members:
            return
        text, code = f"{self._name} ended an answer without a finish reason", "server.unreadable_answer"
        kind: type[ArealError] = ServerUnavailable
        try:
            await self._send(members)
        except ArealError as error:
            text, code, kind = str(error), error.code, type(error)
        except Exception as error:  # noqa: BLE001 - of one request: its callers get it
            text = f"{self._name} sent an answer that cannot be read: {error!r}"
        for member in members:
            if not member.ended.done():
                member.ended.set_exception(kind(text, code=code))

    async def _abort_quietly(self, part_id: str) -> None:
        with contextlib.suppress(RequestError, ServerUnavailable):  # the server may have ended
            await self._abort(part_id)

    def _start(self, work: Awaitable[_Result], name: str) -> asyncio.Task[_Result]:
        task: asyncio.Task[_Result] = asyncio.ensure_future(work)  # pyright: ignore[reportAssignmentType]
        task.set_name(f"{self._name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for the tasks. Their connections are dropped before."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
