"""Runs the training episodes, one task each, while the gate is open.

There is no loop: `admit` is called when room may be free (an episode ended, a version was published, a trainer
attached) and starts as many episodes as fit. The next prompt replaces a failed episode. When episodes only fail or are
only rejected, the executor ends the run with an error.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from areal.api.config import InferenceEngineConfig
from areal.api.engine import InferenceEngine
from areal.api.errors import ArealError
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.kept import encode_answers
from areal.ledger.ledger import Ledger
from areal.ledger.payload import EncodedEpisode, TrajectoryError
from areal.ledger.state import REJECTED, WAITING
from areal.observe.episode_metrics import logged_metrics
from areal.observe.log import get_logger
from areal.observe.spans import episode_ended, track
from areal.rollout.episode import EpisodeEngine, Rejected, verdict_on
from areal.rollout.gate import GateCounts, GateLimits, room, why_closed
from areal.rollout.producer_stats import ProducerStats
from areal.rollout.rejections import Rejections

_log = get_logger(__name__)

STARTS_PER_TURN = 64
"""Episodes that one turn of the event loop starts; each costs about 0.1 ms until its first request."""
MIN_FAILURES_IN_A_ROW = 50
"""Consecutive failures that end the run, or three batches of them if that is more."""
FIRST_FAILURES = 3
"""The run ends when the episodes with this number of lowest ids all fail with one error and none was accepted."""
SLOW_FAILURES_IN_A_ROW = 8
SLOW_FAILURES_S = 120.0
"""Slow failures (a reward that hangs until its time limit) end the run after fewer: at least this many consecutive
failures, over at least this time."""


class ProducerStopped(ArealError, RuntimeError):
    """Episodes only fail or are only rejected, so no further batch can be composed."""


class Executor:
    """Runs the training episodes of a controller."""

    def __init__(
        self,
        *,
        limits: GateLimits,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        rows: PromptStream[dict[str, Any]],
        ledger: Ledger,
        accept: AcceptFn | None,
        options: InferenceEngineConfig,
        temperature: float,
        producer: ProducerStats,
        on_decided: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.limits = limits
        self.is_open = False
        """False until a trainer is attached and the fleet serves its version, and again when the run ends."""
        self._engine = engine
        self._workflow = workflow
        self._rows = rows
        self._ledger = ledger
        self._accept = accept
        self._options = options
        self._temperature = temperature
        self._producer = producer
        self._rejections = Rejections(
            batch_size=limits.batch_size,
            rows_per_epoch=rows.rows_per_epoch,
            limit=options.max_rejected_per_step,
            filter_name=options.should_accept_fn,
        )
        self._on_decided = on_decided
        self._on_fatal = on_fatal
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._dropped: list[asyncio.Task[None]] = []  # cancelled; their episodes run again
        self._to_restart = deque(ledger.state.running)  # same ids, next attempt; they wait for room like new ones
        self.first_failure = ""
        """Id and cause of the first episode in this process that failed, or in which an agent failed; empty = none."""
        self._first_failures: dict[int, str] = {}
        self._admits_more = False
        """The next turn of the loop starts more episodes."""
        self._failed_in_a_row = 0
        self._failing_since_s = 0.0
        self._max_failed = max(MIN_FAILURES_IN_A_ROW, 3 * limits.batch_size)

    def why_closed(self) -> str:
        """Why no episode may start; empty while one may."""
        return why_closed(self.limits, self._gate_counts())

    def _gate_counts(self) -> GateCounts:
        state = self._ledger.state
        rejected = 0 if self.limits.smallest_batch is None else state.counts[REJECTED]
        return GateCounts(
            running=len(self._tasks),
            accepted=state.num_accepted + rejected + state.skipped_steps * self.limits.batch_size,
            version=state.version,
            waiting=state.counts[WAITING],
            next_step=state.next_step,
        )

    def hold_requests(self, hold: bool) -> None:
        """While true, running episodes send no new request; requests already sent continue."""
        if hold:
            self._may_send.clear()
        else:
            self._may_send.set()

    def admit(self) -> None:
        """Start as many episodes as the gate allows, first those that ran when the previous controller died."""
        if not self.is_open:
            return
        version = self._ledger.state.version
        free = room(self.limits, self._gate_counts())
        if free > STARTS_PER_TURN:
            free = STARTS_PER_TURN
            if not self._admits_more:
                self._admits_more = True
                asyncio.get_running_loop().call_soon(self._admit_more)
        while free > 0 and self._to_restart:
            episode_id = self._to_restart.popleft()
            self._ledger.admit_again(episode_id, version=version)
            self._start(episode_id)
            free -= 1
        for _ in range(free):
            self._start(self._ledger.admit(version=version))

    def _admit_more(self) -> None:
        self._admits_more = False
        self.admit()

    def drop_stale(self) -> None:
        """Reject waiting episodes that are too stale for any later batch (rollout.on_stale=drop)."""
        for episode in list(self._ledger.state.waiting.values()):
            if self._is_dropped(episode.min_version):
                self._producer.count_dropped(episode.num_tokens)
                self._ledger.reject(episode.episode_id, "stale")
                self._trace(episode.episode_id, "dropped (stale)")

    def _is_dropped(self, min_version: int) -> bool:
        """Whether an accepted episode is too stale to train on. Its staleness only grows, so this is decided early.

        Staleness: the version that trains on it minus `min_version`, its oldest token; -1 = no generated token.
        """
        staleness = self._ledger.state.trainer_version - min_version
        return self._options.on_stale == "drop" and min_version >= 0 and staleness > self.limits.max_staleness

    def _start(self, episode_id: int) -> None:
        loop = asyncio.get_running_loop()
        self._tasks[episode_id] = loop.create_task(self._run(episode_id), name=f"episode-{episode_id}")
        self._trace(episode_id, "started")

    def _trace(self, episode_id: int, what: str) -> None:
        """Log a start or an end, and how many episodes are in each state (rollout.enable_rollout_tracing)."""
        if self._options.enable_rollout_tracing:
            state = self._ledger.state
            counts = ", ".join(f"{count} {name}" for name, count in state.counts_by_name().items())
            _log.info("episode %d %s; version %d: %s", episode_id, what, state.version, counts)

    async def _run(self, episode_id: int) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        start_s = loop.time()
        engine = EpisodeEngine(
            self._engine,
            self._producer.count_answer,
            may_send=self._may_send,
            keep_answers=self._options.keep_rejected > 0,
            temperature=self._temperature,
        )
        try:
            try:
                row = dict(self._rows.row(episode_id))  # a workflow may change its row, not the dataset
                with track("episode", str(episode_id)), logged_metrics() as logged:
                    group = await self._workflow.arun_episode(engine, row)
                check_format = self._options.check_trajectory_format
                verdict = verdict_on(episode_id, group, accept=self._accept, check_format=check_format)
            except asyncio.CancelledError:
                if task.cancelling():
                    raise  # the controller stops; the ledger keeps the episode as running
                self._failed(episode_id, RuntimeError("the workflow cancelled itself"), engine)
            except Exception as error:  # noqa: BLE001 - user code: an error ends this one episode
                if task.cancelling():
                    return  # the workflow replaced the cancellation by an error
                self._failed(episode_id, error, engine)
            else:
                if task.cancelling():
                    return  # the workflow ignored the cancellation; the episode runs again
                if group is not None and group.agent_error:
                    self._producer.num_agent_errors += 1
                    failure = f"the agent failed in episode {episode_id}: {group.agent_error}"
                    _log.warning("%s", failure)
                    self.first_failure = self.first_failure or failure
                stats = logged.means() | ({} if group is None else group.stats)
                stats = {name: float(value) for name, value in stats.items()}
                self._ended(episode_id, verdict, stats, engine, loop.time() - start_s)
            del self._tasks[episode_id]
            self.admit()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of ours, for example of the ledger: it ends the run
            self._on_fatal(error)

    def _ended(
        self,
        episode_id: int,
        verdict: EncodedEpisode | Rejected,
        stats: dict[str, float],
        engine: EpisodeEngine,
        seconds: float,
    ) -> None:
        self._failed_in_a_row = 0
        self._producer.count_ended(stats)
        if isinstance(verdict, Rejected):
            self._producer.num_rejected += 1
            self._reject(episode_id, verdict.reason, verdict.payload or _answers_of(episode_id, engine))
            if warning := self._rejections.count_rejected(verdict.reason):
                _log.warning("%s", warning)
            if why := self._rejections.exceeded_limit():
                self._stop(why, code="rollout.all_rejected")
            self._on_decided()
            return
        if self._is_dropped(verdict.min_version):
            self._producer.count_dropped(verdict.num_tokens)
            self._reject(episode_id, "stale", verdict.payload, status="dropped")
            return
        self._ledger.accept(
            episode_id,
            verdict,
            stats=stats,
            seconds=seconds,
            replicas=engine.replicas,
            num_interruptions=engine.num_interruptions,
        )
        self._producer.num_accepted += 1
        episode_ended(episode_id, "accepted")
        self._rejections.count_accepted()
        self._trace(episode_id, f"accepted, reward {verdict.reward:.4g}")
        self._on_decided()

    def _reject(self, episode_id: int, reason: str, payload: bytes, status: str = "rejected") -> None:
        self._ledger.reject(episode_id, reason, payload=payload)
        episode_ended(episode_id, status, reason)
        self._trace(episode_id, f"{status} ({reason})")

    def _failed(self, episode_id: int, error: Exception, engine: EpisodeEngine) -> None:
        reason = _described(error)
        without_traceback = isinstance(error, ArealError) or self._failed_in_a_row > 0
        _log.warning("episode %d failed: %s", episode_id, reason, exc_info=None if without_traceback else error)
        self._producer.num_failed += 1
        self._producer.num_agent_errors += isinstance(error, ArealError) and error.code == "agent.failed"
        self._ledger.fail(episode_id, reason, payload=_answers_of(episode_id, engine))
        self._trace(episode_id, "failed")
        episode_ended(episode_id, "failed", reason)
        self.first_failure = self.first_failure or f"episode {episode_id} failed: {reason}"
        if why := self._repeated(episode_id, error):
            self._stop(f"{why}: {reason}", code="rollout.first_failed")
            return
        if not self._may_send.is_set():
            return  # perhaps a time limit of the workflow expired while its request was held
        now_s = asyncio.get_running_loop().time()
        if self._failed_in_a_row == 0:
            self._failing_since_s = now_s
        self._failed_in_a_row += 1
        slow = self._failed_in_a_row >= SLOW_FAILURES_IN_A_ROW and now_s - self._failing_since_s >= SLOW_FAILURES_S
        if slow or self._failed_in_a_row >= self._max_failed:
            self._stop(
                f"the last {self._failed_in_a_row} episodes all failed, the last one with {reason}",
                code="rollout.all_failed",
            )

    def _repeated(self, episode_id: int, error: Exception) -> str:
        """Why the run ends: its first episodes all failed with one error. Empty otherwise.

        Lost servers and time limits are not counted. Ids are compared, because rows without the error may
        take longer to end.
        """
        counts = self._ledger.state.counts
        if episode_id >= FIRST_FAILURES or isinstance(error, ConnectionError | TimeoutError) or counts[REJECTED]:
            return ""
        self._first_failures[episode_id] = _cause(error)
        causes = set(self._first_failures.values())
        if self._ledger.state.num_accepted or len(self._first_failures) < FIRST_FAILURES or len(causes) > 1:
            return ""
        return f"the first {FIRST_FAILURES} episodes all failed with the same error"

    def _stop(self, why: str, *, code: str) -> None:
        if self.is_open:
            self.is_open = False
            self._on_fatal(ProducerStopped(why, code=code))

    def restart_running(self) -> None:
        """Cancel the running episodes; each runs again when the gate has room."""
        for task in self._tasks.values():
            task.cancel()
        self._dropped = [task for task in self._dropped if not task.done()] + list(self._tasks.values())
        self._to_restart.extend(self._tasks)
        self._tasks.clear()

    async def close(self) -> None:
        """Cancel the running episodes and wait for their end. The ledger keeps them as running."""
        self.is_open = False
        tasks = [*self._tasks.values(), *self._dropped]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answers_of(episode_id: int, engine: EpisodeEngine) -> bytes:
    """What an episode without usable trajectories generated, for readers; empty = nothing that can be recorded."""
    try:
        return encode_answers(episode_id, engine.answers)
    except TrajectoryError:
        return b""


def _cause(error: Exception) -> str:
    """Equal for two errors of the same kind: numbers and names of rows in a message do not count."""
    code = error.code if isinstance(error, ArealError) else ""
    places = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {code} {places[-1].filename}:{places[-1].lineno}" if places else code


def _described(error: Exception) -> str:
    """One line for an exception: type and text, and the line of code unless areal raised it on purpose."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ArealError):
        return text
    places = traceback.extract_tb(error.__traceback__)
    return f"{text} ({places[-1].filename}:{places[-1].lineno})" if places else text
