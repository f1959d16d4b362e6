"""Runs the training episodes, one task each, while the gate is open.

There is no loop: `admit` is called when room may be free (an episode ended, a version was published, a trainer
attached) and starts as many episodes as fit. The next prompt replaces a failed episode. When episodes only fail or are
only rejected, the executor ends the run with an error.
"""

import asyncio
import dataclasses
import math
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from areal.api.columns import to_runs
from areal.api.config import ChosenAlarm, InferenceEngineConfig
from areal.api.data import (
    AGENT_ERROR,
    MISSING_REWARDS,
    GenerationRequest,
    GenerationResponse,
    TokenChunk,
    TrajectoryGroup,
)
from areal.api.engine import InferenceEngine, InferenceFleet
from areal.api.errors import ArealError, ServerUnavailable
from areal.api.workflow import EPISODE_ID, AcceptFn, RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.kept import encode_answers
from areal.ledger.ledger import Ledger
from areal.ledger.payload import EncodedEpisode, TokenLimits, TrajectoryError, encode_episode
from areal.ledger.state import REJECTED, WAITING
from areal.observe.alarms import Alarm, AlarmStop, alarm_of, alarm_stop, alarms_text, by_meaning
from areal.observe.log import get_logger
from areal.observe.spans import episode_ended, span, track
from areal.observe.step_files import LoggedMetrics, append_step_line
from areal.rollout.gate import GateCounts, GateLimits, room, why_closed
from areal.rollout.selection import TRAINED, Outcome, Selection
from areal.system.stacks import waiting_stack

# ----------------------------------------------------------------------------------------------------------------------
# The alarms about episodes: raised by the controller as soon as an episode has ended, whether or not a step is done.
#
# The other alarms are about the metrics of train steps, and trainer rank 0 raises them. Both append to alarms.jsonl.

WINDOW_BATCHES, MIN_EPISODES = 20, 3
LOOK_S = 1.0
"""Seconds between two looks at the counters of the servers."""
SHARES = ("agent_errors", "failed_episodes", "missing_rewards")
"""Alarms on the share of the episodes of the window; the others are on their number."""

_log = get_logger(__name__)


class EpisodeAlarms:
    """Counts what ended episodes show, by the name of the alarm, over the newest WINDOW_BATCHES batches of them."""

    def __init__(
        self,
        chosen: Sequence[ChosenAlarm],
        path: Path | None,
        *,
        batch_size: int,
        steps_done: Callable[[], int],
        invalid_answers: Callable[[], Mapping[str, int]],
        on_stop: Callable[[AlarmStop], None],
    ) -> None:
        """`path`: of alarms.jsonl, None = only the log. `invalid_answers`: their number so far, by server.

        `on_stop` gets the error of an alarm with action=stop.
        """
        self._chosen = {alarm.rule.name: alarm for alarm in chosen if alarm.rule.per == "episode"}
        self._num_ended = 0
        self._beyond: dict[str, int] = {}  # The number of ended episodes when an alarm was last beyond its limit.
        self._path = path
        self._steps_done, self._invalid_answers, self._on_stop = steps_done, invalid_answers, on_stop
        self._size = WINDOW_BATCHES * batch_size
        self._window: deque[tuple[int, Sequence[str]]] = deque()
        """The number and the signs of the newest ended episodes that have any."""
        self._counts: Counter[str] = Counter()
        self._details: dict[str, str] = {}  # The newest cause of each alarm.
        self._looked_s = float("-inf")
        self._num_invalid = 0
        self._has_stopped = False

    def ended(self, signs: Sequence[str], detail: str, now_s: float) -> None:
        """An episode ended. `signs`: the alarms that count it; `detail`: its cause."""
        self._num_ended += 1
        if signs:
            self._window.append((self._num_ended, signs))
            self._counts.update(signs)
            self._details.update(dict.fromkeys(signs, detail))
        has_news = bool(signs)
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            has_news |= self._look_at_servers()
        if has_news and not self._has_stopped:  # without news no value rises
            self._look()

    def _look_at_servers(self) -> bool:
        counts = {name: count for name, count in self._invalid_answers().items() if count}
        has_news, self._num_invalid = sum(counts.values()) != self._num_invalid, sum(counts.values())
        if has_news:
            self._details["invalid_numbers"] = ", ".join(f"{name} sent {count}" for name, count in counts.items())
        return has_news

    def _look(self) -> None:
        steps, alarms = self._steps_done(), list[Alarm]()
        while self._window and self._window[0][0] <= self._num_ended - self._size:
            self._counts.subtract(self._window.popleft()[1])
        for name, chosen in self._chosen.items():
            value, before = self._value(name), self._beyond.get(name)
            if not chosen.rule.is_beyond(value, chosen.limit):
                continue
            self._beyond[name] = self._num_ended
            if before is None or self._num_ended - before > self._size:  # else it is the same cause
                alarm = alarm_of(steps, chosen, value)
                alarms.append(dataclasses.replace(alarm, causes=f"{self._details.get(name)}; {alarm.causes}"))
        for alarm in alarms:
            if self._path is not None:
                append_step_line(self._path, steps, dataclasses.asdict(alarm))
        for group in by_meaning(alarms):
            _log.warning("%s", alarms_text(group))
        for alarm in alarms:
            if alarm.action == "stop" and not self._has_stopped:
                self._has_stopped = True
                self._on_stop(alarm_stop(self._chosen[alarm.name], steps))

    def _value(self, name: str) -> float:
        count = self._counts[name]
        if name in SHARES:
            return count / min(self._num_ended, self._size) if count >= MIN_EPISODES else 0.0
        return float(count + (self._num_invalid if name == "invalid_numbers" else 0))


