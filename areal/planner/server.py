"""Simulated inference servers, which the real fleet talks to as to clients of server processes.

All running sequences of a server advance together, one token in a decode step. It keeps a count of its steps; a
sequence ends when the count reaches a mark, so that an arrival or an end costs a look at a heap and not at every one.
"""

import asyncio
import heapq
import json
import math
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import count

from areal.api.columns import Packed, RunsBuilder
from areal.api.data import GenerationRequest, WeightUpdate
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.replica import (
    AnswerForm,
    Chunks,
    FinishReason,
    PartChunk,
    PauseMode,
    Replica,
    ReplicaInfo,
    ReplicaLoad,
)
from areal.planner.cores import Cores
from areal.planner.service import ServerTimes
from areal.system.network import LOOPBACK

VOCABULARY = 1000
_ENOUGH = 1e-4  # A sequence whose mark is this near has ended: the loop calls a timer up to 1e-9 s early.


class _Sequence:
    """One request."""

    def __init__(self, request: GenerationRequest, number: int, out: "asyncio.Queue[tuple[int, PartChunk]]") -> None:
        self.request_id = request.request_id
        self.group = request.group_id
        self.prompt, self.prior = len(request.input_ids), request.num_prior_output_tokens
        self.length = request.gconfig.max_new_tokens
        self.number, self.out = number, out
        self.mark = 0.0
        """Steps of the server at its end; 0 = it has not started."""
        self.versions: RunsBuilder[int] = RunsBuilder()
        self.ended = False


