"""Sends the canary probe to replicas after a weight update and decides which of them may serve.

A replica waits in Weights.UNCHECKED for the comparison with the others. Then it serves, and the trainer scores the
tokens of the answer (`compare`). The first different answer makes a replica DIFFERS: it is updated again. The second
makes it REJECTED: the launcher restarts its process; without a launcher it waits for the next version.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

from areal.api.data import CanaryReport, ProbeScore, ProbeTokens
from areal.api.errors import ArealError
from areal.api.images import ImageRef
from areal.fleet.canary import PROBE_TOKENS, ProbeAnswer, Tolerance, agreed, difference, probe
from areal.fleet.replica import GenerationPart, PartChunk
from areal.fleet.replica_set import ReplicaSet
from areal.fleet.replica_states import Event, Slot, State, Weights
from areal.observe.log import get_logger
from areal.system.run_images import RunImages

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
        """Of all probes, from the first exchange on."""
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
        sent, answer = self._probe(""), self._agreed.answer
        return ProbeTokens(prompt_ids=list(sent.input_ids), answer_ids=list(answer.token_ids), images=list(sent.images))

    def _probe(self, part_id: str) -> GenerationPart:
        return probe(self._seed, self._replicas.limits.vocab_size, part_id, self._vision, self._image)

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
                both = "float32" if self._dtype == score.dtype == "float32" else "bfloat16"
                self._trainer_tolerance = Tolerance(both, to_trainer=True)
            tolerance = self._trainer_tolerance.nats
            slots = [s for s in self._replicas.slots if s.version == version and s.weights is Weights.VALID]
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
        found = await asyncio.gather(*(self._ask(slot) for slot in asked))
        answers = {slot.name: answer for slot, answer in zip(asked, found, strict=True) if answer is not None}
        silent = sorted(slot.name for slot, answer in zip(asked, found, strict=True) if answer is None)
        self.num_uncompared += len(silent)
        if known is None and len(answers) == 1:
            [alone] = answers.values()
            self._agreed, answers = _Agreed(version, alone, is_confirmed=False), {}
        right = known if known is not None else agreed(answers, self._tolerance.nats)
        tolerance = self._tolerance.nats
        wrong = {name for name, one in answers.items() if right is None or difference(one, right) > tolerance}
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
        pairs = list(combinations(answers.values(), 2)) or [(one, right) for one in answers.values() if right]
        largest = max((difference(one, other) for one, other in pairs), default=0.0)
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
        part = self._probe(f"canary-{slot.name}-{self._num_probes}")
        problem = ""
        try:
            async with self._replicas.lateness.timeout(PROBE_TIMEOUT_S):
                await replica.generate(part, chunks.append)
        except (ArealError, TimeoutError) as error:
            problem = str(error) or f"no answer in {PROBE_TIMEOUT_S:g} s"
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        if problem or len(token_ids) != PROBE_TOKENS:
            log.warning("%s is not compared: %s", slot.name, problem or f"{len(token_ids)} tokens")
            return None
        logprobs: list[float | None] = [number for chunk in chunks for number in chunk.logprobs]
        # A number that is not finite arrives as null.
        return ProbeAnswer(tuple(token_ids), tuple(math.nan if number is None else number for number in logprobs))
