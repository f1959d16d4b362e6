"""Parts that are requested at the same time leave as one request of the native server.

Streamed parts share a request with those of the same prompt; short ones, which are not streamed, also with those of
other prompts.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, TypeVar

from areal.api.errors import ArealError, RequestError, ServerUnavailable
from areal.fleet.replica import GenerationPart, OnChunk, PartChunk

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer")

MAX_MERGED_PARTS = 64
"""Of short answers in one request: its answer is read in one turn of the event loop."""
MAX_MERGED_TOKENS = 4096
"""Prompt tokens of a request for several prompts. A server accepts more."""
_OWN = ("part_id", "seed", "input_ids", "group_id")
_settings_of = attrgetter(*(one.name for one in fields(GenerationPart) if one.name not in _OWN))
"""What all parts of a request have in common."""


@dataclass(slots=True, eq=False)
class _Call:
    """A caller that waits for its members."""

    ended: asyncio.Future[None]
    num_left: int
    """Members that have not ended."""
    error: ArealError | None = None
    """The first of a member; a refusal replaces a failure."""


@dataclass(slots=True, eq=False)
class Member:
    """A part in a group."""

    part: GenerationPart
    on_chunk: OnChunk
    call: _Call
    outcome: Literal["", "finished", "failed"] = ""

    @property
    def is_awaited(self) -> bool:
        return not self.outcome and not self.call.ended.done()

    def add(self, parse: Callable[[_Answer], PartChunk], answer: _Answer) -> None:
        """Give the chunk in an answer to the caller. An error ends this member alone."""
        if not self.is_awaited:
            return
        try:
            chunk = parse(answer)
            self.on_chunk(chunk)
        except ArealError as error:
            self.end(error)
            return
        if chunk.finish_reason is not None:
            self.end()

    def end(self, error: ArealError | None = None) -> None:
        """Wakes the caller after the last of its members."""
        call, self.outcome = self.call, "failed" if error else "finished"
        call.num_left -= 1
        if error is not None and (call.error is None or isinstance(error, RequestError)):
            call.error = error
        if call.num_left:
            return
        if call.error is None:
            call.ended.set_result(None)
        else:
            call.ended.set_exception(call.error)


@dataclass(slots=True, eq=False)
class _Group:
    """The members of one request."""

    members: list[Member] = field(default_factory=list[Member])
    task: asyncio.Task[None] | None = None
    is_sent: bool = False
    num_tokens: int = 0
    """Of the prompts."""

    def takes(self, part: GenerationPart) -> bool:
        """Whether `part` can be requested with the members."""
        if not part.is_streamed and len(self.members) >= MAX_MERGED_PARTS:
            return False
        first = self.members[0].part
        if _settings_of(part) != _settings_of(first):
            return False
        if part.group_id == first.group_id and part.input_ids == first.input_ids:
            return True
        may_merge = not part.is_streamed and not part.images
        return may_merge and self.num_tokens + len(part.input_ids) <= MAX_MERGED_TOKENS

    def add(self, member: Member) -> None:
        is_same = bool(self.members) and self.members[-1].part.input_ids is member.part.input_ids
        self.num_tokens += 0 if is_same else len(member.part.input_ids)
        self.members.append(member)


def by_prompt(members: list[Member]) -> list[list[Member]]:
    """The members, in order, in lists of equal prompts and group ids."""
    found: list[list[Member]] = []
    for member in members:
        part, last = member.part, found[-1][0].part if found else None
        if last is not None and part.group_id == last.group_id and part.input_ids == last.input_ids:
            found[-1].append(member)
        else:
            found.append([member])
    return found


class GroupCalls:
    """Collects the parts that are requested within one turn of the event loop and have the same settings."""

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
        self._streamed: dict[str, list[_Group]] = {}
        """Groups that wait, by group id."""
        self._short: list[_Group] = []
        self._tasks: set[asyncio.Task[object]] = set()

    async def generate(self, parts: Sequence[GenerationPart], on_chunks: Sequence[OnChunk]) -> None:
        """See `generate_group` of `areal.fleet.replica.Replica`. A cancelled call ends its parts on the server."""
        call = _Call(asyncio.get_running_loop().create_future(), len(parts))
        joined: list[tuple[_Group, Member]] = []
        group: _Group | None = None
        for part, on_chunk in zip(parts, on_chunks, strict=True):
            if group is None or not group.takes(part):
                group = self._group_of(part)
            member = Member(part, on_chunk, call)
            group.add(member)
            joined.append((group, member))
        try:
            await call.ended
        except (asyncio.CancelledError, ArealError):
            for group, member in joined:
                if member.outcome != "finished":
                    self._left(group, member.part)
            raise

    def _left(self, group: _Group, part: GenerationPart) -> None:
        """Nobody waits for a part any more."""
        assert group.task is not None
        if not any(one.is_awaited for one in group.members):
            group.task.cancel()  # drops the connection, which ends all parts
        elif group.is_sent and not group.task.done():
            self._start(self._abort_quietly(part.part_id), "abort a part")

    def _group_of(self, part: GenerationPart) -> _Group:
        """The group that waits for parts like this one, or a new one. A streamed part without a group id is alone."""
        groups = self._short
        if part.is_streamed:
            groups = self._streamed.setdefault(part.group_id, []) if part.group_id else []
        for group in groups:
            if group.takes(part):
                return group
        group = _Group()
        groups.append(group)
        # Starts in the next turn of the loop: the other parts of this turn have joined by then.
        group.task = self._start(self._run(part.group_id, groups, group), "generate")
        return group

    async def _run(self, group_id: str, groups: list[_Group], group: _Group) -> None:
        groups.remove(group)
        if groups is self._streamed.get(group_id) and not groups:
            del self._streamed[group_id]
        group.is_sent = True
        await self._request([member for member in group.members if member.is_awaited])

    async def _request(self, members: list[Member]) -> None:
        """Request parts; an error ends those that have not ended."""
        if not members:
            return
        text, code = f"{self._name} ended an answer without a finish reason", "server.unreadable_answer"
        kind: type[ArealError] = ServerUnavailable
        try:
            await self._send(members)
        except ArealError as error:
            prompts = by_prompt(members)
            if isinstance(error, RequestError) and len(prompts) > 1:  # perhaps of one prompt only
                await asyncio.gather(*map(self._request, prompts))
                return
            text, code, kind = str(error), error.code, type(error)
        except Exception as error:  # noqa: BLE001 - of one request: its callers get it
            text = f"{self._name} sent an answer that cannot be read: {error!r}"
        for member in members:
            if member.is_awaited:
                member.end(kind(text, code=code))

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