# ----------------------------------------------------------------------------------------------------------------------
# Counts the results of episodes since the last batch, and the rate of generated tokens.

RATE_WINDOW_S = 10.0


class ProducerStats:
    """The executor and the evaluations write it; batches and the status read it."""

    def __init__(self, selection: Selection, pulls: Callable[[], Mapping[str, float]]) -> None:
        """`selection`: of the newest episodes, which the executor fills. `pulls`: counts about the servers' copies of
        weights so far."""
        self.selection = selection
        self._pulls, self._last_pulls = pulls, Counter[str]()
        self.generated_tokens = 0
        """Tokens generated since this process started, for training and evaluation."""
        self.num_accepted = self.num_rejected = self.num_failed = self.num_agent_errors = 0
        """Episodes since the last batch; dropped ones count as rejected. Those with agent errors are counted twice."""
        self._replica_tokens: Counter[str] = Counter()
        self._replica_seconds: defaultdict[str, float] = defaultdict(float)
        self._dropped_lengths: list[int] = []
        self._ended: defaultdict[str, list[float]] = defaultdict(list)
        self._last_batch_s: float | None = None
        self._last_batch_tokens = 0
        self._readings: deque[tuple[float, int]] = deque()

    def count_answer(self, response: GenerationResponse) -> None:
        """A request was answered, for training or evaluation."""
        num_tokens = len(response.output_ids)
        self.generated_tokens += num_tokens
        if len(response.replicas) == 1:  # the time of an answer of several replicas cannot be divided
            self._replica_tokens[response.replicas[0]] += num_tokens
            self._replica_seconds[response.replicas[0]] += response.latency_s

    def count_ended(self, stats: Mapping[str, float]) -> None:
        """An episode ended without failing. The statistics of the batch have those of accepted episodes alone."""
        for name, value in stats.items():
            self._ended[name].append(value)

    def count_dropped(self, num_tokens: int) -> None:
        """An accepted episode of `num_tokens` was dropped as stale; long ones are dropped more often."""
        self.num_rejected += 1
        self._dropped_lengths.append(num_tokens)

    def since_last_batch(self, now_s: float, kept_lengths: list[int]) -> dict[str, float]:
        """Statistics of the time since the last call; `kept_lengths`: tokens of the batch's episodes."""
        stats = {
            "accepted": float(self.num_accepted),
            "rejected": float(self.num_rejected),
            "failed": float(self.num_failed),
            "agent_errors": float(self.num_agent_errors),
            "dropped": float(len(self._dropped_lengths)),
        }
        if self.num_accepted + self.num_rejected:
            stats["accepted_frac"] = self.num_accepted / (self.num_accepted + self.num_rejected)
        if self._dropped_lengths:
            dropped = sum(self._dropped_lengths) / len(self._dropped_lengths)
            stats["dropped_tokens_mean"] = dropped
            stats["dropped_to_kept_tokens"] = dropped / (sum(kept_lengths) / len(kept_lengths))
        stats |= self.selection.stats()
        stats |= {f"ended/{name}": sum(values) / len(values) for name, values in self._ended.items()}
        self._ended.clear()
        stats["produced_tokens"] = float(self.generated_tokens - self._last_batch_tokens)
        if self._last_batch_s is not None and now_s > self._last_batch_s:
            stats["generated_tokens_per_s"] = stats["produced_tokens"] / (now_s - self._last_batch_s)
        self._last_batch_s, self._last_batch_tokens = now_s, self.generated_tokens
        for name, seconds in self._replica_seconds.items():
            if seconds > 0:
                stats[f"replica_tokens_per_s/{name}"] = self._replica_tokens[name] / seconds
        if any((pulls := self._pulls()).values()):
            stats |= {name: value - self._last_pulls[name] for name, value in pulls.items()}
            self._last_pulls = Counter(pulls)
        self._replica_tokens.clear()
        self._replica_seconds.clear()
        self.num_accepted = self.num_rejected = self.num_failed = self.num_agent_errors = 0
        self._dropped_lengths = []
        return stats

    def tokens_per_s(self, now_s: float) -> float:
        """Rate between the calls of the last RATE_WINDOW_S seconds; 0 at the first call."""
        readings = self._readings
        readings.append((now_s, self.generated_tokens))
        while len(readings) > 2 and readings[0][0] < now_s - RATE_WINDOW_S:
            readings.popleft()
        start_s, tokens = readings[0]
        return (self.generated_tokens - tokens) / (now_s - start_s) if now_s > start_s else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# When episodes that only fail, or are only rejected, end the run. Pure; the time is an argument.

