"""The engine: one thread that computes the steps of the scheduler and runs commands between two steps.

The thread waits for a command while nothing can be computed (idle or paused); `submit`, `abort` and `call` wake it.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from areal.inference.model_runner import ModelRunner
from areal.inference.sampler import sample
from areal.inference.scheduler import Scheduler
from areal.inference.sequence import FinishReason, Sequence, Status
from areal.inference.weight_update import ServedWeights
from areal.observe.log import get_logger
from areal.system.threads import run_into

_LOG = get_logger(__name__)
_T = TypeVar("_T")
STUCK_S = 60.0
"""A step that takes longer hangs: native.chunked_prefill_size limits the work of a step."""
PAUSE_MODES = ("abort", "retract", "in_place")
_NOT_FINITE = FinishReason(
    kind="error", message="the model has no finite probabilities for the next token: its weights or logits overflow"
)
Delivery = Callable[[list[Sequence], list[Sequence]], None]
"""Called in the engine thread with finished sequences, and streaming ones whose next event is due."""


class Detokenizer(Protocol):
    """Converts token ids to text, for stop strings."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Only the engine thread writes them."""

    generated_tokens: int = 0
    computed_tokens: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    busy_s: float = 0.0
    install_s: float = 0.0
    """Seconds without a step because weights were exchanged."""


