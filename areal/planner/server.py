"""A simulated inference server, which the real fleet talks to as to a client of a server process.

All running sequences advance together, one token in a decode step. The server keeps a count of its steps; a sequence
ends when the count reaches a mark, so that an arrival or an end costs a look at a heap and not at every sequence.
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
from areal.fleet.replica import Chunks, FinishReason, PartChunk, PauseMode, Replica, ReplicaInfo, ReplicaLoad
from areal.planner.cores import Cores, Timer
from areal.planner.service import ServerTimes
from areal.system.network import LOOPBACK

VOCABULARY = 1000
_ENOUGH = 1e-4  # A sequence whose mark is this near has ended: the loop calls a timer up to 1e-9 s early.


class _Sequence:
    """One request."""

    __slots__ = ("ended", "group", "length", "mark", "number", "out", "prior", "prompt", "request_id", "versions")

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

    takes_groups = True

    def __init__(self, name: str, times: ServerTimes, cores: Cores, *, unit: int = 1) -> None:
        """`unit`: tokens that each token of a request stands for."""
        self.name, self.version = name, 0
        self.busy_s = self.sequence_s = 0.0
        """Seconds in which it computed, and the sum of the seconds of the sequences that ran."""
        self.num_prefilled = 0
        """Prompt tokens that it computed, also those that it computed again."""
        self.is_dead = False
        self._times, self._cores, self._unit = times, cores, unit
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, _Sequence]] = []
        self._order = count()
        self._num_running, self._context = 0, 0.0
        self._waiting: deque[_Sequence] = deque()
        self._steps, self._owed_s = 0.0, 0.0
        """Steps so far; seconds of prefill before the next one."""
        self._looked_s, self._worked_s = self._loop.time(), cores.time()
        self._timer, self._is_computing = Timer(cores, self._on_timer), False
        self._is_paused = False
        self._known: dict[str, int] = {}  # Tokens of the common beginning of a group that the cache holds.
        self._calls: dict[_Sequence, None] = {}

    # The client

    async def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        out: asyncio.Queue[tuple[int, PartChunk]] = asyncio.Queue()
        sequences = [_Sequence(request, number, out) for number, request in enumerate(requests)]
        for sequence in sequences:
            self._calls[sequence] = None
        try:
            self._require_alive()
            self._look()
            self._waiting.extend(sequence for sequence in sequences if not sequence.ended)
            self._changed()
            for _ in sequences:
                number, chunk = await out.get()
                if chunk.finish_reason is None:
                    self._require_alive()
                yield number, chunk
        finally:
            self._look()
            for sequence in sequences:
                self._calls.pop(sequence, None)
                if not sequence.ended:
                    self._end(sequence, "abort")
            self._changed()

    def _require_alive(self) -> None:
        if self.is_dead:
            raise ServerUnavailable(f"{self.name} is lost", code="server.unreachable")

    async def abort(self, request_id: str) -> None:
        self._look()
        for sequence in [one for one in self._calls if one.request_id == request_id and not one.ended]:
            self._end(sequence, "abort")
        self._changed()

    async def pause(self, mode: PauseMode) -> None:
        self._look()
        self._is_paused = True
        self._leave(mode)
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
        if self._times.prepare_s:
            await asyncio.sleep(self._times.prepare_s)

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        self._require_alive()
        was_paused = self._is_paused
        self._look()
        self._is_paused = True
        if not was_paused:
            self._leave(mode)
        self._changed()
        try:
            if self._times.install_s:
                await asyncio.sleep(self._times.install_s)
            self._require_alive()
        finally:
            self._look()
            self._note_versions()
            if not self.is_dead:
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
        self._drop_all()
        self._changed()

    def _drop_all(self) -> None:
        for sequence in [one for one in self._calls if not one.ended]:
            self._forget(sequence)
            sequence.out.put_nowait((sequence.number, PartChunk((), (), (), None)))
        self._waiting.clear()

    def die(self) -> None:
        """The process ends: its answers are lost, and so is its cache."""
        self._look()
        self.is_dead = True
        self._drop_all()
        self._changed()

    def revive(self) -> None:
        """Another process takes its place, with the weights of the start."""
        self.is_dead, self.version, self._is_paused = False, 0, False
        self._known.clear()

    # The computation

    def _look(self) -> None:
        """Account for the time since the last look, and end what has ended."""
        now_s, worked_s = self._loop.time(), self._cores.time()
        passed_s, left_s = now_s - self._looked_s, worked_s - self._worked_s
        self._looked_s, self._worked_s = now_s, worked_s
        if passed_s <= 0 or self._is_paused or self.is_dead or not self._num_running:
            return
        self.busy_s += passed_s
        self.sequence_s += passed_s * self._num_running
        owed_s = min(left_s, self._owed_s)
        self._owed_s -= owed_s
        running, context = self._num_running, self._context
        steps = self._times.steps_in(left_s - owed_s, running, context) / self._unit
        self._steps += steps
        self._context += steps * self._unit * running
        while self._heap and self._heap[0][0] <= self._steps + _ENOUGH:
            _, _, sequence = heapq.heappop(self._heap)
            if not sequence.ended:
                self._end(sequence, "length")

    def _changed(self) -> None:
        """Start waiting sequences, and set the timer to the next end."""
        while self._waiting and not self._is_paused and self._has_room:
            self._start(self._waiting.popleft())
        self._drop_ended()
        computes = bool(self._num_running) and not (self._is_paused or self.is_dead)
        if computes:
            running, context = self._num_running, self._context
            left = max(0.0, self._heap[0][0] - self._steps) * self._unit
            self._timer.set(self._worked_s + self._owed_s + self._times.decode_s(left, running, context))
        else:
            self._timer.cancel()
        if computes != self._is_computing:
            self._is_computing = computes
            self._cores.use(self._times.cores if computes else -self._times.cores)

    @property
    def _has_room(self) -> bool:
        if not self._num_running:
            return True
        return self._num_running < self._times.max_running and self._context < self._times.max_context

    def _on_timer(self) -> None:
        self._look()
        self._changed()

    def _drop_ended(self) -> None:
        while self._heap and self._heap[0][2].ended:
            heapq.heappop(self._heap)

    def _start(self, sequence: _Sequence) -> None:
        if sequence.ended:
            return
        shared = sequence.prompt - sequence.prior
        computed = sequence.prior + max(0, shared - self._known.get(sequence.group, 0))
        self._owed_s += computed * self._unit * self._times.prefill_s
        self.num_prefilled += computed * self._unit
        self._keep(sequence, shared)
        sequence.mark = self._steps + sequence.length
        heapq.heappush(self._heap, (sequence.mark, next(self._order), sequence))
        self._num_running += 1
        self._context += sequence.prompt * self._unit

    def _keep(self, sequence: _Sequence, tokens: int) -> None:
        if sequence.group:
            self._known[sequence.group] = max(tokens, self._known.get(sequence.group, 0))

    def _leave(self, mode: PauseMode) -> None:
        """What happens to running sequences at a pause or an exchange of weights."""
        if mode == "abort":
            for sequence in [one for one in self._calls if not one.ended]:
                self._end(sequence, "abort")
        elif mode == "retract":
            self._owed_s += self._context * self._times.prefill_s
            self.num_prefilled += int(self._context)

    def _note_versions(self) -> None:
        for _, _, sequence in self._heap:
            if not sequence.ended:
                self._note(sequence)

    def _note(self, sequence: _Sequence) -> None:
        """The whole tokens since the last call have the present version."""
        start = sequence.mark - sequence.length
        done = min(sequence.length, math.floor(self._steps - start + _ENOUGH))
        made = done - len(sequence.versions)
        if made > 0:
            sequence.versions.add(self.version, made)

    def _forget(self, sequence: _Sequence) -> None:
        """It is not computed any more."""
        sequence.ended = True
        if sequence.mark:
            self._num_running -= 1
            tokens = (sequence.prompt + sequence.length - (sequence.mark - self._steps)) * self._unit
            self._context = max(0.0, self._context - tokens) if self._num_running else 0.0
            self._owed_s = self._owed_s if self._num_running else 0.0

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        if sequence.mark:
            self._note(sequence)
        if reason == "length":
            self._keep(sequence, sequence.prompt + sequence.length)
        self._forget(sequence)
        size = len(sequence.versions)
        ids = Packed(array("i", bytes(4 * size)))
        chunk = PartChunk(ids, Packed(array("f", bytes(4 * size))), sequence.versions.column(), reason)
        sequence.out.put_nowait((sequence.number, chunk))


class Registrations:
    """What the fleet reads of a name registry: the servers that there are."""

    def __init__(self, num_servers: int) -> None:
        self._starts = [0] * num_servers

    def replaced(self, index: int) -> None:
        """A server is started again."""
        self._starts[index] += 1

    def list(self, prefix: str) -> dict[str, str]:
        found = {index: {"address": f"http://{LOOPBACK}:{index}", "pid": 1 + n} for index, n in enumerate(self._starts)}
        return {f"{prefix}/{index}": json.dumps(record) for index, record in found.items()}
