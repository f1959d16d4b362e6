"""Runs evaluations: the evaluation workflow on the held-out rows, concurrently with the training episodes.

There is one task per (step, mode), shared by all trainer ranks that request it; it waits for answers of the fleet. A
result is durable in the ledger before any rank receives it. All ranks therefore decide by the same result, also after
a restart of the controller.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, TypeVar

from areal.api.columns import total
from areal.api.data import GenerationResponse, TrajectoryGroup, first_of_sessions
from areal.api.engine import InferenceEngine, InferenceFleet, PinnedReplica
from areal.api.errors import AgentFailed, RequestError, RewardError, ServerUnavailable
from areal.api.metrics import gather_or_cancel
from areal.api.workflow import RolloutWorkflow
from areal.ledger.ledger import Ledger
from areal.ledger.payload import check_episode
from areal.observe.log import get_logger
from areal.observe.spans import track
from areal.observe.step_files import LoggedMetrics
from areal.rollout.executor import STARTS_PER_TURN, EpisodeEngine, check_stats

# ----------------------------------------------------------------------------------------------------------------------
# Metrics over several answers to each prompt, as pure functions: mean@n, pass@k, majority vote, standard errors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One scored answer to a prompt."""

    reward: float
    answer: str | None = None
    """What it votes for; None = it has no final answer and does not vote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    stderr: float | None
    """Standard error over prompts; None with fewer than two prompts."""
    num_rows: int
    """Prompts that it is the mean of."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of n answers, drawn without replacement, contain a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1). ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct answers among {num_samples} is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_vote(samples: Sequence[Graded], correct_reward: float) -> float:
    """The share of correct answers among those that give the most frequent final answer; 0 when none votes.

    A tie counts as the mean over the tied answers: the expected result when one of them is drawn at random.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.answer is not None:
            votes[sample.answer].append(float(sample.reward >= correct_reward))
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(rewards) for rewards in votes.values() if len(rewards) == most]) if votes else 0.0


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with s / sqrt(N) as its standard error (s: sample standard deviation).

    Answers to one prompt are not independent, so the prompt is the unit (Miller 2024, arXiv 2411.00640, section 2.2).
    """
    stderr = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(mean=fmean(values), stderr=stderr, num_rows=len(values))