class Engine:
    """The native engine. Public methods may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        version: str,
        deliver: Delivery,
        on_failure: Callable[[BaseException], None],
        detokenizer: Detokenizer | None = None,
        weights: ServedWeights | None = None,
    ) -> None:
        """`weights`: those of the runner's model; None = made here."""
        self.runner = runner
        self.scheduler = scheduler
        self.version = version
        self.counters = EngineCounters()
        self.is_paused = False
        self.weights = weights or ServedWeights(runner.model)
        self._deliver = deliver
        self._on_failure = on_failure
        self._detokenizer = detokenizer
        self._last_active_s = time.monotonic()  # when the thread last started a step or was woken by a command
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Abort all requests and end the thread after the current step.

        A thread that waits for a collective is left running after `timeout_s`; it ends with the process.
        """
        self._commands.put(self._stop)
        self._thread.join(timeout_s)

    @property
    def stuck_s(self) -> float:
        """Seconds since the thread was last active; 0 while nothing can be computed."""
        return 0.0 if self._is_blocked else time.monotonic() - self._last_active_s

    @property
    def is_stuck(self) -> bool:
        """The current step hangs."""
        return self.stuck_s > STUCK_S

    def submit(self, sequence: Sequence) -> None:
        self._commands.put(lambda: self.scheduler.add(sequence))

    def abort(self, sequence: Sequence, message: str) -> None:
        """End a request with the tokens generated so far."""
        self._commands.put(lambda: self._abort([sequence], message))

    def call(self, command: Callable[[], _T]) -> Future[_T]:
        """Run `command` in the engine thread between two steps; the future has its result or its error."""
        future: Future[_T] = Future()
        self._commands.put(lambda: run_into(future, command))
        return future

    # ---- commands, run in the engine thread through `call`

    def pause(self, mode: str) -> None:
        """Stop computing. abort: started requests end with their tokens; retract: they wait without their cache;
        in_place: they keep it."""
        self.is_paused = True
        self._interrupt(mode, "the server was paused")

    def resume(self) -> None:
        self.is_paused = False

    def abort_all(self, message: str = "abort_all was requested") -> None:
        self._abort([*self.scheduler.running, *self.scheduler.waiting], message)

    def install_weights(self, version: str, mode: str, update_id: str = "") -> None:
        """Compute with the weights that `weights` has received for an update. RequestError, without a change, when
        some lack.

        `mode`: what happens to started requests, as in `pause`. With in_place they keep the keys and values of the old
        weights, which no other request uses.
        """
        start_s = time.perf_counter()
        self.weights.check_complete(update_id)
        self._interrupt(mode, "the weights are replaced")
        if mode == "in_place":
            self.scheduler.stop_sharing()
        self.weights.install()
        if self.runner.vision is not None:
            self.runner.vision.forget()
        self.version = version
        self.counters.install_s += time.perf_counter() - start_s

    def _interrupt(self, mode: str, message: str) -> None:
        if mode == "abort":
            started = [sequence for sequence in self.scheduler.waiting if sequence.num_output]
            self._abort([*self.scheduler.running, *started], message)
        elif mode == "retract":
            for sequence in self.scheduler.running:
                self.runner.keep_experts(sequence)
            self.scheduler.retract_all()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self._is_blocked and not self._stopping:
                    self.step()
        except BaseException as error:  # noqa: BLE001 - the process ends with the cause instead of hanging
            _LOG.critical("the engine thread failed", exc_info=error)
            self._on_failure(error)

    @property
    def _is_blocked(self) -> bool:
        return self.is_paused or not (self.scheduler.running or self.scheduler.waiting)

    def _take_commands(self) -> None:
        """Run all queued commands; wait for one while nothing can be computed."""
        if self._is_blocked:
            command = self._commands.get()
            self._last_active_s = time.monotonic()
            command()
        try:
            while True:
                self._commands.get_nowait()()
        except Empty:
            return

    def step(self) -> None:
        """One step for all running sequences: plan, forward, sample, append, deliver."""
        start_s = time.perf_counter()
        self._last_active_s = time.monotonic()
        plan = self.scheduler.plan_step()
        if plan is None:
            raise RuntimeError("requests wait, but no step can be planned: the block counts are inconsistent")
        logits, sequences = self.runner.forward(plan)
        finished: list[Sequence] = []
        progressed: list[Sequence] = []
        if sequences:
            tokens, logprobs = sample(logits, sequences)
            finished, progressed = self._append(sequences, tokens, logprobs)
        counters = self.counters
        counters.steps += 1
        counters.computed_tokens += sum(chunk.count for chunk in plan.chunks)
        counters.busy_s += time.perf_counter() - start_s
        if finished or progressed:
            self._deliver(finished, progressed)

    def _append(
        self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Append the new tokens and finish complete sequences. Returns (finished, streams whose next event is due)."""
        version = self.version
        ended: list[tuple[Sequence, FinishReason]] = []
        progressed: list[Sequence] = []
        tainted: list[int] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                ended.append((sequence, _NOT_FINITE))
                tainted += sequence.blocks
                continue
            sequence.append(token, logprob, version)
            reason = self._end_of(sequence, token)
            if reason is not None:
                ended.append((sequence, reason))
            elif sequence.stream_interval and len(sequence.logprobs) % sequence.stream_interval == 0:
                progressed.append(sequence)
        self.counters.generated_tokens += len(tokens)
        if ended:
            for sequence, _ in ended:
                self.runner.keep_experts(sequence)
            self.scheduler.finish_many(ended)
            self.counters.finished += len(ended)
        if tainted:
            self.runner.clear_blocks(self.scheduler.unused(tainted))
        return [sequence for sequence, _ in ended], progressed

    def _end_of(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        num_output = len(sequence.logprobs)
        if num_output >= params.min_new_tokens:
            if token in params.stop_token_ids:
                return FinishReason(kind="stop", matched=token)
            if params.stop and (matched := self._matched_stop(sequence)) is not None:
                return FinishReason(kind="stop", matched=matched)
        if num_output >= params.max_new_tokens:
            return FinishReason(kind="length")
        return None

    def _matched_stop(self, sequence: Sequence) -> str | None:
        """The stop string that the last token completed."""
        assert self._detokenizer is not None, "requests with stop strings are refused without a tokenizer"
        longest = max(map(len, sequence.params.stop))
        # A token may be one byte of a character of four bytes.
        first = max(sequence.num_prompt - sequence.num_prior_output, len(sequence.token_ids) - 4 * longest - 4)
        window = sequence.token_ids[first:]
        text, before = self._detokenizer.decode(window), self._detokenizer.decode(window[:-1])
        for stop in sequence.params.stop:
            if text.count(stop) > before.count(stop):
                return stop
        return None

    def _abort(self, sequences: list[Sequence], message: str) -> None:
        reason = FinishReason(kind="abort", message=message)
        ended = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
        for sequence in ended:
            self.runner.keep_experts(sequence)
            self.scheduler.finish(sequence, reason)
        self.counters.aborted += len(ended)
        if ended:
            self._deliver(ended, [])

    def _stop(self) -> None:
        self._stopping = True
        self.abort_all("the server is shutting down")