REJECTED_BATCHES_IN_A_ROW = 100
"""Consecutive rejections that end the run, in batches; at least one epoch."""
LOW_ACCEPTANCE_ONE_IN = 10
"""A train step for which fewer groups than one in this number are accepted causes a warning."""
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


class StuckEpisode(ArealError, TimeoutError):
    """An episode has not ended in rollout.episode_timeout_s."""

    code = "rollout.episode_timeout"


class FailurePolicy:
    """Counts failed and rejected episodes, warns, and returns the error that ends the run once there are too many.

    Groups dropped as stale are not counted as rejected: their staleness says nothing about the prompts.
    """

    def __init__(
        self, *, batch_size: int, rows_per_epoch: int, max_rejected: int | None, filter_name: str, has_results: bool
    ) -> None:
        """`max_rejected`: rollout.max_rejected_per_step; `filter_name`: rollout.should_accept_fn, for the messages.

        `has_results`: episodes of the run have ended without failing.
        """
        self._batch_size = batch_size
        self._max_rejected = max_rejected
        self._filter_name = filter_name
        self._has_results = has_results
        self._max_rejected_in_a_row = max(rows_per_epoch, REJECTED_BATCHES_IN_A_ROW * batch_size)
        self._rejected_in_a_row = 0
        self._accepted_of_step = 0
        self._rejected_of_step: Counter[str] = Counter()
        self._max_failed_in_a_row = max(MIN_FAILURES_IN_A_ROW, 3 * batch_size)
        self.failed_in_a_row = 0
        self._failing_since_s = 0.0
        self._first_causes: dict[int, str] = {}

    def ended(self, *, has_reward: bool) -> None:
        """An episode ended without failing and was not accepted."""
        self.failed_in_a_row = 0
        self._has_results = self._has_results or has_reward

    def accepted(self) -> None:
        """A group is accepted. The last group of a train step resets the counts of the step."""
        self._has_results = True
        self.failed_in_a_row = self._rejected_in_a_row = 0
        self._accepted_of_step += 1
        if self._accepted_of_step == self._batch_size:
            self._accepted_of_step = 0
            self._rejected_of_step.clear()

    def rejected(self, reason: str, episode_id: int | None = None) -> ProducerStopped | None:
        """A group is rejected. Warns once per train step when few groups are accepted. `episode_id`: it has no reward,
        and the cause is neither a time limit nor a lost server."""
        if episode_id is not None and self._is_first_cause(episode_id, reason):
            advice = MISSING_REWARDS.get(reason) or "`areal show RUN --reason agent_error` has the errors"
            why = f"the first {FIRST_FAILURES} episodes all ended without a reward ({reason}): {advice}"
            return ProducerStopped(why, code="rollout.first_failed")
        self._rejected_in_a_row += 1
        self._rejected_of_step[reason] += 1
        total = self._rejected_of_step.total()
        # The first count at which the step stays below this share even if all its other groups are accepted.
        if total == (LOW_ACCEPTANCE_ONE_IN - 1) * self._batch_size + 1:
            share = f"less than one group in {LOW_ACCEPTANCE_ONE_IN} is accepted for a train step"
            _log.warning("%s: %s", share, self._rejections_text())
        if self._max_rejected is not None and total > self._max_rejected:
            why = (
                f"{total} groups were rejected for one train step (rollout.max_rejected_per_step={self._max_rejected})"
            )
        elif self._rejected_in_a_row >= self._max_rejected_in_a_row:
            why = f"the last {self._rejected_in_a_row} episodes were all rejected"
        else:
            return None
        return ProducerStopped(f"{why}: {self._rejections_text()}", code="rollout.all_rejected")

    def failed(
        self, episode_id: int, error: Exception, reason: str, *, now_s: float, was_held: bool
    ) -> ProducerStopped | None:
        """An episode failed. `was_held`: requests waited for the trainer, so a time limit may have expired by that."""
        if self._fails_from_the_start(episode_id, error):
            why = f"the first {FIRST_FAILURES} episodes all failed with the same error: {reason}"
            return ProducerStopped(why, code="rollout.first_failed")
        if was_held:
            return None
        if self.failed_in_a_row == 0:
            self._failing_since_s = now_s
        self.failed_in_a_row += 1
        is_slow = self.failed_in_a_row >= SLOW_FAILURES_IN_A_ROW and now_s - self._failing_since_s >= SLOW_FAILURES_S
        if not is_slow and self.failed_in_a_row < self._max_failed_in_a_row:
            return None
        why = f"the last {self.failed_in_a_row} episodes all failed, the last one with {reason}"
        return ProducerStopped(why, code="rollout.all_failed")

    def _fails_from_the_start(self, episode_id: int, error: Exception) -> bool:
        """Lost servers and time limits do not count. Ids are compared, because rows without the error may take
        longer to end."""
        return not isinstance(error, ConnectionError | TimeoutError) and self._is_first_cause(episode_id, _cause(error))

    def _is_first_cause(self, episode_id: int, cause: str) -> bool:
        """Whether this episode completes the first ones, which all have one cause."""
        if self._has_results or episode_id >= FIRST_FAILURES:
            return False
        self._first_causes[episode_id] = cause
        return len(self._first_causes) == FIRST_FAILURES and len(set(self._first_causes.values())) == 1

    def _rejections_text(self) -> str:
        """Accepted and rejected groups of the train step, the rejected ones by reason, and what the user can do."""
        reasons, total = self._rejected_of_step, self._rejected_of_step.total()
        texts = {"workflow": "by the workflow, which returned None", "filter": f"by the filter {self._filter_name}"}
        named = ", ".join(f"{count} {texts.get(reason, reason).rstrip()}" for reason, count in reasons.most_common())
        counts = f"{self._accepted_of_step} of {self._batch_size} groups were accepted, {total} were rejected ({named})"
        agent_errors = sum(count for reason, count in reasons.items() if reason.startswith(AGENT_ERROR))
        if 2 * agent_errors > total:
            show = "`areal show RUN --reason agent_error` has its errors and their lines"
            return f"{counts}. To fix this, correct the agent: {show}."
        changes = ["use prompts that the policy solves sometimes, neither always nor never"]
        if self._filter_name:
            changes.append(f"choose a rollout.should_accept_fn that accepts more (now {self._filter_name})")
        if self._max_rejected is not None:
            changes.append("increase rollout.max_rejected_per_step")
        return f"{counts}. To fix this, {', or '.join(changes)}."