def default_ks(num_samples: int) -> list[int]:
    """The powers of two up to `num_samples`, and `num_samples`."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def answer_metrics(
    rows: Sequence[Sequence[Graded]], *, num_samples: int, correct_reward: float, ks: Sequence[int] = ()
) -> dict[str, Estimate]:
    """mean@n, pass@k and, for n > 1, majority@n over prompts with n answers each.

    mean@n is the mean reward; an answer is correct with at least `correct_reward`. `ks` empty = `default_ks(n)`.
    Prompts whose answers partly failed count with those they have: pass@k over prompts with at least k answers, the
    others over prompts with at least one. A metric over no prompt is left out.
    """
    measures: Mapping[str, tuple[int, Callable[[Sequence[Graded]], float]]] = {
        f"mean@{num_samples}": (1, lambda row: fmean(sample.reward for sample in row)),
        **{f"pass@{k}": (k, _PassAt(k, correct_reward)) for k in ks or default_ks(num_samples)},
        **({f"majority@{num_samples}": (1, lambda row: majority_vote(row, correct_reward))} if num_samples > 1 else {}),
    }
    metrics: dict[str, Estimate] = {}
    for name, (at_least, measure) in measures.items():
        if values := [measure(row) for row in rows if len(row) >= at_least]:
            metrics[name] = estimate(values)
    return metrics


@dataclass(frozen=True, slots=True)
class _PassAt:
    k: int
    correct_reward: float

    def __call__(self, row: Sequence[Graded]) -> float:
        num_correct = sum(sample.reward >= self.correct_reward for sample in row)
        return pass_at_k(len(row), num_correct, self.k)


_log = get_logger(__name__)
T = TypeVar("T")

MAX_FIRST_FAILURES = 8
"""An evaluation ends early when this many rows failed and none was scored."""


class EvaluationFailed(RequestError):
    """No row of an evaluation could be scored, for reasons other than unavailable servers; a retry does not help."""

    code = "rollout.evaluation_failed"


class EpisodeRejected(RewardError):
    """The workflow rejected an episode of an evaluation, so that it has no reward."""

    code = "workflow.episode_rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEpisode:
    """One answer of an evaluation: the result of one episode of the evaluation workflow."""

    group: TrajectoryGroup
    reward: float
    """Mean over the sessions, as that of a training episode."""
    num_generated: float
    """Generated tokens for each session."""
    stats: dict[str, float]
    """What the workflow and the reward functions report."""


async def evaluate_episode(
    engine: InferenceEngine,
    workflow: RolloutWorkflow,
    row: dict[str, Any],
    *,
    count_answer: Callable[[GenerationResponse], None],
) -> EvaluatedEpisode | None:
    """Run one episode on a copy of `row`; None when the workflow returns None. Raises what the episode raises, and
    RewardError when the workflow rejects it."""
    with LoggedMetrics() as logged:
        group = await workflow.arun_episode(EpisodeEngine(engine, count_answer), dict(row))
    if group is None:
        return None
    if group.rejected:
        raise EpisodeRejected(f"the workflow rejected the episode: {group.rejected}")
    check_episode(group)
    check_stats(group)
    sessions = first_of_sessions(group.trajectories)
    return EvaluatedEpisode(
        group=group,
        reward=sum(session.reward for session in sessions) / len(sessions),
        num_generated=sum(total(trajectory.loss_mask) for trajectory in group.trajectories) / len(sessions),
        stats={name: float(value) for name, value in (logged.means() | group.stats).items()},
    )


def last_answer_ids(group: TrajectoryGroup) -> Sequence[int]:
    """The tokens of the last answer of the policy in the last trajectory of a group."""
    trajectory = group.trajectories[-1]
    stop = len(trajectory.loss_mask)
    while stop and not trajectory.loss_mask[stop - 1]:
        stop -= 1
    start = stop
    while start and trajectory.loss_mask[start - 1]:
        start -= 1
    return trajectory.token_ids[start:stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutOptions:
    """How the rows of an evaluation are answered and graded."""

    num_samples: int = 1
    """Answers to each row in the mode `sampled`; the mode `greedy` has one."""
    correct_reward: float = 1.0
    answer_of: Callable[[TrajectoryGroup], str | None] = lambda group: None
    """The final answer of an episode, for the majority vote."""
    missing_reward: str = "zero"
    """evaluator.missing_reward"""


class _Results:
    """The results of one evaluation on one set of rows."""

    def __init__(self, missing_reward: str) -> None:
        """`missing_reward`: evaluator.missing_reward."""
        self._missing_reward = missing_reward
        self._scored: dict[tuple[int, int], tuple[dict[str, float], Graded]] = {}
        self._missed: list[tuple[int, int]] = []
        """Row and sample of the answers without a reward because of the agent or the workflow."""
        self.num_failed = 0
        self._last_failure = ""
        self._is_transient = False

    @property
    def num_done(self) -> int:
        return len(self._scored) + len(self._missed) + self.num_failed

    def add(self, row: int, sample: int, stats: dict[str, float], graded: Graded) -> None:
        self._scored[row, sample] = stats, graded

    def summary(self, num_samples: int, correct_reward: float) -> dict[str, float]:
        """Mean of each statistic over the answers that have it; with several samples also pass@k and more.

        Without `reward` and those metrics if the evaluation has no result (evaluator.missing_reward).
        """
        scored = {key: self._scored[key] for key in sorted(self._scored)}
        names = dict.fromkeys(name for stats, _ in scored.values() for name in stats)
        means = {name: fmean(stats[name] for stats, _ in scored.values() if name in stats) for name in names}
        missing = len(self._missed) + self.num_failed
        means |= {"num": float(len(scored)), "missing": float(missing), "answers": float(len(scored) + missing)}
        means["failed"] = float(self.num_failed)
        if missing and scored:
            means["reward_scored"] = means["reward"]
        if (self._missing_reward == "zero" and self.num_failed) or (self._missing_reward == "refuse" and missing):
            means.pop("reward", None)
            return means
        rows = self._rows()
        means["reward"] = fmean(answer.reward for answers in rows.values() for answer in answers)
        error = estimate([reward for _, reward in self.rewards()]).stderr
        means |= {} if error is None else {"reward/stderr": error}
        if num_samples > 1:
            metrics = answer_metrics([*rows.values()], num_samples=num_samples, correct_reward=correct_reward)
            for name, metric in metrics.items():
                means |= {name: metric.mean} | ({} if metric.stderr is None else {f"{name}/stderr": metric.stderr})
        return means

    def rewards(self) -> list[tuple[int, float]]:
        """Each row with the mean reward of its answers, by evaluator.missing_reward."""
        return [(row, fmean(answer.reward for answer in answers)) for row, answers in self._rows().items()]

    def _rows(self) -> dict[int, list[Graded]]:
        graded = {key: answer for key, (_, answer) in self._scored.items()}
        if self._missing_reward == "zero":
            graded |= dict.fromkeys(self._missed, Graded(reward=0.0))
        rows: dict[int, list[Graded]] = {}
        for row, sample in sorted(graded):
            rows.setdefault(row, []).append(graded[row, sample])
        return rows

    def miss(self, row: int, sample: int, reason: str) -> None:
        """Count an answer to which the agent or the workflow gave no reward."""
        self._missed.append((row, sample))
        self._last_failure, self._is_transient = reason, False

    def fail(self, reason: str, *, is_transient: bool = False) -> None:
        """Count a failed answer. Raises like `require_scored` after MAX_FIRST_FAILURES without a scored one."""
        self.num_failed += 1
        self._last_failure = reason
        self._is_transient = is_transient
        if self.num_failed >= MAX_FIRST_FAILURES:
            self.require_scored()

    def require_scored(self) -> None:
        """EvaluationFailed when none was scored; ServerUnavailable when the last one failed for lack of a server."""
        if not self._scored and not (self._missed and self._missing_reward == "zero"):
            kind = ServerUnavailable if self._is_transient else EvaluationFailed
            message = f"none of {self.num_done} held-out rows could be scored; the last failure: {self._last_failure}"
            raise kind(message, code=EvaluationFailed.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """An evaluation in progress."""

    task: asyncio.Task[None]
    results: Mapping[str, _Results]
    num_answers: int
    start_s: float


class BackgroundEvaluation(NamedTuple):
    """What a trainer learns about an evaluation that it does not wait for."""

    state: Literal["running", "ready", "missed"]
    """missed: there will be no result, because no server could keep the version, or the one that kept it is lost."""
    results: Mapping[str, Mapping[str, float]]
    """Keys are modes; empty until it is ready."""


class Evaluations:
    """The evaluations of a controller."""

    def __init__(
        self,
        *,
        fleet: InferenceFleet,
        workflows: Mapping[str, RolloutWorkflow],
        sets: Mapping[str, Sequence[dict[str, Any]]],
        options: HeldOutOptions,
        max_concurrent: int,
        count_answer: Callable[[GenerationResponse], None],
        ledger: Ledger,
    ) -> None:
        """`sets`: rows by the name of their set, which begins the names of their metrics; empty for valid_dataset."""
        self._fleet = fleet
        self._ledger = ledger
        self._workflows = workflows
        self._sets = sets
        self._options = options
        self._max_concurrent = max_concurrent
        self._count_answer = count_answer
        self._running: dict[tuple[int, str], _Running] = {}
        self._wanted: int | None = None
        """The step after which an evaluation begins in the background, once the fleet serves its version."""
        self._background: tuple[int, asyncio.Task[None]] | None = None
        """The step of the newest evaluation in the background."""

    @property
    def active(self) -> str:
        """The running evaluations and their progress, for the status; empty when none runs."""
        return ", ".join(
            f"{mode} after step {step}, {sum(result.num_done for result in evaluation.results.values())} of "
            f"{evaluation.num_answers} answers done"
            for (step, mode), evaluation in self._running.items()
            if not evaluation.task.done()
        )

    @property
    def since_s(self) -> float | None:
        """Loop time at which the oldest running evaluation started."""
        return min(
            (evaluation.start_s for evaluation in self._running.values() if not evaluation.task.done()), default=None
        )

    def check(self, mode: str) -> None:
        """RequestError when there is no such evaluation."""
        if mode not in self._workflows:
            message = f"no evaluation mode {mode!r}: this run has {sorted(self._workflows) or 'none'}"
            raise RequestError(message, code="rollout.no_such_evaluation")
        if not any(self._sets.values()):
            raise RequestError("there is no valid_dataset to evaluate on", code="rollout.no_such_evaluation")

    async def get(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """The result; None when it is not ready in time. Repeated calls join the same evaluation.

        The first call after a step starts all modes: some answers are generated while others are scored.
        """
        key = (step, mode)
        if key in self._running and self._running[key].task.cancelled():
            del self._running[key]  # cancelled because the trainer went back; now it requests the result again
        if key not in self._running and key not in self._ledger.state.evaluations:
            self._running |= {
                (step, each): self._start(step, each)
                for each in self._workflows
                if (step, each) not in self._running and (step, each) not in self._ledger.state.evaluations
            }
        if key in self._running:
            running = self._running[key]
            await asyncio.wait([running.task], timeout=timeout_s)
            if not running.task.done():
                return None
            if self._running.get(key) is running:
                del self._running[key]  # a request after an error starts it again
            if running.task.cancelled():
                return None
            running.task.result()
        return self._ledger.state.evaluations[key]

    def begin(self, step: int) -> None:
        """Begin the evaluation after `step` in the background, as soon as `served` is called with its version."""
        self.check(next(iter(self._workflows), ""))
        self._wanted = step

    def served(self, version: int) -> None:
        """The fleet serves `version`: a replica keeps it for the evaluation that is to begin, if one can be spared."""
        if self._wanted != version:
            return
        self._wanted = None
        if self._background is not None:
            before, running = self._background
            if before == version and not running.done():
                return  # the trainer was restarted from the checkpoint of this version, which a replica still keeps
            running.cancel()
        if (pinned := self._fleet.pin()) is not None:
            task = asyncio.create_task(self._evaluate_pinned(version, pinned), name=f"evaluate-{version}")
            task.add_done_callback(lambda _: pinned.release())
            self._background = version, task

    async def _evaluate_pinned(self, step: int, pinned: PinnedReplica) -> None:
        missing = [mode for mode in self._workflows if (step, mode) not in self._ledger.state.evaluations]
        await gather_or_cancel(
            [self._evaluate(step, mode, self._items(mode), self._no_results(), pinned) for mode in missing]
        )

    async def background(self, step: int, *, timeout_s: float) -> BackgroundEvaluation:
        """The state of the evaluation after `step`; waits for its end for at most `timeout_s`."""
        task = self._background[1] if self._background is not None and self._background[0] == step else None
        if task is not None:
            await asyncio.wait([task], timeout=timeout_s)
        known = self._ledger.state.evaluations
        if all((step, mode) in known for mode in self._workflows):
            return BackgroundEvaluation("ready", {mode: known[step, mode] for mode in self._workflows})
        if self._wanted == step or (task is not None and not task.done()):
            return BackgroundEvaluation("running", {})
        if task is not None and not task.cancelled() and not isinstance(task.exception(), ServerUnavailable):
            task.result()
        return BackgroundEvaluation("missed", {})

    def cancel_beyond(self, step: int) -> None:
        """Cancel running evaluations after `step`: the trainer went back and publishes `step`. Results stay."""
        if self._wanted is not None and self._wanted > step:
            self._wanted = None
        if self._background is not None and self._background[0] > step:
            self._background[1].cancel()
        for (evaluated_step, _), evaluation in self._running.items():
            if evaluated_step > step:
                evaluation.task.cancel()

    def _start(self, step: int, mode: str) -> _Running:
        loop, items, results = asyncio.get_running_loop(), self._items(mode), self._no_results()
        task = loop.create_task(self._evaluate(step, mode, items, results), name=f"evaluate-{mode}-{step}")
        return _Running(task=task, results=results, num_answers=len(items), start_s=loop.time())

    def _items(self, mode: str) -> list[tuple[str, int, int]]:
        """Set, row and sample of each answer."""
        num_samples = 1 if mode == "greedy" else self._options.num_samples
        return [
            (name, row, sample)
            for name, rows in self._sets.items()
            for row in range(len(rows))
            for sample in range(num_samples)
        ]

    def _no_results(self) -> dict[str, _Results]:
        return {name: _Results(self._options.missing_reward) for name in self._sets}

    async def _evaluate(
        self,
        step: int,
        mode: str,
        items: Sequence[tuple[str, int, int]],
        results: Mapping[str, _Results],
        pinned: PinnedReplica | None = None,
    ) -> None:
        start_s, workflow = asyncio.get_running_loop().time(), self._workflows[mode]

        async def score(item: tuple[str, int, int]) -> None:
            await self._score(pinned or self._fleet, workflow, *item, results[item[0]])

        with track("evaluation", f"{mode}-{step}"):
            await run_all(items, score, max_concurrent=self._max_concurrent)
        if pinned is not None and pinned.is_lost:
            raise ServerUnavailable(f"the server that kept version {step} is lost", code="fleet.replica_lost")
        summary, rewards = dict[str, float](), dict[str, list[tuple[int, float]]]()
        for name, result in results.items():
            result.require_scored()
            num_samples = 1 if mode == "greedy" else self._options.num_samples
            values = result.summary(num_samples, self._options.correct_reward)
            summary |= {f"{name}/{key}" if name else key: value for key, value in values.items()}
            if "reward" in values:
                rewards[name] = result.rewards()
        summary["seconds"] = asyncio.get_running_loop().time() - start_s
        self._ledger.evaluated(step=step, mode=mode, result=summary, rewards=rewards)
        await self._ledger.durable()

    async def _score(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        set_name: str,
        row: int,
        sample: int,
        results: _Results,
    ) -> None:
        """Record reward and length of one answer, or that it has none: its episode failed, or was rejected."""
        try:
            episode = await evaluate_episode(
                engine, workflow, self._sets[set_name][row], count_answer=self._count_answer
            )
            graded = episode and Graded(reward=episode.reward, answer=self._options.answer_of(episode.group))
        except Exception as error:  # noqa: BLE001 - user code: an error fails this one answer
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, AgentFailed | EpisodeRejected):
                _log.warning("held-out row %d has no reward: %s", row, reason)
                results.miss(row, sample, reason)
            else:
                _log.warning("held-out row %d failed: %s", row, reason)
                results.fail(reason, is_transient=isinstance(error, ServerUnavailable))
            return
        if episode is None or graded is None:
            results.miss(row, sample, "the workflow returned None")
            return
        stats = {f"episode/{name}": value for name, value in episode.stats.items()}
        results.add(row, sample, stats | {"reward": episode.reward, "generated": episode.num_generated}, graded)

    async def close(self) -> None:
        tasks = [evaluation.task for evaluation in self._running.values()] + (
            [self._background[1]] if self._background else []
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_all(items: Sequence[T], work: Callable[[T], Awaitable[None]], *, max_concurrent: int) -> None:
    """Call `work` for each item, in order, at most `max_concurrent` at once. The first error ends all and is raised.

    The event loop sends the first requests before it makes the last ones.
    """
    remaining = iter(items)

    async def run() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(min(max_concurrent, len(items))):
                group.create_task(run(), name=f"evaluation-worker-{index}")
                if index % STARTS_PER_TURN == STARTS_PER_TURN - 1:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