class SimulatedServer(Replica):
    """An answer has exactly `gconfig.max_new_tokens` tokens. Calls about adapters and collectives do nothing."""

    max_group = 256

    def __init__(self, times: ServerTimes, cores: Cores) -> None:
        self.version = 0
        self.busy_s = self.sequence_s = 0.0
        """Seconds in which it computed, and the sum of the seconds of the sequences that ran."""
        self.num_prefilled = 0
        """Prompt tokens that it computed, also those that it computed again."""
        self._times, self._cores = times, cores
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, _Sequence]] = []
        self._order = count()
        self._num_running, self._context = 0, 0.0
        self._waiting: deque[_Sequence] = deque()
        self._steps, self._owed_s = 0.0, 0.0
        """Steps so far; seconds of prefill before the next one."""
        self._looked_s, self._worked_s = self._loop.time(), cores.time()
        self._is_computing = self._is_paused = self._is_dead = False
        self._known: dict[str, int] = {}  # Tokens of the common beginning of a group that the cache holds.
        self._calls: dict[_Sequence, None] = {}

    # The client

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        out: asyncio.Queue[tuple[int, PartChunk]] = asyncio.Queue()
        sequences = [_Sequence(request, number, out) for number, request in enumerate(requests)]
        self._require_alive()
        self._calls |= dict.fromkeys(sequences)
        try:
            if self._times.queued_s:
                await asyncio.sleep(self._times.queued_s)
            self._look()
            self._waiting.extend(sequence for sequence in sequences if not sequence.ended)
            self._changed()
            for _ in sequences:
                number, chunk = await out.get()
                if chunk.finish_reason is None:
                    raise ServerUnavailable("the simulated server is lost", code="server.unreachable")
                yield number, chunk
        finally:
            self._end_all(sequences)
            for sequence in sequences:
                del self._calls[sequence]

    def _require_alive(self) -> None:
        if self._is_dead:
            raise ServerUnavailable("the simulated server is lost", code="server.unreachable")

    async def abort(self, request_id: str) -> None:
        self._end_all([call for call in self._calls if call.request_id == request_id])

    def _end_all(self, sequences: Sequence[_Sequence]) -> None:
        self._look()
        for sequence in sequences:
            if not sequence.ended:
                self._end(sequence, "abort")
        self._changed()

    async def pause(self, mode: PauseMode) -> None:
        self._look()
        self._pause(mode)
        self._changed()

    async def resume(self) -> None:
        self._look()
        self._is_paused = False
        self._changed()

    @property
    def has_second_copy(self) -> bool:
        return self._times.has_second_copy

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        self._require_alive()
        await asyncio.sleep(self._times.prepare_s)

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        self._require_alive()
        was_paused = self._is_paused
        if not was_paused:
            await self.pause(mode)
        try:
            await asyncio.sleep(self._times.install_s)
            self._require_alive()
        finally:
            self._look()
            for _, _, sequence in self._heap:
                self._note(sequence)
            if not self._is_dead:
                self.version = update.version
            if mode != "in_place":
                self._known.clear()
            self._is_paused = was_paused
            self._changed()

    async def info(self) -> ReplicaInfo:
        self._require_alive()
        return ReplicaInfo(version=self.version, vocab_size=VOCABULARY, context_length=2**30, weights_whole=True)

    async def load(self) -> ReplicaLoad:
        """It is for status reports only, which cost much with a thousand servers."""
        raise RequestError("a simulated server reports no load", code="server.request_failed")

    async def abandon_update(self) -> None: ...
    async def load_adapter(self, name: str, path: str) -> None: ...
    async def unload_adapter(self, name: str) -> None: ...

    async def close(self) -> None:
        """The connections are dropped: every call fails."""
        self._look()
        for sequence in self._calls:
            if not sequence.ended:
                self._forget(sequence)
                sequence.out.put_nowait((sequence.number, PartChunk((), (), (), None)))
        self._waiting.clear()
        self._changed()

    async def die(self) -> None:
        """The process ends: its answers are lost."""
        await self.close()
        self._is_dead = True

    def revive(self) -> None:
        """Another process takes its place, with an empty cache and the weights of the start."""
        self._is_dead, self.version, self._is_paused = False, 0, False
        self._known.clear()

    # The computation

    def _look(self) -> None:
        """Account for the time since the last look, and end what has ended."""
        now_s, worked_s = self._loop.time(), self._cores.time()
        passed_s, left_s = now_s - self._looked_s, worked_s - self._worked_s
        self._looked_s, self._worked_s = now_s, worked_s
        if passed_s <= 0 or not self._is_computing:
            return
        self.busy_s += passed_s
        self.sequence_s += passed_s * self._num_running
        owed_s = min(left_s, self._owed_s)
        self._owed_s -= owed_s
        steps = self._times.steps_in(left_s - owed_s, self._num_running, self._context)
        self._steps += steps
        self._context += steps * self._num_running
        while self._heap and self._heap[0][0] <= self._steps + _ENOUGH:
            _, _, sequence = heapq.heappop(self._heap)
            if not sequence.ended:
                self._end(sequence, "length")

    def _changed(self) -> None:
        """Start waiting sequences, and set the timer to the next end."""
        times = self._times
        while self._waiting and not self._is_paused and self._has_room:
            self._start(self._waiting.popleft())
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)
        computes = bool(self._num_running) and not self._is_paused
        if computes:
            decode_s = times.decode_s(max(0.0, self._heap[0][0] - self._steps), self._num_running, self._context)
            self._cores.call_at(self._worked_s + self._owed_s + decode_s, self._on_timer)
        else:
            self._cores.cancel(self._on_timer)
        if computes != self._is_computing:
            self._is_computing = computes
            self._cores.use(times.cores if computes else -times.cores)

    @property
    def _has_room(self) -> bool:
        fits = self._num_running < self._times.max_running and self._context < self._times.max_context
        return fits or not self._num_running

    def _on_timer(self) -> None:
        self._look()
        self._changed()

    def _start(self, sequence: _Sequence) -> None:
        if sequence.ended:
            return
        shared = sequence.prompt - sequence.prior
        computed = sequence.prior + max(0, shared - self._known.get(sequence.group, 0))
        self._owed_s += computed * self._times.prefill_s
        self.num_prefilled += computed
        self._keep(sequence, shared)
        sequence.mark = self._steps + sequence.length
        heapq.heappush(self._heap, (sequence.mark, next(self._order), sequence))
        self._num_running += 1
        self._context += sequence.prompt

    def _keep(self, sequence: _Sequence, tokens: int) -> None:
        if sequence.group:
            self._known[sequence.group] = max(tokens, self._known.get(sequence.group, 0))

    def _pause(self, mode: PauseMode) -> None:
        """`mode`: what happens to the running sequences."""
        self._is_paused = True
        if mode == "abort":
            for sequence in self._calls:
                if not sequence.ended:
                    self._end(sequence, "abort")
        elif mode == "retract":
            self._owed_s += self._context * self._times.prefill_s
            self.num_prefilled += int(self._context)

    def _note(self, sequence: _Sequence) -> None:
        """The whole tokens since the last call have the present version."""
        start = sequence.mark - sequence.length
        done = min(sequence.length, math.floor(self._steps - start + _ENOUGH))
        sequence.versions.add(self.version, done - len(sequence.versions))

    def _forget(self, sequence: _Sequence) -> None:
        """It is not computed any more."""
        sequence.ended = True
        if sequence.mark:
            self._num_running -= 1
            tokens = sequence.prompt + sequence.length - (sequence.mark - self._steps)
            self._context = max(0.0, self._context - tokens) if self._num_running else 0.0
            self._owed_s = self._owed_s if self._num_running else 0.0

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        if sequence.mark:
            self._note(sequence)
        if reason == "length":
            self._keep(sequence, sequence.prompt + sequence.length)
        self._forget(sequence)
        ids, logprobs = (array(kind, bytes(4 * len(sequence.versions))) for kind in "if")
        chunk = PartChunk(Packed(ids), Packed(logprobs), sequence.versions.column(), reason)
        sequence.out.put_nowait((sequence.number, chunk))


class SimulatedServers:
    """All servers of a run, as the name registry that the fleet reads and as its factory of clients."""

    def __init__(self, number: int, times: ServerTimes, cores: Cores) -> None:
        self.each = [SimulatedServer(times, cores) for _ in range(number)]
        self._starts = [1] * number

    def list(self, prefix: str) -> dict[str, str]:
        records = {place: {"address": f"http://{LOOPBACK}:{place}", "pid": n} for place, n in enumerate(self._starts)}
        return {f"{prefix}/{place}": json.dumps(record) for place, record in records.items()}

    def connect(self, name: str, address: str, form: AnswerForm, /) -> SimulatedServer:
        return self.each[int(address.rpartition(":")[2])]

    async def lose(self, place: int, back_after_s: float) -> None:
        """A server ends, and another process takes its place after a time."""
        await self.each[place].die()
        await asyncio.sleep(back_after_s)
        self.each[place].revive()
        self._starts[place] += 1