def _cause(error: Exception) -> str:
    """Equal for two errors of the same kind: numbers and names of rows in a message do not count."""
    code = error.code if isinstance(error, ArealError) else ""
    places = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {code} {places[-1].filename}:{places[-1].lineno}" if places else code


# ----------------------------------------------------------------------------------------------------------------------
# One running episode: the engine that its workflow receives, and the verdict on its result.

MAX_KEPT_ANSWERS = 16
"""Answers of one rejected or failed episode that are kept for readers."""


class EpisodeEngine:
    """The InferenceEngine of one episode; records the replicas that served it.

    A request waits until `may_send` is set. It is cleared while a recovered trainer catches up, because the policy that
    would answer is older than the episode; the weight update that ends this sets it.
    """

    __slots__ = (
        "_count_answer",
        "_engine",
        "_may_send",
        "_num_kept",
        "_temperature",
        "answers",
        "num_answers",
        "num_interruptions",
        "num_tokens",
        "replicas",
        "source",
    )

    def __init__(
        self,
        engine: InferenceEngine,
        count_answer: Callable[[GenerationResponse], None],
        *,
        may_send: asyncio.Event | None = None,
        keep_answers: bool = False,
        temperature: float | None = None,
    ) -> None:
        """`may_send` None: requests never wait. `keep_answers`: the newest answers stay in `answers`.

        `temperature`: that of the run, None = of every request.
        """
        self._temperature = temperature
        self.answers: list[GenerationResponse] = []
        self._num_kept = MAX_KEPT_ANSWERS if keep_answers else 0
        self._engine = engine
        self._count_answer = count_answer
        self._may_send = may_send
        self.source = ""
        """Data source of the row."""
        self.num_interruptions = self.num_answers = self.num_tokens = 0
        self.replicas: list[str] = []

    @property
    def version(self) -> int:
        return self._engine.version

    async def keep_policy(self, parent: Path) -> Path:
        return await self._engine.keep_policy(parent)

    def older_policy(self, folder: Path) -> AbstractAsyncContextManager[None]:
        return self._engine.older_policy(folder)

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse:
        return (await self.agenerate_group([request]))[0]

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        answers: dict[int, GenerationResponse] = {}
        while missing := [number for number in range(len(requests)) if number not in answers]:
            sent_at = await self._may_send_at()
            with span("generate"):
                responses = await self._engine.agenerate_group([requests[number] for number in missing])
            for number, response in zip(missing, responses, strict=True):
                if not requests[number].adapter:
                    self._count_answer(response)
                if self._is_current(response.output_versions, sent_at):
                    answers[number] = self._recorded(requests[number], response)
        return [answers[number] for number in range(len(requests))]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        has_begun = False
        while True:
            sent_at = await self._may_send_at()
            with span("generate"):
                async with aclosing(self._engine.stream(request)) as chunks:
                    async for chunk in chunks:
                        response = chunk.response
                        if response is not None and not request.adapter:
                            self._count_answer(response)
                        if not self._is_current(response.output_versions if response else chunk.versions, sent_at):
                            break
                        has_begun = True
                        yield chunk if response is None else chunk._replace(response=self._recorded(request, response))
                        if response is not None:
                            return
            if has_begun:
                text = "a server reported an older version at the end of an answer that is streamed"
                raise ServerUnavailable(text, code="server.unreadable_answer")

    async def _may_send_at(self) -> int:
        """Waits until a request may be sent. Returns the version that is served then."""
        if self._may_send is not None and not self._may_send.is_set():
            with span("wait for the trainer"):
                await self._may_send.wait()
        return self._engine.version

    def _is_current(self, versions: Sequence[int], sent_at: int) -> bool:
        """Whether tokens of an answer can be used. If the trainer went back to an older version before the first one
        was generated, the request is sent again."""
        return self._may_send is None or min(to_runs(versions).values, default=sent_at) >= sent_at

    def _recorded(self, request: GenerationRequest, response: GenerationResponse) -> GenerationResponse:
        if request.adapter:  # of an older policy, which is not trained
            return response
        temperature = request.gconfig.temperature
        if self._temperature not in (None, temperature) and not request.gconfig.greedy:
            response = replace(response, temperature=temperature)
        self.num_answers += 1
        self.num_tokens += len(response.output_ids)
        self.answers.append(response)
        del self.answers[: max(len(self.answers) - self._num_kept, 0)]
        self.num_interruptions += response.num_interruptions
        for name in response.replicas:
            if name not in self.replicas:
                self.replicas.append(name)
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The verdict on an episode that is valid but not trained on."""

    reason: str
    payload: bytes = b""
    """The trajectories, if there are any."""


def verdict_on(
    episode_id: int, group: TrajectoryGroup | None, *, accept: AcceptFn | None, limits: TokenLimits
) -> EncodedEpisode | Rejected:
    """Whether the result of an episode is accepted. Raises TrajectoryError when it cannot be used."""
    if group is None:
        return Rejected(reason="workflow")
    if group.stats:
        check_stats(group)
    if group.rejected and not group.trajectories:
        return Rejected(reason=group.rejected)
    encoded = encode_episode(episode_id, group, None if group.rejected else limits)
    if group.filter_rewards:
        _check_filter_rewards(group)
    if group.rejected:
        return Rejected(reason=group.rejected, payload=encoded.payload)
    if accept is not None:
        rewards = group.filter_rewards or [trajectory.reward for trajectory in group.trajectories]
        if not accept(replace(group, filter_rewards=rewards)):
            return Rejected(reason="filter", payload=encoded.payload)
    return encoded


def _check_filter_rewards(group: TrajectoryGroup) -> None:
    """TrajectoryError unless there is one finite filter reward per trajectory."""
    count, wanted = len(group.filter_rewards), len(group.trajectories)
    if count != wanted:
        raise TrajectoryError(
            f"the group has {count} filter_rewards for {wanted} trajectories: return one for each, or none",
            code="workflow.trajectory_lengths",
        )
    if not all(math.isfinite(value) for value in group.filter_rewards):
        raise TrajectoryError("filter_rewards holds a number that is not finite", code="workflow.not_finite")


def check_stats(group: TrajectoryGroup) -> None:
    """TrajectoryError when a statistic of the workflow is not finite, which JSON cannot represent."""
    for name, value in group.stats.items():
        if not math.isfinite(value):
            raise TrajectoryError(
                f"the statistic {name!r} of the episode is {value}, not a finite number", code="workflow.not_finite"
            )


CLOSE_S = 10.0
"""Maximum seconds that a controller which ends waits for its cancelled episodes."""
STARTS_PER_TURN = 64
"""Episodes that one turn of the event loop starts; each costs about 0.1 ms until its first request."""


class _Running(NamedTuple):
    """An episode that has a task."""

    task: asyncio.Task[None]
    engine: EpisodeEngine
    deadline_s: float
    """Loop time at which it fails (rollout.episode_timeout_s)."""


class Executor:
    """Runs the training episodes of a controller."""

    def __init__(
        self,
        *,
        limits: GateLimits,
        engine: InferenceFleet,
        workflow: RolloutWorkflow,
        rows: PromptStream[dict[str, Any]],
        ledger: Ledger,
        accept: AcceptFn | None,
        options: InferenceEngineConfig,
        temperature: float,
        longest_row: int,
        source_key: str,
        producer: ProducerStats,
        alarms: EpisodeAlarms,
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
        self._limits = TokenLimits(0, 0, options.check_trajectory_format, longest_row)
        self._source_key = source_key
        self._producer = producer
        self._alarms = alarms
        state = ledger.state
        self._failures = FailurePolicy(
            batch_size=limits.batch_size,
            rows_per_epoch=rows.rows_per_epoch,
            max_rejected=options.max_rejected_per_step,
            filter_name=options.should_accept_fn,
            has_results=bool(state.num_accepted or state.counts[REJECTED]),
        )
        self._on_decided = on_decided
        self._on_fatal = on_fatal
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._tasks: dict[int, _Running] = {}  # in the order of their deadlines
        self._timer: asyncio.TimerHandle | None = None  # Looks at the oldest episodes: all have one time limit.
        self._dropped: list[asyncio.Task[None]] = []  # cancelled; their episodes run again
        self._to_restart = deque(state.running)  # same ids, next attempt; they wait for room like new ones
        self.first_failure = ""
        """Id and cause of the first episode in this process that failed, or in which an agent failed; empty = none."""
        self._num_stuck = 0  # Episodes that exceeded rollout.episode_timeout_s.
        self._admits_more = False  # The next turn of the loop starts more episodes.
        self._dropped_below = 0  # Waiting episodes with older tokens are rejected.

    def why_closed(self) -> str:
        """Why no episode may start; empty while one may."""
        return why_closed(self.limits, self._gate_counts())

    def _gate_counts(self) -> GateCounts:
        state, setpoint = self._ledger.state, self.limits.setpoint
        rejected = 0 if self.limits.smallest_batch is None else state.counts[REJECTED]
        return GateCounts(
            lead=None if setpoint is None else round(setpoint.lead(state) * self.limits.batch_size),
            running=len(self._tasks),
            accepted=state.num_accepted + rejected + state.skipped_steps * self.limits.batch_size,
            version=state.version,
            waiting=state.counts[WAITING],
            next_step=state.next_step,
        )

    def _token_limits(self) -> TokenLimits:
        """Servers may have a version before the ledger, and a trainer that went back has published higher ones."""
        served, published = self._engine.version, self._ledger.state.highest_version
        newest, limits, vocab_size = served if served > published else published, self._limits, self._engine.vocab_size
        if limits.newest_version != newest or limits.vocab_size != vocab_size:
            self._limits = limits = limits._replace(newest_version=newest, vocab_size=vocab_size)
        return limits

    def hold_requests(self, hold: bool) -> None:
        """Let running episodes send no new request while true; requests already sent continue."""
        if hold:
            self._may_send.clear()
        else:
            self._may_send.set()

    def admit(self) -> None:
        """Start as many episodes as the gate allows, first those that ran when the previous controller died."""
        if not self.is_open:
            return
        version, counts = self._ledger.state.version, self._gate_counts()
        free = room(self.limits, counts)
        ahead = None if counts.lead is None else counts.ahead(self.limits.batch_size) + free
        if free > STARTS_PER_TURN:
            free = STARTS_PER_TURN
            self._admit_next_turn()
        while free > 0 and self._to_restart:
            episode_id = self._to_restart.popleft()
            self._ledger.admit_again(episode_id, version=version, ahead=ahead)
            self._start(episode_id)
            free -= 1
        for _ in range(free):
            self._start(self._ledger.admit(version=version, ahead=ahead))

    def _admit_next_turn(self) -> None:
        """One look at the gate for all episodes that end in a turn of the loop."""
        if not self._admits_more:
            self._admits_more = True
            asyncio.get_running_loop().call_soon(self._admit_more)

    def _admit_more(self) -> None:
        self._admits_more = False
        self.admit()

    def drop_stale(self) -> None:
        """Reject waiting episodes that are too stale for any later batch (rollout.on_stale=drop)."""
        oldest = self._oldest_version()
        if oldest == self._dropped_below:  # all that were accepted since had a newer version
            return
        self._dropped_below = oldest
        for episode in [
            episode for episode in self._ledger.state.waiting.values() if 0 <= episode.min_version < oldest
        ]:
            self._producer.count_dropped(episode.num_tokens)
            self._producer.selection.dropped(episode.episode_id, "stale")
            self._ledger.reject(episode.episode_id, "stale")
            self._trace(episode.episode_id, "dropped (stale)")

    def _oldest_version(self) -> int:
        """The oldest version of a token in an episode that may be trained on; the staleness of others only grows.

        Staleness: the version that trains on it minus that of its oldest token; -1 = no generated token.
        """
        return self._ledger.state.trainer_version - self.limits.max_staleness if self._options.on_stale == "drop" else 0

    def _start(self, episode_id: int) -> None:
        loop, options = asyncio.get_running_loop(), self._options
        engine = EpisodeEngine(
            self._engine,
            self._producer.count_answer,
            may_send=self._may_send,
            keep_answers=options.keep_rejected > 0,
            temperature=self._temperature,
        )
        start_s = loop.time()
        task = loop.create_task(self._run(episode_id, engine, start_s), name=f"episode-{episode_id}")
        deadline_s = start_s + options.episode_timeout_s
        self._tasks[episode_id] = _Running(task, engine, deadline_s)
        if self._timer is None and not self._workflow.has_time_limit:
            self._timer = loop.call_at(deadline_s, self._expire)
        if options.enable_rollout_tracing:
            self._trace(episode_id, "started")

    def _trace(self, episode_id: int, what: str) -> None:
        """Log a start or an end, and how many episodes are in each state (rollout.enable_rollout_tracing)."""
        if self._options.enable_rollout_tracing:
            state = self._ledger.state
            counts = ", ".join(f"{count} {name}" for name, count in state.counts_by_name().items())
            _log.info("episode %d %s; version %d: %s", episode_id, what, state.version, counts)

    async def _run(self, episode_id: int, engine: EpisodeEngine, start_s: float) -> None:
        try:
            error: Exception | None = None
            group, verdict, stats = None, None, {}
            try:
                row = dict(self._rows.row(episode_id))  # a workflow may change its row, not the dataset
                if self._source_key in row:
                    engine.source = f"{row[self._source_key]}"
                EPISODE_ID.set(episode_id)
                with track("episode", episode_id), LoggedMetrics() as logged:
                    group = await self._workflow.arun_episode(engine, row)
                verdict = verdict_on(episode_id, group, accept=self._accept, limits=self._token_limits())
                stats = logged.means()
                if group is not None and group.stats:
                    stats |= {name: float(value) for name, value in group.stats.items()}
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by the executor, or by the loop that ends
                    return
                error = RuntimeError("the workflow cancelled itself")
            except Exception as raised:  # noqa: BLE001 - user code: an error ends this one episode
                error = raised
            running = self._tasks.get(episode_id)
            if running is None or running.engine is not engine:  # cancelled, whatever the workflow made of it
                return  # stuck, or the controller stops or runs it again: then the ledger keeps it as running
            if error is not None or verdict is None:
                assert error is not None
                self._failed(episode_id, error, engine)
            else:
                self._ended(episode_id, group, verdict, stats, engine, start_s)
            del self._tasks[episode_id]
            self._admit_next_turn()
        except Exception as error:  # noqa: BLE001 - an error of ours, for example of the ledger: it ends the run
            self._on_fatal(error)

    def _expire(self) -> None:
        """Fail the episodes that do not end, and start others in their place."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._tasks:
            episode_id, running = next(iter(self._tasks.items()))
            if running.deadline_s > loop.time():
                self._timer = loop.call_at(running.deadline_s, self._expire)
                return
            del self._tasks[episode_id]
            if self._may_send.is_set():
                self._expired(episode_id, running)
            else:  # it may have waited for the trainer
                deadline_s = loop.time() + self._options.episode_timeout_s
                self._tasks[episode_id] = running._replace(deadline_s=deadline_s)

    def _expired(self, episode_id: int, running: _Running) -> None:
        try:
            stack = waiting_stack(running.task)
            place = stack[-1] if stack else "no code that Python shows"
            text = f"episode {episode_id} has not ended in {self._options.episode_timeout_s:g} s"
            if self._num_stuck == 0:
                _log.warning("%s; it waits in:\n  %s", text, "\n  ".join(stack))
            self._num_stuck += 1
            running.task.cancel()
            self._dropped = [task for task in self._dropped if not task.done()] + [running.task]
            error = StuckEpisode(f"{text} (rollout.episode_timeout_s): it waits in {place}")
            self._failed(episode_id, error, running.engine)
            self._admit_next_turn()
        except Exception as error:  # noqa: BLE001 - an error of ours, for example of the ledger: it ends the run
            self._on_fatal(error)

    def _ended(
        self,
        episode_id: int,
        group: TrajectoryGroup | None,
        verdict: EncodedEpisode | Rejected,
        stats: dict[str, float],
        engine: EpisodeEngine,
        start_s: float,
    ) -> None:
        if group is not None and group.agent_error:
            self._producer.num_agent_errors += 1
            failure = f"the agent failed in episode {episode_id}: {group.agent_error}"
            _log.warning("%s", failure)
            self.first_failure = self.first_failure or failure
        if stats:
            self._producer.count_ended(stats)
        now_s = asyncio.get_running_loop().time()
        if isinstance(verdict, Rejected):
            self._rejected(episode_id, group, verdict, engine, now_s)
            return
        agent_error = "" if group is None else group.agent_error
        self._alarms.ended(("agent_errors",) if agent_error else (), agent_error, now_s)
        is_stale = 0 <= verdict.min_version < self._oldest_version()
        lost_by = "stale" if is_stale else TRAINED
        outcome = Outcome(lost_by, engine.num_answers, engine.num_tokens, verdict.counts.reward, engine.source)
        self._producer.selection.ended(episode_id, outcome)
        if is_stale:
            self._failures.ended(has_reward=True)
            self._producer.count_dropped(verdict.num_tokens)
            self._reject(episode_id, "stale", verdict.payload, status="dropped")
            return
        self._failures.accepted()
        self._ledger.accept(
            episode_id,
            verdict,
            stats=stats,
            seconds=now_s - start_s,
            replicas=engine.replicas,
            num_interruptions=engine.num_interruptions,
        )
        self._producer.num_accepted += 1
        episode_ended(episode_id, "accepted")
        if self._options.enable_rollout_tracing:
            self._trace(episode_id, f"accepted, reward {verdict.reward:.4g}")
        self._on_decided()

    def _rejected(
        self, episode_id: int, group: TrajectoryGroup | None, verdict: Rejected, engine: EpisodeEngine, now_s: float
    ) -> None:
        reason, agent_error = verdict.reason, "" if group is None else group.agent_error
        has_failed_agent, is_missing = reason.startswith(AGENT_ERROR), reason in MISSING_REWARDS
        signs = ["agent_errors"] * bool(agent_error) + ["missing_rewards"] * is_missing
        self._alarms.ended(signs, f"episode {episode_id}: {reason}" if is_missing else agent_error, now_s)
        self._failures.ended(has_reward=not (has_failed_agent or is_missing))
        self._producer.num_rejected += 1
        rows = [] if group is None else group.trajectories
        reward = sum(row.reward for row in rows) / len(rows) if rows and not is_missing else math.nan
        outcome = Outcome(reason.partition(":")[0], engine.num_answers, engine.num_tokens, reward, engine.source)
        self._producer.selection.ended(episode_id, outcome)
        self._reject(episode_id, reason, verdict.payload or _answers_of(episode_id, engine))
        counts = has_failed_agent or (is_missing and reason != "agent_timeout")
        self._stop(self._failures.rejected(reason, episode_id if counts else None))
        self._on_decided()

    def _reject(self, episode_id: int, reason: str, payload: bytes, status: str = "rejected") -> None:
        self._ledger.reject(episode_id, reason, payload=payload)
        episode_ended(episode_id, status, reason)
        self._trace(episode_id, f"{status} ({reason})")

    def _failed(self, episode_id: int, error: Exception, engine: EpisodeEngine) -> None:
        reason = _described(error)
        without_traceback = isinstance(error, ArealError) or self._failures.failed_in_a_row > 0
        _log.warning("episode %d failed: %s", episode_id, reason, exc_info=None if without_traceback else error)
        self._producer.num_failed += 1
        lost_by = "time_limit" if isinstance(error, StuckEpisode) else "failed"
        outcome = Outcome(lost_by, engine.num_answers, engine.num_tokens, math.nan, engine.source)
        self._producer.selection.ended(episode_id, outcome)
        is_of_agent = isinstance(error, ArealError) and error.code == "agent.failed"
        self._producer.num_agent_errors += is_of_agent
        kind = error.counted_as if isinstance(error, ArealError) else type(error).__name__
        self._ledger.fail(episode_id, reason, kind=kind, payload=_answers_of(episode_id, engine))
        self._trace(episode_id, "failed")
        episode_ended(episode_id, "failed", reason)
        self.first_failure = self.first_failure or f"episode {episode_id} failed: {reason}"
        now_s, was_held = asyncio.get_running_loop().time(), not self._may_send.is_set()
        kinds = {"agent_errors": is_of_agent, "stuck_episodes": isinstance(error, StuckEpisode)}
        kinds["invalid_numbers"] = isinstance(error, TrajectoryError)
        signs = ["failed_episodes", *(name for name, is_so in kinds.items() if is_so)]
        self._alarms.ended(signs, f"{type(self._workflow).__name__}, episode {episode_id}: {reason}", now_s)
        self._stop(self._failures.failed(episode_id, error, reason, now_s=now_s, was_held=was_held))

    def _stop(self, error: ProducerStopped | None) -> None:
        """End the run with the error, if there is one."""
        if error is not None and self.is_open:
            self.is_open = False
            self._on_fatal(error)

    def restart_running(self) -> None:
        """Cancel the running episodes; each runs again when the gate has room."""
        tasks = [running.task for running in self._tasks.values()]
        for task in tasks:
            task.cancel()
        self._dropped = [task for task in self._dropped if not task.done()] + tasks
        self._to_restart.extend(self._tasks)
        self._tasks.clear()

    async def close(self) -> None:
        """Cancel the running episodes and wait for their end. The ledger keeps them as running."""
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*(running.task for running in self._tasks.values()), *self._dropped]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:  # a workflow may ignore that it is cancelled
            await asyncio.wait(tasks, timeout=CLOSE_S)


def _answers_of(episode_id: int, engine: EpisodeEngine) -> bytes:
    """What an episode without usable trajectories generated, for readers; empty = nothing that can be recorded."""
    try:
        return encode_answers(episode_id, engine.answers)
    except TrajectoryError:
        return b""


def _described(error: Exception) -> str:
    """One line for an exception: type and text, and the line of code unless areal raised it on purpose."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ArealError):
        return text
    places = traceback.extract_tb(error.__traceback__)
    return f"{text} ({places[-1].filename}:{places[-1].lineno})" if places else text
