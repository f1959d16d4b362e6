"""Runs evaluations: the evaluation workflow on the held-out rows, concurrently with the training episodes.

There is one task per (step, mode), shared by all trainer ranks that request it; it waits for answers of the fleet. A
result is durable in the ledger before any rank receives it. All ranks therefore decide by the same result, also after
a restart of the controller.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from areal.api.data import GenerationResponse, TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import RequestError, ServerUnavailable
from areal.api.workflow import RolloutWorkflow
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode
from areal.observe.episode_metrics import logged_metrics
from areal.observe.log import get_logger
from areal.rollout.episode import EpisodeEngine, check_stats

_log = get_logger(__name__)

MAX_FIRST_FAILURES = 8
"""An evaluation ends early when this many rows failed and none was scored."""


class EvaluationFailed(RequestError):
    """No row of an evaluation could be scored, for reasons other than unavailable servers; a retry does not help."""

    code = "rollout.evaluation_failed"


class _Results:
    """The results of one evaluation, by row."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.scored: list[dict[str, float]] = []
        self.num_failed = 0
        self._last_failure = ""
        self._is_transient = False

    @property
    def num_done(self) -> int:
        return len(self.scored) + self.num_failed

    def summary(self, now_s: float) -> dict[str, float]:
        """Mean of each statistic over the scored rows that have it."""
        names = dict.fromkeys(name for result in self.scored for name in result)
        means = {name: fmean(result[name] for result in self.scored if name in result) for name in names}
        seconds = now_s - self.start_s
        return means | {"num": float(len(self.scored)), "failed": float(self.num_failed), "seconds": seconds}

    def fail(self, reason: str, *, is_transient: bool = False) -> None:
        """Count a failed row. Raises like `require_scored` after MAX_FIRST_FAILURES rows without a scored one."""
        self.num_failed += 1
        self._last_failure = reason
        self._is_transient = is_transient
        if self.num_failed >= MAX_FIRST_FAILURES:
            self.require_scored()

    def require_scored(self) -> None:
        """EvaluationFailed when no row was scored; ServerUnavailable when the last one failed for lack of a server."""
        if not self.scored:
            kind = ServerUnavailable if self._is_transient else EvaluationFailed
            message = f"none of {self.num_failed} held-out rows could be scored; the last failure: {self._last_failure}"
            raise kind(message, code=EvaluationFailed.code)


class Evaluations:
    """The evaluations of a controller."""

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        workflows: Mapping[str, RolloutWorkflow],
        rows: Sequence[dict[str, Any]],
        max_concurrent: int,
        count_answer: Callable[[GenerationResponse], None],
        ledger: Ledger,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._workflows = workflows
        self._rows = rows
        self._max_concurrent = max_concurrent
        self._count_answer = count_answer
        self._tasks: dict[tuple[int, str], tuple[asyncio.Task[None], _Results]] = {}

    @property
    def active(self) -> str:
        """The running evaluations and their progress, for the status; empty when none runs."""
        return ", ".join(
            f"{mode} after step {step}, {results.num_done} of {len(self._rows)} rows done"
            for (step, mode), (task, results) in self._tasks.items()
            if not task.done()
        )

    @property
    def since_s(self) -> float | None:
        """Loop time at which the oldest running evaluation started."""
        return min((results.start_s for task, results in self._tasks.values() if not task.done()), default=None)

    def check(self, mode: str) -> None:
        """RequestError when there is no such evaluation."""
        if mode not in self._workflows:
            message = f"no evaluation mode {mode!r}: this run has {sorted(self._workflows) or 'none'}"
            raise RequestError(message, code="rollout.no_such_evaluation")
        if not self._rows:
            raise RequestError("there is no valid_dataset to evaluate on", code="rollout.no_such_evaluation")

    async def get(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """The result; None when it is not ready in time. Repeated calls join the same evaluation."""
        key = (step, mode)
        if key in self._tasks and self._tasks[key][0].cancelled():
            del self._tasks[key]  # cancelled because the trainer went back; now it requests the result again
        if key not in self._tasks and key not in self._ledger.state.evaluations:
            results = _Results(asyncio.get_running_loop().time())
            evaluating = self._evaluate(step, mode, results)
            self._tasks[key] = asyncio.create_task(evaluating, name=f"evaluate-{mode}-{step}"), results
        if key in self._tasks:
            task, results = self._tasks[key]
            await asyncio.wait([task], timeout=timeout_s)
            if not task.done():
                return None
            if self._tasks.get(key) == (task, results):
                del self._tasks[key]  # a request after an error starts it again
            if task.cancelled():
                return None
            task.result()
        return self._ledger.state.evaluations[key]

    def cancel_beyond(self, step: int) -> None:
        """Cancel running evaluations after `step`: the trainer went back and publishes `step`. Results stay."""
        for (evaluated_step, _), (task, _) in self._tasks.items():
            if evaluated_step > step:
                task.cancel()

    async def _evaluate(self, step: int, mode: str, results: _Results) -> None:
        workflow = self._workflows[mode]
        positions = iter(range(len(self._rows)))

        async def work() -> None:
            for position in positions:
                await self._score(workflow, position, results)

        num_workers = min(self._max_concurrent, len(self._rows))
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(num_workers):
                    group.create_task(work(), name=f"evaluation-worker-{index}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results.require_scored()
        self._ledger.evaluated(step=step, mode=mode, result=results.summary(asyncio.get_running_loop().time()))
        await self._ledger.durable()

    async def _score(self, workflow: RolloutWorkflow, position: int, results: _Results) -> None:
        """Record reward and length of one row, or a failure when its episode failed or returned None."""
        engine = EpisodeEngine(self._engine, self._count_answer)
        try:
            with logged_metrics() as logged:
                group: TrajectoryGroup | None = await workflow.arun_episode(engine, dict(self._rows[position]))
            episode = None if group is None else encode_episode(position, group)
            if group is not None:
                check_stats(group)
        except Exception as error:  # noqa: BLE001 - user code: an error fails this one row
            reason = f"{type(error).__name__}: {error}"
            _log.warning("held-out row %d failed: %s", position, reason)
            results.fail(reason, is_transient=isinstance(error, ServerUnavailable))
            return
        if group is None or episode is None:
            results.fail("the workflow returned None")
            return
        stats = {f"episode/{name}": float(value) for name, value in (logged.means() | group.stats).items()}
        results.scored.append(
            stats | {"reward": episode.reward, "generated": episode.num_generated / episode.num_trajectories}
        )

    async def close(self) -> None:
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
