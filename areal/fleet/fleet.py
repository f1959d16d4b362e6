"""Generation over many replicas: answers survive interruptions, dead replicas, and a trainer that recovers.

`agenerate` waits for a serving replica (until a health check or a weight update ends), for the version of its newest
token (until a recovered trainer has reached it again) and for tokens (until the server answers or dies, or
request_timeout). `areal.fleet.weight_updater` states what a weight update waits for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal.api.config.rollout import InferenceEngineConfig
from areal.api.data import GenerationRequest, GenerationResponse
from areal.api.errors import ServerUnavailable
from areal.api.gather import gather_or_cancel
from areal.api.routed_experts import ExpertShape
from areal.data.image_files import RunImages
from areal.fleet.continuation import Answer
from areal.fleet.replica import GenerationPart, PartChunk, Replica, ReplicaFactory
from areal.fleet.replica_set import ReplicaSet, Slot, State
from areal.fleet.weight_updater import WeightUpdater
from areal.system.discovery import NameRegistry
from areal.system.process import raise_open_file_limit


@dataclass(slots=True, eq=False)
class _Generation:
    """A request, its answer so far, and what happened to it."""

    request: GenerationRequest
    answer: Answer
    started_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
    num_failures: int = 0
    avoid: str = ""
    """The replica that failed last."""

    def response(self) -> GenerationResponse:
        first_s = self.ended_s if self.first_token_s is None else self.first_token_s
        return self.answer.response(latency_s=self.ended_s - self.started_s, ttft_s=first_s - self.started_s)


class Fleet:
    """Implements `areal.api.engine.InferenceFleet` over the servers of a registry."""

    def __init__(
        self,
        registry: NameRegistry,
        num_servers: int,
        config: InferenceEngineConfig,
        factory: ReplicaFactory,
        *,
        abandoned: range = range(0),
        seed: int = 1,
        dtype: str = "bfloat16",
        experts: ExpertShape | None = None,
        vision: RunImages | None = None,
    ) -> None:
        """`abandoned`: versions from before the trainer recovered, which it will make again with other weights.

        `seed` of the canary probe; `dtype` in which the servers compute, which bounds its tolerance. `experts`: answers
        have the chosen experts of a model of this shape. `vision`: of a model that takes images.
        """
        self._experts = experts
        self._vision = vision
        self._config = config
        self._replicas = ReplicaSet(registry, num_servers, config, factory, abandoned)
        self._updater = WeightUpdater(self._replicas, config, seed=seed, dtype=dtype, vision=vision)
        self.update_weights = self._updater.update
        self.probe_tokens = self._updater.canary.tokens
        self.compare = self._updater.canary.compare
        self._num_waiting = 0
        self._awaited_versions: Counter[int] = Counter()
        """Number of answers that wait until the fleet serves a version again, by version."""
        self._num_tokens = 0

    @property
    def version(self) -> int:
        """The policy version that the fleet serves."""
        return self._replicas.target_version

    async def start(self) -> None:
        """Wait until `num_servers` replicas are healthy. ServerUnavailable, with the reasons, if they do not get so in
        setup_timeout after all are registered."""
        raise_open_file_limit()
        await self._replicas.start()

    async def close(self) -> None:
        """Stop all tasks and drop all connections; running requests fail."""
        await self._replicas.close()

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach: alive, and not serving that version already.

        Empty before the fleet has started: it waits for all replicas.
        """
        if not self._replicas.has_started:
            return []
        lacking = {State.STALE, State.SUSPECT} | (set() if version == self.version else {State.SERVING})
        return [slot.incarnation for slot in self._replicas.slots if slot.state in lacking]

    # Generation

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        """One complete answer, whatever happens to the replicas meanwhile.

        RequestError: the request can never succeed. ServerUnavailable: more replicas failed than request_retries
        allows, or none served for request_timeout. While the fleet serves an older version than that of the newest
        token, the request waits without a limit.
        """
        return (await self.agenerate_group([request]))[0]

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        """The same for requests with one prompt. Short answers are one call of one replica; what it leaves unfinished
        continues as other answers do."""
        each = [self._begun(request) for request in requests]
        if len(each) > 1 and all(one.answer.is_short for one in each):
            slot, replica = await self._pick(each[0].request, None, "")
            await self._run_parts(each, slot, replica)
        await gather_or_cancel([self._finish(one) for one in each if not one.answer.finished])
        return [one.response() for one in each]

    def _begun(self, request: GenerationRequest) -> _Generation:
        interval = self._config.stream_interval
        answer = Answer(request, stream_interval=interval, experts=self._experts, vision=self._vision)
        return _Generation(request, answer, time.perf_counter())

    async def _finish(self, one: _Generation) -> None:
        while not one.answer.finished:
            slot, replica = await self._pick(one.request, one.answer.newest_version, one.avoid)
            await self._run_parts([one], slot, replica)

    async def _run_parts(self, each: Sequence[_Generation], slot: Slot, replica: Replica) -> None:
        """Let one replica add to answers. Raises ServerUnavailable when one has failed too often."""
        for one in each:
            if one.answer.num_parts == 0:  # the limits are known once a replica has answered
                one.answer.check(self._replicas.limits)
        parts = [one.answer.next_part(slot.name) for one in each]
        version = self.version
        problem = await self._generated(each, parts, slot, replica)
        is_expected = self._updater.updating_to is not None or version != self.version
        for one, part in zip(each, parts, strict=True):
            one.answer.interrupted()
            if one.answer.finished:
                one.ended_s = time.perf_counter()
            elif problem is None and not is_expected and one.answer.num_tokens == part.num_prior_output_tokens:
                # counted as a failure: without a limit the request would be sent again forever
                self._failed(one, slot, f"{slot.name} aborted the request without a token")
            elif problem:
                self._failed(one, slot, problem)

    async def _generated(
        self, each: Sequence[_Generation], parts: Sequence[GenerationPart], slot: Slot, replica: Replica
    ) -> str | None:
        """Generate parts. Returns None after a call without an error, else why the replica failed, or '' when the error
        is not a failure of the replica."""
        serving = self._replicas.router.serving
        on_chunks = [partial(self._add, one) for one in each]
        serving.change(slot, +len(parts))
        try:
            async with self._replicas.lateness.timeout(self._config.request_timeout):
                if len(parts) == 1:
                    await replica.generate(parts[0], on_chunks[0])
                else:
                    await replica.generate_group(parts, on_chunks)
        except ServerUnavailable as error:
            if any(self._is_behind(one.answer.newest_version) for one in each) or slot not in self._replicas.slots:
                return ""  # the fleet went back to an older version, or the replica was removed: not a failure
            self._replicas.request_failed(slot, replica, str(error))
            return str(error)
        except TimeoutError:
            slot.num_failures += 1
            limit = f"{self._config.request_timeout:g} s (rollout.request_timeout)"
            return f"{slot.name} gave no complete answer in {limit}"
        finally:
            serving.change(slot, -len(parts))
        return None

    def _add(self, one: _Generation, chunk: PartChunk) -> None:
        one.answer.add(chunk)
        if one.first_token_s is None and chunk.token_ids:
            one.first_token_s = time.perf_counter()
        self._num_tokens += len(chunk.token_ids)

    def _failed(self, one: _Generation, slot: Slot, problem: str) -> None:
        one.avoid = slot.name
        one.num_failures += 1
        if one.num_failures > self._config.request_retries:
            raise ServerUnavailable(
                f"request {one.request.request_id} failed {one.num_failures} times "
                f"(rollout.request_retries={self._config.request_retries}), last: {problem}",
                code="fleet.too_many_retries",
            )

    async def _pick(self, request: GenerationRequest, newest_version: int | None, avoid: str) -> tuple[Slot, Replica]:
        """A serving replica; waits for one, and without a time limit for the version of the answer's newest token.

        ServerUnavailable after request_timeout without a serving replica.
        """
        limit_s, lateness = self._config.request_timeout, self._replicas.lateness
        deadline_s: float | None = None
        while True:
            awaited = [newest_version] if newest_version is not None and self._is_behind(newest_version) else []
            is_switching = self._replicas.is_switching
            if not awaited and not is_switching and len(self._replicas.router.serving):
                break
            if self._replicas.is_closed:
                raise ServerUnavailable("the fleet is closed", code="fleet.closed")
            if deadline_s is None or awaited or is_switching:  # an update has its own time limits
                deadline_s = lateness.now_s + limit_s
            elif lateness.now_s >= deadline_s:
                raise ServerUnavailable(
                    f"request {request.request_id} found no serving replica for {limit_s:g} s "
                    f"(rollout.request_timeout): {self._replicas.describe()}",
                    code="fleet.no_live_replica",
                )
            self._num_waiting += 1
            self._awaited_versions.update(awaited)
            try:
                if awaited:  # a new target decides, whether or not a request can be sent before
                    await self._replicas.wait_for_change(deadline_s - lateness.now_s)
                else:
                    await self._replicas.wait_to_send(deadline_s - lateness.now_s)
            finally:
                self._num_waiting -= 1
                self._awaited_versions.subtract(awaited)
        slot = self._replicas.router.pick(request, avoid)
        assert slot.replica is not None  # a serving slot has a connection
        return slot, slot.replica

    def _is_behind(self, newest_version: int | None) -> bool:
        """Whether the fleet serves an older policy than the one that generated the newest token of an answer."""
        return newest_version is not None and self.version < newest_version

    # Status

    def status(self) -> dict[str, Any]:
        """JSON-ready: the served version, each replica, waiting requests and their cause, generated tokens."""
        waiting_for = ""
        awaited = +self._awaited_versions
        if self._replicas.is_switching:
            waiting_for = f"the update to version {self._updater.updating_to}"
        elif not self._replicas.serving:
            waiting_for = f"a serving replica: {self._replicas.describe()}"
        elif awaited:
            waiting_for = f"version {max(awaited)}, for {awaited.total()} unfinished answers; {self.version} is served"
        return {
            "version": self.version,
            "replicas": [slot.status() for slot in self._replicas.slots],
            "waiting_requests": self._num_waiting,
            "waiting_for": waiting_for,
            "updating_to": self._updater.updating_to,
            "needs_weights": self._updater.needs_weights(),
            "generated_tokens": self._num_tokens,
            "uncompared": self._updater.canary.num_uncompared,
        }
