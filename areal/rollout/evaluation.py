"""Owns evaluations: the held-out rows through the evaluation workflow, beside the training episodes.

One task per (step, mode), shared by all who ask for it; it waits for the fleet, and nobody waits for it but the asker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import ArealError, RequestError
from areal.api.workflow import RolloutWorkflow
from areal.observe.log import get_logger
from areal.rollout.episode import EpisodeEngine
from areal.rollout.payload import encode_episode

_log = get_logger(__name__)


MAX_FIRST_FAILURES = 8
"""So many rows failed and not one scored: the evaluation ends, since the others would hardly fare better."""


class EvaluationFailed(ArealError, RuntimeError):
    """Not one row of an evaluation could be scored."""


class _Results:
    """What came of the rows of one evaluation so far."""

    def __init__(self) -> None:
        self.scored: list[dict[str, float]] = []
        self.num_failed = 0
        self._last_failure = ""

    def fail(self, reason: str) -> None:
        """Count a row that failed. EvaluationFailed when nothing but failures came."""
        self.num_failed += 1
        self._last_failure = reason
        if self.num_failed >= MAX_FIRST_FAILURES:
            self.require_scored()

    def require_scored(self) -> None:
        if not self.scored:
            raise EvaluationFailed(
                f"none of the first {self.num_failed} held-out rows could be scored; the last one: {self._last_failure}"
            )


class Evaluations:
    """The evaluations of a controller."""

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        workflows: Mapping[str, RolloutWorkflow],
        rows: Sequence[dict[str, Any]],
        max_concurrent: int,
        count_tokens: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._workflows = workflows
        self._rows = rows
        self._max_concurrent = max_concurrent
        self._count_tokens = count_tokens
        self._tasks: dict[tuple[int, str], asyncio.Task[dict[str, float]]] = {}

    @property
    def active(self) -> str:
        """What is being evaluated, for the status sentence; empty when nothing is."""
        return ", ".join(f"{mode} after step {step}" for (step, mode), task in self._tasks.items() if not task.done())

    async def get(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """The result, None when it is not there in time. Asking again joins the same evaluation."""
        if mode not in self._workflows:
            raise RequestError(f"no evaluation mode {mode!r}: this run has {sorted(self._workflows) or 'none'}")
        if not self._rows:
            raise RequestError("there is no valid_dataset to evaluate on")
        task = self._tasks.get((step, mode))
        if task is None:
            task = asyncio.create_task(self._evaluate(self._workflows[mode]), name=f"evaluate-{mode}-{step}")
            self._tasks[step, mode] = task
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return None
        if task.exception() is not None:
            self._tasks.pop((step, mode), None)  # who asks again starts it anew
        return task.result()

    async def _evaluate(self, workflow: RolloutWorkflow) -> dict[str, float]:
        began_s = asyncio.get_running_loop().time()
        positions = iter(range(len(self._rows)))
        results = _Results()

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
        scored = results.scored
        means = {
            name: sum(result[name] for result in scored if name in result)
            / sum(1 for result in scored if name in result)
            for name in {name: None for result in scored for name in result}
        }
        seconds = asyncio.get_running_loop().time() - began_s
        return means | {"num": float(len(scored)), "failed": float(results.num_failed), "seconds": seconds}

    async def _score(self, workflow: RolloutWorkflow, position: int, results: _Results) -> None:
        """Reward and length of one row; counted as failed when it failed or was rejected."""
        engine = EpisodeEngine(self._engine, self._count_tokens)
        try:
            group: TrajectoryGroup | None = await workflow.arun_episode(engine, dict(self._rows[position]))
            episode = None if group is None else encode_episode(position, group)
        except Exception as error:  # noqa: BLE001 - user code: an error leaves out this one row
            reason = f"{type(error).__name__}: {error}"
            _log.warning("held-out row %d failed: %s", position, reason)
            results.fail(reason)
            return
        if group is None or episode is None:
            results.fail("the workflow returned None")
            return
        stats = {f"episode/{name}": float(value) for name, value in group.stats.items()}
        results.scored.append(
            stats | {"reward": episode.reward, "generated": episode.num_generated / episode.num_trajectories}
        )

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
