"""Owns generation over many replicas: answers that survive interruptions, deaths, and a trainer that goes back.

`agenerate` waits for a replica that serves (unblocked by a health check, the end of a publication or a refit), for the
version that made its newest token (unblocked by the trainer, which has gone back to an older one) and for tokens
(unblocked by the server, by its death, or by request_timeout). What a publication waits for is told in
`areal.fleet.fleet_update`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import GenerationRequest, GenerationResponse, WeightUpdate
from areal.api.errors import ServerUnavailable
from areal.fleet.continuation import Answer
from areal.fleet.fleet_update import Publisher
from areal.fleet.replica import PartChunk, Replica, ReplicaFactory
from areal.fleet.replica_set import ReplicaSet
from areal.fleet.request_check import check_request
from areal.fleet.routing import Router
from areal.fleet.slot import Slot
from areal.system.discovery import NameRegistry
from areal.system.process import raise_open_file_limit

_RATE_WINDOW_S = 10.0


class Fleet:
    """Implements `areal.api.engine.InferenceFleet` over the servers of a registry."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: ReplicaFactory,
        *,
        outlived: range = range(0),
    ) -> None:
        """`outlived`: versions that the trainer made before it went back and is to make again. A server that holds one
        holds other weights than those to come under the same number."""
        self._config = config
        self._replicas = ReplicaSet(registry, num_servers, config, factory, outlived)
        self._router = Router(config.schedule_policy)
        self._publisher = Publisher(self._replicas, config)
        self._num_waiting = 0
        self._awaited_versions: Counter[int] = Counter()
        """Answers that wait until the fleet serves a version again, by that version."""
        self._num_tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque()

    @property
    def version(self) -> int:
        """The policy version that the fleet serves."""
        return self._replicas.target_version

    async def start(self) -> None:
        """Wait until `num_servers` replicas are healthy. ServerUnavailable, naming the others, after setup_timeout."""
        raise_open_file_limit()
        await self._replicas.start()

    async def close(self) -> None:
        """Stop watching and drop all connections; running requests fail."""
        await self._replicas.close()

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach: alive, and not serving that version already.

        None before the fleet has started: it waits for all.
        """
        if not self._replicas.has_started:
            return []
        lacking = ("stale", "suspect") if version == self.version else ("serving", "stale", "suspect")
        return [slot.incarnation for slot in self._replicas.slots if slot.state in lacking]

    # Generation

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        """One answer, whole, whatever happens to the replicas on the way.

        RequestError: the request can never succeed. ServerUnavailable: more replicas failed under it than
        request_retries allows, or none served for request_timeout. While the fleet serves an older version than made
        the newest token, it waits without a limit.
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
            slot, replica = await self._pick(request, answer.newest_version, avoid)
            if answer.num_parts == 0:  # only now some replica has told what it can take, whenever that was
                check_request(request, self._replicas.bounds())
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
            if self._is_behind(answer.newest_version) or slot not in self._replicas.slots:
                return ""  # the fleet went back, or the replica left: nothing has failed
            self._replicas.suspect(slot, replica, str(error))
            return str(error)
        except TimeoutError:
            slot.num_failures += 1
            return f"{slot.name} gave no whole answer in {self._config.request_timeout:g} s (rollout.request_timeout)"
        finally:
            slot.num_running -= 1
        asked_for = self._publisher.publishing is not None or version != self.version
        if not answer.finished and not asked_for and answer.num_tokens == part.num_prior_output_tokens:
            return f"{slot.name} aborted the request without a token"  # were it no failure, this could go on for ever
        return ""

    async def _pick(self, request: GenerationRequest, newest_version: int | None, avoid: str) -> tuple[Slot, Replica]:
        """A replica that serves; waits for one. ServerUnavailable after request_timeout without any."""
        while True:
            if newest_version is not None and self._is_behind(newest_version):
                await self._wait_for_version(newest_version)
            if serving := self._serving():
                break
            await self._wait_for_serving(request.request_id)  # the fleet may go back meanwhile
        slot = self._router.pick(serving, request, avoid)
        assert slot.replica is not None  # a slot that serves has its connection
        return slot, slot.replica

    def _serving(self) -> list[Slot]:
        return [] if self._publisher.is_switching else self._replicas.serving

    def _is_behind(self, newest_version: int | None) -> bool:
        """Whether the fleet has gone back: an answer never goes on under an older policy than made its newest token."""
        return newest_version is not None and self.version < newest_version

    async def _wait_for_version(self, version: int) -> None:
        """Until the trainer has made the version again, however long that takes."""
        self._awaited_versions[version] += 1
        self._num_waiting += 1
        try:
            while self._is_behind(version):
                self._require_open()
                await self._replicas.wait_for_change(None)
        finally:
            self._num_waiting -= 1
            self._awaited_versions[version] -= 1

    def _require_open(self) -> None:
        if self._replicas.is_closed:
            raise ServerUnavailable("the fleet is closed")

    async def _wait_for_serving(self, request_id: str) -> None:
        self._num_waiting += 1
        try:
            deadline = time.monotonic() + self._config.request_timeout
            while not self._serving():
                self._require_open()
                if self._publisher.is_switching:  # has time limits of its own
                    deadline = time.monotonic() + self._config.request_timeout
                elif time.monotonic() >= deadline:
                    raise ServerUnavailable(
                        f"request {request_id} found no replica that serves for {self._config.request_timeout:g} s "
                        f"(rollout.request_timeout): {self._replicas.describe()}"
                    )
                await self._replicas.wait_for_change(deadline - time.monotonic())
        finally:
            self._num_waiting -= 1

    # Publication

    async def update_weights(self, update: WeightUpdate) -> None:
        """Bring every replica that is well to `update.version`. WeightSyncError when none got there.

        One that fails is taken out and does not hold the others back. After an error the fleet serves what it
        served before, as far as replicas still hold it. When the version is served already, only replicas that lack it
        take part, the others go on undisturbed, and one that fails is no error.
        """
        await self._publisher.update_weights(update)

    # Status

    def status(self) -> dict[str, Any]:
        """JSON-ready: the served version, each replica, requests that wait and for what, tokens generated."""
        waiting_for = ""
        awaited = +self._awaited_versions
        if self._publisher.is_switching:
            waiting_for = f"the publication of version {self._publisher.publishing}"
        elif not self._replicas.serving:
            waiting_for = f"a replica that serves: {self._replicas.describe()}"
        elif awaited:
            waiting_for = (
                f"version {max(awaited)}, which {awaited.total()} answers have tokens of; {self.version} is served"
            )
        return {
            "version": self.version,
            "replicas": [slot.status() for slot in self._replicas.slots],
            "waiting_requests": self._num_waiting,
            "waiting_for": waiting_for,
            "publishing": self._publisher.publishing,
            "needs_publication": self._publisher.needs_publication(),
            "generated_tokens": self._num_tokens,
            "tokens_per_s": self._tokens_per_s(),
        }

    def _tokens_per_s(self) -> float:
        """Over the calls of the last seconds; 0 at the first call."""
        now = time.monotonic()
        samples = self._rate_samples
        samples.append((now, self._num_tokens))
        while len(samples) > 2 and samples[0][0] < now - _RATE_WINDOW_S:
            samples.popleft()
        seconds = now - samples[0][0]
        return (self._num_tokens - samples[0][1]) / seconds if seconds > 0 else 0.0
