"""Owns generation over many replicas: answers that survive interruptions and deaths, and new weights for all.

`agenerate` waits for a replica that serves (unblocked by a health check, the end of a publication or a refit) and for
tokens (unblocked by the server, by its death, or by request_timeout). `update_weights` waits for pauses and updates,
each under a time limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import GenerationRequest, GenerationResponse, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable, WeightSyncError
from areal.engine.continuation import Answer
from areal.engine.native import make_native_replica
from areal.engine.replica import PartChunk, Replica, ReplicaFactory
from areal.engine.replica_set import ANY_VERSION, CHECK_TIMEOUT_INTERVALS, ReplicaSet, Slot
from areal.engine.routing import Router
from areal.observe.log import get_logger
from areal.system.discovery import NameRegistry
from areal.system.open_files import raise_open_file_limit

log = get_logger(__name__)

PAUSE_TIMEOUT_S = 30.0
"""A replica that does not pause or resume within this is taken out."""
_RATE_WINDOW_S = 10.0


class Fleet:
    """Implements `areal.api.engine.InferenceFleet` over the servers of a registry."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: ReplicaFactory = make_native_replica,
    ) -> None:
        self._config = config
        self._replicas = ReplicaSet(registry, num_servers, config, factory)
        self._router = Router("round_robin" if config.schedule_policy == "round_robin" else "least_loaded")
        self._publication = asyncio.Lock()
        self._publishing: int | None = None
        """The version being published; no request is sent meanwhile."""
        self._num_waiting = 0
        self._num_tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque()

    @property
    def version(self) -> int:
        """The policy version that the fleet serves."""
        return self._replicas.target_version

    async def start(self) -> None:
        """Wait until each replica is healthy. ServerUnavailable, naming the missing ones, after setup_timeout."""
        raise_open_file_limit()
        await self._replicas.start()

    async def close(self) -> None:
        """Stop watching and drop all connections; running requests fail."""
        await self._replicas.close()

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach: alive, and not serving that version already."""
        lacking = ("stale", "suspect") if version == self.version else ("serving", "stale", "suspect")
        return [slot.incarnation for slot in self._replicas.slots if slot.state in lacking]

    # Generation

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        """One answer, whole, whatever happens to the replicas on the way.

        RequestError: the request can never succeed. ServerUnavailable: more replicas failed under it than
        request_retries allows, or none served for request_timeout.
        """
        answer = Answer(request, stream_interval=self._config.stream_interval)
        started = time.perf_counter()
        first_token: float | None = None

        def on_chunk(chunk: PartChunk) -> None:
            nonlocal first_token
            answer.add(chunk)
            if first_token is None and chunk.token_ids:
                first_token = time.perf_counter()
            self._num_tokens += len(chunk.token_ids)

        num_failures = 0
        avoid = ""
        while not answer.finished:
            slot, replica = await self._pick(request, avoid)
            problem = await self._run_part(answer, slot, replica, on_chunk)
            answer.interrupted()
            if problem and not answer.finished:
                avoid = slot.name
                num_failures += 1
                if num_failures > self._config.request_retries:
                    raise ServerUnavailable(
                        f"request {request.request_id} failed {num_failures} times "
                        f"(rollout.request_retries={self._config.request_retries}), last: {problem}"
                    )
        ended = time.perf_counter()
        return answer.response(latency_s=ended - started, ttft_s=(first_token or ended) - started)

    async def _run_part(self, answer: Answer, slot: Slot, replica: Replica, on_chunk: Any) -> str:
        """Let one replica add to the answer; says what went wrong, empty when nothing did."""
        part = answer.next_part(slot.name)
        version = self.version
        slot.num_running += 1
        try:
            async with asyncio.timeout(self._config.request_timeout):
                await replica.generate(part, on_chunk)
        except ServerUnavailable as error:
            self._replicas.suspect(slot, replica, str(error))
            return str(error)
        except TimeoutError:
            slot.num_failures += 1
            return f"{slot.name} gave no whole answer in {self._config.request_timeout:g} s (rollout.request_timeout)"
        finally:
            slot.num_running -= 1
        asked_for = self._publishing is not None or version != self.version
        if not answer.finished and not asked_for and answer.num_tokens == part.num_prior_output_tokens:
            return f"{slot.name} aborted the request without a token"  # were it no failure, this could go on for ever
        return ""

    async def _pick(self, request: GenerationRequest, avoid: str) -> tuple[Slot, Replica]:
        """A replica that serves; waits for one. ServerUnavailable after request_timeout without any."""
        serving = self._serving()
        if not serving:
            serving = await self._wait_for_serving(request.request_id)
        slot = self._router.pick(serving, request.group_id, avoid)
        assert slot.replica is not None  # a slot that serves has its connection
        return slot, slot.replica

    def _serving(self) -> list[Slot]:
        return [] if self._publishing is not None else self._replicas.serving

    async def _wait_for_serving(self, request_id: str) -> list[Slot]:
        self._num_waiting += 1
        try:
            deadline = time.monotonic() + self._config.request_timeout
            while not (serving := self._serving()):
                if self._publishing is not None:  # has time limits of its own
                    deadline = time.monotonic() + self._config.request_timeout
                elif time.monotonic() >= deadline:
                    raise ServerUnavailable(
                        f"request {request_id} found no replica that serves for {self._config.request_timeout:g} s "
                        f"(rollout.request_timeout): {self._replicas.describe()}"
                    )
                await self._replicas.wait_for_change(deadline - time.monotonic())
            return serving
        finally:
            self._num_waiting -= 1

    # Publication

    async def update_weights(self, update: WeightUpdate) -> None:
        """Bring every replica that is well to `update.version`. WeightSyncError when none got there.

        One that fails is taken out and does not hold the others back. After an error the fleet serves what it
        served before, as far as replicas still hold it.
        """
        async with self._publication:
            if update.kind == "disk" and update == self._replicas.target and self._replicas.serving:
                return  # the answer to the first call was lost
            self._publishing = update.version
            try:
                slots = await self._members(update)
                try:
                    await self._pause(slots)
                    if self._config.pause_grace_period:
                        await asyncio.sleep(self._config.pause_grace_period)
                    await self._update(slots, update)
                finally:
                    await self._resume(slots)
                await self._wait_until_served(update)
            finally:
                self._publishing = None
                self._replicas.announce()
        log.info("version %d is served by %d replicas", update.version, len(self._replicas.serving))

    async def _members(self, update: WeightUpdate) -> list[Slot]:
        """The replicas that take part, in order of rank for a collective."""
        limit = CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        deadline = time.monotonic() + limit
        while any(slot.state == "suspect" for slot in self._replicas.slots) and time.monotonic() < deadline:
            await self._replicas.wait_for_change(deadline - time.monotonic())
        ready = [slot for slot in self._replicas.slots if slot.state in ("serving", "stale")]
        if update.kind == "disk":
            return ready
        by_id = {slot.incarnation: slot for slot in ready}
        gone = [name for name in update.replicas if name not in by_id]
        if gone or not update.replicas:
            raise WeightSyncError(
                f"version {update.version}: {', '.join(gone) or 'nobody'} cannot take part in the update group: "
                f"{self._replicas.describe()}"
            )
        return [by_id[name] for name in update.replicas]

    async def _pause(self, slots: list[Slot]) -> None:
        mode = "abort" if self._config.weight_update == "interrupt" else "retract"
        await asyncio.gather(*(self._control(s, s.replica.pause(mode), "pause") for s in slots if s.replica))

    async def _resume(self, slots: list[Slot]) -> None:
        await asyncio.gather(*(self._control(s, s.replica.resume(), "resume") for s in slots if s.replica))

    async def _control(self, slot: Slot, call: Coroutine[Any, Any, None], what: str) -> None:
        try:
            async with asyncio.timeout(PAUSE_TIMEOUT_S):
                await call
        except (ArealError, TimeoutError) as error:
            await self._replicas.take_out(slot, f"did not {what}: {error or f'no answer in {PAUSE_TIMEOUT_S:g} s'}")

    async def _update(self, slots: list[Slot], update: WeightUpdate) -> None:
        """All at once, as a collective needs it. WeightSyncError when every one failed and none can be refitted."""
        if update.kind == "collective" and any(slot.replica is None for slot in slots):
            raise WeightSyncError(f"version {update.version} lost a replica: {self._replicas.describe()}")
        outcomes = await asyncio.gather(
            *(self._replicas.update(slot, update, rank=1 + index) for index, slot in enumerate(slots)),
            return_exceptions=True,
        )
        errors: list[BaseException] = []
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, ArealError):
                log.warning("%s did not take in version %d: %s", slot.name, update.version, outcome)
                errors.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        refused = any(isinstance(error, RequestError) for error in errors)
        if len(errors) == len(slots) and (update.kind == "collective" or refused):
            reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
            raise WeightSyncError(f"no replica took in version {update.version}: {reasons}")
        self._replicas.set_target(update.version, update)

    async def _wait_until_served(self, update: WeightUpdate) -> None:
        """When all replicas died over it, a folder can still be loaded by those that come back."""
        deadline = time.monotonic() + self._config.weight_update_timeout_s
        while not self._replicas.serving:
            if time.monotonic() >= deadline:
                raise WeightSyncError(f"no replica took in version {update.version}: {self._replicas.describe()}")
            await self._replicas.wait_for_change(deadline - time.monotonic())

    # Status

    def status(self) -> dict[str, Any]:
        """JSON-ready: the served version, each replica, requests that wait and for what, tokens generated."""
        waiting_for = ""
        if self._publishing is not None:
            waiting_for = f"the publication of version {self._publishing}"
        elif not self._replicas.serving:
            waiting_for = f"a replica that serves: {self._replicas.describe()}"
        return {
            "version": self.version,
            "replicas": [slot.status() for slot in self._replicas.slots],
            "waiting_requests": self._num_waiting,
            "waiting_for": waiting_for,
            "needs_publication": self._needs_publication(),
            "generated_tokens": self._num_tokens,
            "tokens_per_s": self._tokens_per_s(),
        }

    def _needs_publication(self) -> bool:
        """Servers came back and none holds the version, which went over a collective: only the trainer has it."""
        replicas = self._replicas
        if self._publishing is not None or replicas.serving or any(slot.state == "updating" for slot in replicas.slots):
            return False
        has_begun = replicas.target_version != ANY_VERSION
        by_trainer_only = replicas.target is None or replicas.target.kind == "collective"
        return has_begun and by_trainer_only and any(slot.state == "stale" for slot in replicas.slots)

    def _tokens_per_s(self) -> float:
        """Over the calls of the last seconds; 0 at the first call."""
        now = time.monotonic()
        samples = self._rate_samples
        samples.append((now, self._num_tokens))
        while len(samples) > 2 and samples[0][0] < now - _RATE_WINDOW_S:
            samples.popleft()
        seconds = now - samples[0][0]
        return (self._num_tokens - samples[0][1]) / seconds if seconds > 0 else 0.0
