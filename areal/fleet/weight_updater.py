"""Weight updates of a fleet: of all replicas together, or of those that lack the served version alone.

`WeightUpdater.update` waits for pauses and updates, each under a time limit. For a replica that dies or hangs it waits
until the health check fails (`CHECK_TIMEOUT_INTERVALS`), and for the others of its group `GROUP_GRACE_S` more.
"""

import asyncio
import contextlib
import hashlib
import math
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from areal.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from areal.api.data import CanaryReport, GenerationRequest, ProbeScore, ProbeTokens, WeightUpdate
from areal.api.errors import ArealError, RequestError, ServerUnavailable, WeightSyncError
from areal.api.images import ImageRef
from areal.data.image_files import RunImages
from areal.fleet.replica import NO_VERSION, PartChunk, PauseMode, Replica
from areal.fleet.replica_set import CHECK_TIMEOUT_INTERVALS, Event, ReplicaSet, Slot, State, Weights, reported
from areal.observe.log import get_logger
from areal.system.durable import is_complete
from areal.system.folders import NEEDS_WHOLE, PULLED_WEIGHTS

# ----------------------------------------------------------------------------------------------------------------------
# The rules of the weight canary: the probe, how its answers are compared, and the tolerance. Nothing here does I/O.

PROBE_TOKENS = 2  # the first of a pass over the prompt, the second of a decode step
PROBE_PREFIX = "canary-"
"""The request ids of probes begin with it."""
_PROMPT_TOKENS = 8
_BOUNDS = {"float32": (1e-4, 1e-3)}
_BOUNDS_16_BIT = (1e-2, 1e-1)
"""Smallest and largest tolerance, in nats."""
_TRAINER_BOUNDS = {"float32": (1e-3, 1e-2), "float8": (5e-1, 2.0), "int4": (10.0, 10.0)}
_TRAINER_BOUNDS_16_BIT = (5e-2, 5e-1)
"""The same between a server and the trainer, which compute with different kernels. FP8 alone differs by 0.14 nats in
the quickstart, and int4 on the servers by up to 6.2 for the random tokens of a probe, which older weights need not
exceed: with int4 this comparison finds damaged weights only."""
_SPREAD_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The greedy tokens of one replica and their log-probabilities, in nats, of equal length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the SHA-256 of tokens and log-probabilities. Equal only for equal answers."""
        size = len(self.token_ids)
        data = struct.pack(f"<{size}q{size}d", *self.token_ids, *self.logprobs)
        return hashlib.sha256(data).hexdigest()[:16]


def probe(
    seed: int, vocab_size: int, request_id: str, vision: RunImages | None = None, image: ImageRef | None = None
) -> GenerationRequest:
    """The request that every replica of a run answers after a weight update: the same for equal arguments.

    `image`: in the middle of its prompt, so that the answer depends on the vision tower.
    """
    draw = random.Random(f"canary {seed} {vocab_size}")
    banned = () if vision is None else vision.layout.banned_ids
    allowed = (token for token in iter(lambda: draw.randrange(vocab_size), None) if token not in banned)
    input_ids = list(islice(allowed, _PROMPT_TOKENS))
    if vision is not None and image is not None:
        layout, middle = vision.layout, _PROMPT_TOKENS // 2
        places = [layout.image_token_id] * layout.tokens_of(image)
        around = (layout.vision_start_id, *places, layout.vision_end_id)
        input_ids[middle:middle] = [token for token in around if token is not None]
    return GenerationRequest(
        request_id=request_id,
        input_ids=input_ids,
        gconfig=GenerationHyperparameters(greedy=True, ignore_eos=True, max_new_tokens=PROBE_TOKENS),
        images=() if image is None else (image,),
    )


def difference(answer: ProbeAnswer, other: ProbeAnswer) -> float:
    """Largest difference of log-probabilities, in nats, up to the first position with different tokens.

    Two equally likely tokens may be chosen in either order, therefore different tokens alone are no difference.
    Infinite when a number is not finite or one answer is shorter.
    """
    if len(answer.token_ids) != len(other.token_ids):
        return math.inf
    largest = 0.0
    for token, other_token, left, right in zip(
        answer.token_ids, other.token_ids, answer.logprobs, other.logprobs, strict=True
    ):
        gap = abs(left - right)
        if not math.isfinite(gap):
            return math.inf
        largest = max(largest, gap)
        if token != other_token:
            break
    return largest


class Tolerance:
    """The difference between equal weights: learned once, between the bounds of the dtype."""

    def __init__(self, dtype: str, *, to_trainer: bool = False) -> None:
        """`to_trainer`: between a server and the trainer; else between two servers."""
        if to_trainer:
            self._low, self.nats = _TRAINER_BOUNDS.get(dtype, _TRAINER_BOUNDS_16_BIT)
        else:
            self._low, self.nats = _BOUNDS.get(dtype, _BOUNDS_16_BIT)
        self._is_learned = False

    def learn(self, spread: float) -> None:
        """`spread`: the largest difference in the first exchange without other weights."""
        if not self._is_learned:
            self._is_learned = True
            self.nats = min(self.nats, max(self._low, _SPREAD_FACTOR * spread))


def agreed(answers: Mapping[str, ProbeAnswer], tolerance: float) -> ProbeAnswer | None:
    """The answer with which more than half of `answers` agree; None without such a majority."""
    best: ProbeAnswer | None = None
    most = 0
    for answer in answers.values():
        size = sum(difference(answer, other) <= tolerance for other in answers.values())
        if size > most:
            best, most = answer, size
    return best if 2 * most > len(answers) else None


# ----------------------------------------------------------------------------------------------------------------------
# Sends the canary probe to replicas after a weight update and decides which of them may serve.
#
# A replica waits in Weights.UNCHECKED for the comparison with the others. Then it serves, and the trainer scores the
# tokens of the answer (`compare`). The first different answer makes a replica DIFFERS: it is updated again. The second
# makes it REJECTED: the launcher restarts its process; without a launcher it waits for the next version.

log = get_logger(__name__)

PROBE_TIMEOUT_S = 10.0
"""A replica that is busy for longer is not compared."""


@dataclass(slots=True)
class _Agreed:
    """The answer of a majority of replicas to the probe of a version."""

    version: int
    answer: ProbeAnswer
    is_confirmed: bool
    """Two replicas or more gave it, or the trainer agrees."""


class CanaryCheck:
    """Compares the replicas of a fleet, one exchange at a time."""

    def __init__(
        self,
        replicas: ReplicaSet,
        *,
        seed: int,
        dtype: str,
        vision: RunImages | None,
        install_again: Callable[[list[Slot]], Awaitable[None]],
    ) -> None:
        """`install_again` stops the requests of replicas and, where that is possible, installs their weights again."""
        self._replicas = replicas
        self._seed = seed
        self._vision = vision
        self._image: ImageRef | None = None
        """The image of all probes, from the first exchange on."""
        self._has_image = vision is None
        """Whether `_image` is final."""
        self._dtype = dtype
        self._tolerance = Tolerance(dtype)
        self._trainer_tolerance: Tolerance | None = None
        self._install_again = install_again
        self._lock = asyncio.Lock()
        self._agreed: _Agreed | None = None
        self._report: tuple[int, CanaryReport] | None = None
        """Version and result of its first exchange."""
        self._num_probes = 0
        self.num_uncompared = 0
        """Times that a replica serves a version without an answer to its probe."""

    @property
    def is_running(self) -> bool:
        return self._lock.locked()

    def forget(self) -> None:
        """A new update starts: the same version number may mean other weights."""
        self._agreed = self._report = None

    def report(self, version: int) -> CanaryReport | None:
        """The result of the first exchange of `version`; None without one."""
        return self._report[1] if self._report is not None and self._report[0] == version else None

    def tokens(self, version: int) -> ProbeTokens | None:
        """The probe and its answer for `version`; None without an answer."""
        if self._agreed is None or self._agreed.version != version:
            return None
        sent, answer = self._probe("", version), self._agreed.answer
        return ProbeTokens(prompt_ids=list(sent.input_ids), answer_ids=list(answer.token_ids), images=list(sent.images))

    def _probe(self, request_id: str, version: int) -> GenerationRequest:
        """Another one for each version, so that no server answers from what it computed with earlier weights."""
        return probe(self._seed + version, self._replicas.limits.vocab_size, request_id, self._vision, self._image)

    async def _make_image(self) -> None:
        """Store the image of the probes, once: answers to other prompts could not be compared."""
        if self._has_image or self._vision is None:
            return
        self._has_image = True
        try:
            self._image = await asyncio.to_thread(self._vision.gradient)
        except (ArealError, OSError) as error:
            log.warning("the canary probe has no image, therefore vision towers are not compared: %s", error)

    async def compare(self, score: ProbeScore) -> CanaryReport | None:
        """See `areal.api.engine.InferenceFleet.compare`."""
        async with self._lock:
            agreed_on, version = self._agreed, score.version
            by_trainer = ProbeAnswer(tuple(score.answer_ids), tuple(score.logprobs))
            if agreed_on is None or (agreed_on.version, agreed_on.answer.token_ids) != (version, by_trainer.token_ids):
                return None
            gap = difference(agreed_on.answer, by_trainer)
            if self._trainer_tolerance is None:
                in_full = score.dtype if self._dtype == "float32" else "bfloat16"
                kinds = (kind for kind in ("int4", "float8") if kind in (self._dtype, score.dtype))
                self._trainer_tolerance = Tolerance(next(kinds, in_full), to_trainer=True)
            tolerance = self._trainer_tolerance.nats
            slots = [
                s for s in self._replicas.slots if s.version == version and s.weights in (Weights.VALID, Weights.PINNED)
            ]
            is_wrong = gap > tolerance
            for slot in slots:
                slot.num_trainer_differences = slot.num_trainer_differences + 1 if is_wrong else 0
                if is_wrong:
                    self._reject(slot, is_first=slot.num_trainer_differences == 1)
            if is_wrong:
                text = (
                    "the trainer's log-probabilities of version %d differ from those of %s: %.3g nats, tolerance %.3g"
                )
                log.warning(text, version, ", ".join(slot.name for slot in slots), gap, tolerance)
                self._agreed = None  # its tokens are those of other weights
            else:
                self._trainer_tolerance.learn(gap)
                agreed_on.is_confirmed = True
        names = [slot.name for slot in slots] if is_wrong else []
        if is_wrong:
            await self._install_again(slots)
            await self.run()
        return CanaryReport(digest=agreed_on.answer.digest, difference=gap, tolerance=tolerance, differing=names)

    async def run(self) -> None:
        """Compare the unchecked replicas of the target version until each serves or is out."""
        async with self._lock:
            await self._make_image()
            while slots := self._unchecked():
                differing = await self._exchange(slots)
                if not differing:
                    break
                await self._install_again(differing)

    def _unchecked(self) -> list[Slot]:
        version = self._replicas.target_version
        return [
            slot
            for slot in self._replicas.slots
            if slot.weights is Weights.UNCHECKED and slot.version == version and slot.state is State.STALE
        ]

    async def _exchange(self, slots: list[Slot]) -> list[Slot]:
        """Probe `slots` and decide which may serve. Returns those that differ, which may include replicas that serve.

        A replica that does not answer serves; a replica alone does until the trainer's comparison.
        """
        version = self._replicas.target_version
        last = self._agreed if self._agreed is not None and self._agreed.version == version else None
        known = last.answer if last is not None and last.is_confirmed else None
        asked = slots if known is not None else slots + self._replicas.serving
        results = await asyncio.gather(*(self._ask(slot) for slot in asked))
        answers = {slot.name: answer for slot, answer in zip(asked, results, strict=True) if answer is not None}
        silent = sorted(slot.name for slot, answer in zip(asked, results, strict=True) if answer is None)
        self.num_uncompared += len(silent)
        if known is None and len(answers) == 1:
            [alone] = answers.values()
            self._agreed, answers = _Agreed(version, alone, is_confirmed=False), {}
        right = known if known is not None else agreed(answers, self._tolerance.nats)
        tolerance = self._tolerance.nats
        wrong = {name for name, answer in answers.items() if right is None or difference(answer, right) > tolerance}
        if answers:
            self._note(version, answers, right, wrong, silent)
        differing: list[Slot] = []
        for slot in asked:
            if slot.version == version and slot.weights in (Weights.UNCHECKED, Weights.VALID):
                self._decide(slot, is_wrong=slot.name in wrong, is_compared=slot.name in answers)
                differing += [slot] if slot.name in wrong else []
        return differing

    def _decide(self, slot: Slot, *, is_wrong: bool, is_compared: bool) -> None:
        if is_wrong:
            slot.num_differences += 1
            self._reject(slot, is_first=slot.num_differences == 1)
            return
        slot.weights = Weights.VALID
        slot.num_differences = 0 if is_compared else slot.num_differences
        if slot.state in (State.STALE, State.SERVING):
            self._replicas.apply(slot, Event.CHECK_PASSED)

    def _reject(self, slot: Slot, *, is_first: bool) -> None:
        slot.weights = Weights.DIFFERS if is_first else Weights.REJECTED
        if not is_first:
            slot.failed_version = slot.version
        if slot.state in (State.STALE, State.SERVING):
            self._replicas.apply(slot, Event.CHECK_PASSED)

    def _note(
        self,
        version: int,
        answers: Mapping[str, ProbeAnswer],
        right: ProbeAnswer | None,
        wrong: set[str],
        silent: list[str],
    ) -> None:
        """Learn from an exchange without differences, keep the first report of a version, and log."""
        pairs = list(combinations(answers.values(), 2)) or [(answer, right) for answer in answers.values() if right]
        largest = max((difference(answer, other) for answer, other in pairs), default=0.0)
        if right is not None:
            self._agreed = _Agreed(version, right, is_confirmed=True)
        if self.report(version) is None:
            digest = right.digest if right is not None else ""
            nats = self._tolerance.nats
            self._report = (
                version,
                CanaryReport(
                    digest=digest, difference=largest, tolerance=nats, differing=sorted(wrong), uncompared=silent
                ),
            )
        if wrong:
            text = "the answers of %s to the canary probe of version %d differ: %.3g nats, tolerance %.3g"
            log.warning(text, ", ".join(sorted(wrong)), version, largest, self._tolerance.nats)
        elif len(answers) > 1:
            self._tolerance.learn(largest)

    async def _ask(self, slot: Slot) -> ProbeAnswer | None:
        replica = slot.replica
        if replica is None:
            return None
        chunks: list[PartChunk] = []
        self._num_probes += 1
        request = self._probe(f"{PROBE_PREFIX}{slot.name}-{self._num_probes}", slot.version)
        problem = ""
        try:
            async with self._replicas.lateness.timeout(PROBE_TIMEOUT_S):
                async for _, chunk in replica.generate([request]):
                    if isinstance(chunk, ArealError):
                        raise chunk
                    chunks.append(chunk)
        except (ArealError, TimeoutError) as error:
            problem = str(error) or f"no answer in {PROBE_TIMEOUT_S:g} s"
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        if problem or len(token_ids) != PROBE_TOKENS:
            log.warning("%s is not compared: %s", slot.name, problem or f"{len(token_ids)} tokens")
            return None
        logprobs: list[float | None] = [number for chunk in chunks for number in chunk.logprobs]
        # A number that is not finite arrives as null.
        return ProbeAnswer(tuple(token_ids), tuple(math.nan if number is None else number for number in logprobs))


PAUSE_TIMEOUT_S = 30.0
"""A replica that does not pause or resume within this time is disconnected."""
PAUSE_MODES: dict[str, PauseMode] = {"interrupt": "abort", "keep": "retract", "keep_cache": "in_place"}
"""rollout.weight_update -> mode of a pause."""
MAX_MIRRORS = 3
"""Servers that one server asks for weights before it asks the trainer."""
GROUP_GRACE_S = 1.0
"""Time that the other replicas of an update group get after one failed: the collective seldom completes then."""


class WeightUpdater:
    """Gives replicas new weights, one update at a time."""

    def __init__(
        self,
        replicas: ReplicaSet,
        config: InferenceEngineConfig,
        *,
        seed: int,
        dtype: str,
        vision: RunImages | None = None,
    ) -> None:
        self._replicas = replicas
        self._config = config
        self._lock = asyncio.Lock()
        self._target: WeightUpdate | None = None
        """The update that made the target version; None before the first."""
        self.updating_to: int | None = None
        """The version that is being installed."""
        self._mode: PauseMode = PAUSE_MODES[config.weight_update]
        self.canary = CanaryCheck(replicas, seed=seed, dtype=dtype, vision=vision, install_again=self._install_again)
        replicas.update_stale = self._update_stale

    @property
    def served(self) -> WeightUpdate | None:
        """The update that made the target version; None before the first."""
        return self._target

    async def update(self, update: WeightUpdate) -> CanaryReport | None:
        """Update every healthy replica to `update.version`. WeightSyncError when none reached it.

        A replica that fails is disconnected and does not delay the others. After an error the fleet serves the version
        before, as far as replicas still have it. When the version is served already, only replicas that lack it take
        part, the others continue to generate, and a failure is not an error.
        """
        async with self._lock:
            # Every adapter folder is new, also of the version that the servers have from their start.
            is_other = update.kind == "adapter" and (self._target is None or self._target.path != update.path)
            if update.version == self._replicas.target_version and self._replicas.serving and not is_other:
                await self._supplement(update)
            elif update.kind == "collective" and not update.replicas:
                text = f"version {update.version} is not served: {self._replicas.describe()}"
                raise WeightSyncError(text, code="fleet.no_live_replica")
            else:
                await self._switch(update)
        log.info("version %d is served by %d replicas", update.version, len(self._replicas.serving))
        return self.canary.report(update.version)

    def needs_weights(self) -> bool:
        """Whether a live replica waits for weights that only the trainer can send.

        A replica that failed to install the current version waits for the next one, unless none serves.
        """
        replicas = self._replicas
        by_folder = self._target is not None and self._target.is_folder
        if self.updating_to is not None or not replicas.has_started or by_folder:
            return False
        may_wait = bool(replicas.serving)
        return any(
            slot.state is State.STALE
            and slot.weights is not Weights.PINNED
            and not (may_wait and slot.failed_version == replicas.target_version)
            for slot in replicas.slots
        )

    def _set_target(self, version: int, update: WeightUpdate | None) -> None:
        """Let replicas serve `version` from now on; `update` is how a replica with other weights gets it."""
        self._target = update
        self._replicas.set_target(version)

    async def _switch(self, update: WeightUpdate) -> None:
        """Update the whole fleet from its version to the update's. WeightSyncError when no replica reached it."""
        self.updating_to = update.version
        self._replicas.announce()
        before = self._replicas.target_version, self._target
        try:
            members = await self._members(update)
            slots, errors = await self._prepare(members, update)
            _check_failures(update, members, errors, may_load=update.kind in ("disk", "adapter"))
            self._replicas.is_switching = True
            self._replicas.announce()
            async with self._paused(slots, update.version):
                errors += await self._update(slots, update)
                _check_failures(update, members, errors, may_load=update.is_folder)
                self.canary.forget()
                self._set_target(update.version, update)  # before any of them generates a token
            try:
                await self.canary.run()
                differs = update.kind == "collective" and any(slot.weights is Weights.DIFFERS for slot in slots)
                if differs and not self._replicas.serving:  # only the trainer can send the weights a second time
                    text = f"no replica serves version {update.version}: {self._replicas.describe()}"
                    raise WeightSyncError(text, code="fleet.update_failed")
                # When all replicas died during the update, those that are restarted can still load a folder.
                lateness = self._replicas.lateness
                deadline_s = lateness.now_s + self._config.weight_update_timeout_s
                while not self._replicas.serving:
                    if lateness.now_s >= deadline_s:
                        text = f"no replica installed version {update.version}: {self._replicas.describe()}"
                        raise WeightSyncError(text, code="fleet.update_failed")
                    await self._replicas.wait_for_change(deadline_s - lateness.now_s)
            except WeightSyncError:
                self._set_target(*before)  # no token of the version exists, and none may after this error
                raise
        finally:
            self.updating_to, self._replicas.is_switching = None, False
            self._replicas.announce()

    async def _supplement(self, update: WeightUpdate) -> None:
        """Give the served version to the replicas that lack it. Failures are logged."""
        if update.is_folder:
            self._set_target(update.version, update)  # the watch of each stale replica loads the folder
            return
        serving = {slot.incarnation for slot in self._replicas.serving}
        if serving.issuperset(update.replicas):
            return
        self.updating_to = update.version
        try:
            members = await self._members(update)
            slots, _ = await self._prepare(members, update)
            async with self._paused(slots, update.version):
                await self._update(slots, update)
            await self.canary.run()
            for slot in members:
                if slot.state is not State.SERVING and slot.weights is not Weights.DIFFERS:
                    slot.failed_version = update.version
        except WeightSyncError as error:
            log.warning("the replicas that lack a version continue without it: %s", error)
        finally:
            self.updating_to = None
            self._replicas.announce()

    async def _members(self, update: WeightUpdate) -> list[Slot]:
        """The replicas that take part, in order of rank for a collective."""
        lateness = self._replicas.lateness
        deadline_s = lateness.now_s + CHECK_TIMEOUT_INTERVALS * self._config.health_check_interval_s
        while any(slot.state is State.SUSPECT for slot in self._replicas.slots) and lateness.now_s < deadline_s:
            await self._replicas.wait_for_change(deadline_s - lateness.now_s)
        slots = [slot for slot in self._replicas.slots if slot.weights is not Weights.PINNED]
        ready = [slot for slot in slots if slot.state in (State.SERVING, State.STALE)]
        if update.is_folder:
            return ready
        by_id = {slot.incarnation: slot for slot in ready}
        if missing := [name for name in update.replicas if name not in by_id]:
            text = f"version {update.version}: {', '.join(missing)} cannot take part: {self._replicas.describe()}"
            raise WeightSyncError(text, code="fleet.replica_lost")
        return [by_id[name] for name in update.replicas]

    @contextlib.asynccontextmanager
    async def _paused(
        self, slots: list[Slot], version: int = NO_VERSION, *, always_abort: bool = False
    ) -> AsyncIterator[None]:
        """These replicas generate no token inside the block, except those that can exchange weights between steps.
        `version`: that of the update."""
        must_pause = always_abort or self._config.pause_grace_period > 0
        paused = [(s, s.replica) for s in slots if s.replica and (must_pause or not s.replica.has_second_copy)]
        calls = [replica.pause("abort" if always_abort else self._mode_for(slot, version)) for slot, replica in paused]
        try:
            waits = (self._control(slot, call, "pause") for (slot, _), call in zip(paused, calls, strict=True))
            await asyncio.gather(*waits)
            if self._config.pause_grace_period:
                await asyncio.sleep(self._config.pause_grace_period)
            yield
        finally:  # a connection made meanwhile is resumed by its first health check
            current = [(slot, replica) for slot, replica in paused if slot.replica is replica]
            await asyncio.gather(*(self._control(slot, replica.resume(), "resume") for slot, replica in current))

    def _mode_for(self, slot: Slot, version: int) -> PauseMode:
        """How a replica is paused for an update: one whose cache is of wrong weights, of versions that training has
        left, or would be too old, computes it again."""
        is_left = slot.weights not in (Weights.VALID, Weights.UNCHECKED) or version <= slot.version
        is_too_old = version - slot.cached_since > self._config.max_cache_age
        return "retract" if self._mode == "in_place" and (is_left or is_too_old) else self._mode

    async def _control(self, slot: Slot, call: Coroutine[Any, Any, None], what: str) -> None:
        try:
            async with self._replicas.lateness.timeout(PAUSE_TIMEOUT_S):
                await call
        except (ArealError, TimeoutError) as error:
            reason = f"did not {what}: {error or f'no answer in {PAUSE_TIMEOUT_S:g} s'}"
            await self._replicas.disconnect(slot, Event.REMOVED, reason)

    async def _update(self, slots: list[Slot], update: WeightUpdate) -> list[ArealError]:
        """All at the same time, as a collective requires. One error for each replica that failed."""
        if update.kind == "collective" and any(slot.replica is None for slot in slots):
            text = f"version {update.version} lost a replica: {self._replicas.describe()}"
            raise WeightSyncError(text, code="fleet.replica_lost")
        call = partial(self._update_one, update=update)
        errors = await self._together(slots, call, update, in_group=not (update.is_folder or update.published))
        return [error for error in errors if error is not None]

    async def _together(
        self, slots: list[Slot], call: Callable[..., Coroutine[Any, Any, None]], update: WeightUpdate, *, in_group: bool
    ) -> list[ArealError | None]:
        """Run `call(slot, rank=...)`, with its first rank in the update group, for each replica at the same time. The
        error of each, in order. `in_group`: the replicas wait for each other."""
        ranks = {name: 1 + index * update.ranks_per_replica for index, name in enumerate(update.replicas)}
        calls = [call(slot, rank=ranks.get(slot.incarnation, 0)) for slot in slots]
        tasks = [asyncio.create_task(call, name=f"update {slot.name}") for slot, call in zip(slots, calls, strict=True)]
        if not tasks:
            return []
        try:
            if in_group:
                await self._leave_broken_group(slots, tasks)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[ArealError | None] = []
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, ArealError):
                log.warning("%s did not install version %d: %s", slot.name, update.version, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            errors.append(outcome)
        return errors

    async def _leave_broken_group(self, slots: list[Slot], tasks: list[asyncio.Task[None]]) -> None:
        """Wait until all tasks are done. When one fails, the others end their wait for it; one that does not is
        disconnected and connected again at once. One with wrong differences, or that cannot keep what it
        received, has received all broadcasts: no other one waits for it."""
        done, pending = set[asyncio.Task[None]](), set(tasks)
        while pending and all(_has_received(task) for task in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        await self._within_grace(asyncio.wait(tasks))
        waiting = [slot.replica for slot, task in zip(slots, tasks, strict=True) if not task.done() and slot.replica]
        if waiting:
            await asyncio.gather(*(self._within_grace(replica.abandon_update()) for replica in waiting))
            await self._within_grace(asyncio.wait(tasks))
        for slot, task in zip(slots, tasks, strict=True):
            if not task.done():
                await self._replicas.disconnect(slot, Event.REMOVED, "another replica of its update group failed")
                slot.wake.set()

    async def _within_grace(self, call: Coroutine[Any, Any, object]) -> None:
        """Await `call` for at most GROUP_GRACE_S, whether or not it succeeds."""
        with contextlib.suppress(ArealError, TimeoutError):
            async with self._replicas.lateness.timeout(GROUP_GRACE_S):
                await call

    async def _prepare(self, members: list[Slot], update: WeightUpdate) -> tuple[list[Slot], list[ArealError]]:
        """The part of an update during which replicas generate. Returns those that are ready, and the errors of the
        others, which keep their weights. Nothing happens here when one receives into the weights that it serves: it
        does so in the pause, and all members of a group receive at the same time."""
        is_direct = not (update.is_folder or update.published)
        if is_direct and any(s.replica and not s.replica.has_second_copy for s in members):
            return members, []

        async def prepare(slot: Slot, rank: int) -> None:
            if slot.replica is None:
                raise ServerUnavailable(f"{slot.name} is {slot.state}: {slot.reason}", code="fleet.replica_lost")
            try:
                async with self._replicas.lateness.timeout(self._config.weight_update_timeout_s):
                    await slot.replica.prepare_weights(update, rank=rank)
            except TimeoutError as error:
                text = f"{slot.name}: no weights after {self._config.weight_update_timeout_s:g} s"
                raise ServerUnavailable(text, code="fleet.update_failed") from error

        errors = await self._together(members, prepare, update, in_group=not update.is_folder)
        ready = [slot for slot, error in zip(members, errors, strict=True) if error is None]
        return ready, [error for error in errors if error is not None]

    async def _update_one(self, slot: Slot, update: WeightUpdate, *, rank: int) -> None:
        """Give one replica the weights of an update. On failure it is stale or absent, and the error is raised."""
        replica = slot.replica
        if replica is None:
            raise ServerUnavailable(f"{slot.name} is {slot.state}: {slot.reason}", code="fleet.replica_lost")
        mode = self._mode_for(slot, update.version)
        since = slot.cached_since if mode == "in_place" else update.version
        self._replicas.apply(slot, Event.UPDATE_STARTED, f"installs version {update.version}")
        try:
            async with self._replicas.lateness.timeout(self._config.weight_update_timeout_s):
                await replica.update_weights(update, rank=rank, mode=mode)
        except RequestError as error:
            if update.fills_served_weights and not replica.has_second_copy:
                await self._failed_midway(slot, replica, str(error))
            elif slot.replica is replica:  # a folder is checked before the first copy
                self._replicas.apply(slot, Event.UPDATE_REFUSED, str(error))
            raise
        except (ServerUnavailable, TimeoutError) as error:
            reason = str(error) or f"no weights after {self._config.weight_update_timeout_s:g} s"
            await self._failed_midway(slot, replica, reason)
            raise ServerUnavailable(f"{slot.name}: {reason}", code="fleet.update_failed") from error
        if slot.replica is not replica:
            text = f"{slot.name} was replaced during the update to version {update.version}"
            raise ServerUnavailable(text, code="fleet.replica_lost")
        slot.version, slot.cleared_at = update.version, since
        slot.weights = Weights.UNCHECKED if self._config.canary == "on" else Weights.VALID
        self._replicas.apply(slot, Event.UPDATE_DONE)

    def _with_mirrors(self, update: WeightUpdate, joiner: Slot) -> WeightUpdate:
        """An http update with the servers that have the version already, in random order: the trainer may be busy or
        away when a server joins late."""
        if update.kind != "http":
            return update
        others = [slot for slot in self._replicas.serving if slot is not joiner and slot.version == update.version]
        name = update.path.rpartition("/")[2]
        mirrors = [f"{slot.address}{PULLED_WEIGHTS}/{name}" for slot in random.sample(others, len(others))]
        return replace(update, mirrors=mirrors[:MAX_MIRRORS])

    async def _install_again(self, slots: list[Slot]) -> None:
        """Requests leave replicas that differ from the others. Those that differ for the first time get the folder of
        the target version again; an update without a folder must come from the trainer."""
        update = self._target
        again = [slot for slot in slots if slot.weights is Weights.DIFFERS]
        async with self._paused(slots, always_abort=True):
            if update is not None and update.is_folder:
                calls = (self._update_one(slot, self._with_mirrors(update, slot), rank=0) for slot in again)
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(outcome, ArealError):
                        log.warning("a second update to version %d failed: %s", update.version, outcome)
                    elif isinstance(outcome, BaseException):
                        raise outcome

    async def _failed_midway(self, slot: Slot, replica: Replica, reason: str) -> None:
        """Its requests must not continue with a mixture of weights, so they are dropped with the connections."""
        slot.weights = reported(slot.weights, False)
        if slot.replica is replica:
            await self._replicas.disconnect(slot, Event.UPDATE_FAILED, f"weight update failed: {reason}")

    async def _update_stale(self, slot: Slot) -> None:
        """Give a stale replica the target weights without the trainer: only a folder can be read a second time."""
        if slot.weights is Weights.PINNED:
            return
        update, before = self._target, slot.reason
        if slot.version == self._replicas.target_version:
            if slot.weights is Weights.UNCHECKED:
                await self.canary.run()
                return
            if slot.weights is Weights.REJECTED or (slot.weights is Weights.DIFFERS and self.canary.is_running):
                return
        is_replaced = self.updating_to not in (None, self._replicas.target_version)  # it gets the next version already
        if update is None or not update.is_folder or is_replaced:
            return
        try:
            await self._update_one(slot, self._with_mirrors(update, slot), rank=0)
        except ArealError as error:
            if slot.reason != before:  # otherwise the same error was logged before
                log.warning("%s could not be updated to version %d: %s", slot.name, update.version, error)
            if self._target is not update:
                slot.wake.set()  # a newer version replaced the one that failed, and perhaps its folder
            elif await _is_missing(update, error):
                self._target = None  # the trainer must publish the version again
        else:
            slot.wake.set()  # the target may have changed during the update
            await self.canary.run()


def _check_failures(update: WeightUpdate, members: list[Slot], errors: list[ArealError], *, may_load: bool) -> None:
    """WeightSyncError when all members failed; its code tells whether one needs a whole folder. `may_load`: the servers
    that replace those that died can load the folder, so only refusals count."""
    may_load = may_load and not any(isinstance(error, RequestError) for error in errors)
    if errors and len(errors) == len(members) and not may_load:
        reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
        text = f"no replica installed version {update.version}: {reasons}"
        needed = (error.code for error in errors if error.code in NEEDS_WHOLE)
        raise WeightSyncError(text, code=next(needed, "fleet.update_failed"))


def _has_received(task: asyncio.Task[None]) -> bool:
    error = task.exception()
    return error is None or (
        isinstance(error, ArealError) and error.code in ("weights.bad_delta", "weights.not_written")
    )


async def _is_missing(update: WeightUpdate, error: ArealError) -> bool:
    """Whether the folder of an update that failed does not exist any more."""
    if update.kind == "http":
        return error.code in NEEDS_WHOLE
    return isinstance(error, RequestError) and not await asyncio.to_thread(is_complete, Path(update.path))
