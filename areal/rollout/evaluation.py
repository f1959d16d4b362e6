"""Owns evaluations: the held-out rows through the evaluation workflow, beside the training episodes.

One task per (step, mode), shared by all who ask for it; it waits for the fleet, and nobody waits for it but the asker.
A result is in the ledger before anybody hears of it: trainer ranks decide by it, so all must get the same one, also
those that ask again after this process died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.api.data import TrajectoryGroup
from areal.api.engine import InferenceEngine
from areal.api.errors import RequestError, ServerUnavailable
from areal.api.workflow import RolloutWorkflow
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode
from areal.observe.log import get_logger
from areal.rollout.episode import EpisodeEngine, check_stats

_log = get_logger(__name__)


MAX_FIRST_FAILURES = 8
"""So many rows failed and not one scored: the evaluation ends, since the others would hardly fare better."""


class EvaluationFailed(RequestError):
    """Not one row of an evaluation could be scored, and not for want of servers: asking again is useless."""


class _Results:
    """What came of the rows of one evaluation so far."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.scored: list[dict[str, float]] = []
        self.num_failed = 0
        self._last_failure = ""
        self._is_transient = False

    @property
    def num_done(self) -> int:
        return len(self.scored) + self.num_failed

    def summary(self, now_s: float) -> dict[str, float]:
        """Means over the scored rows, each name over those that have it."""
        means = {
            name: sum(result[name] for result in self.scored if name in result)
            / sum(1 for result in self.scored if name in result)
            for name in {name: None for result in self.scored for name in result}
        }
        seconds = now_s - self.began_s
        return means | {"num": float(len(self.scored)), "failed": float(self.num_failed), "seconds": seconds}

    def fail(self, reason: str, *, is_transient: bool = False) -> None:
        """Count a row that failed. EvaluationFailed or ServerUnavailable when nothing but failures came."""
        self.num_failed += 1
        self._last_failure = reason
        self._is_transient = is_transient
        if self.num_failed >= MAX_FIRST_FAILURES:
            self.require_scored()

    def require_scored(self) -> None:
        if not self.scored:
            kind = ServerUnavailable if self._is_transient else EvaluationFailed
            raise kind(
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
        ledger: Ledger,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._workflows = workflows
        self._rows = rows
        self._max_concurrent = max_concurrent
        self._count_tokens = count_tokens
        self._tasks: dict[tuple[int, str], tuple[asyncio.Task[None], _Results]] = {}

    @property
    def active(self) -> str:
        """What is being evaluated and how far, for the status sentence; empty when nothing is."""
        return ", ".join(
            f"{mode} after step {step}, {results.num_done} of {len(self._rows)} rows done"
            for (step, mode), (task, results) in self._tasks.items()
            if not task.done()
        )

    @property
    def since_s(self) -> float | None:
        """Loop time at which the oldest evaluation under way began."""
        return min((results.began_s for task, results in self._tasks.values() if not task.done()), default=None)

    def check(self, mode: str) -> None:
        """RequestError when there is no such evaluation."""
        if mode not in self._workflows:
            raise RequestError(f"no evaluation mode {mode!r}: this run has {sorted(self._workflows) or 'none'}")
        if not self._rows:
            raise RequestError("there is no valid_dataset to evaluate on")

    async def get(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """The result, None when it is not there in time. Asking again joins the same evaluation."""
        key = (step, mode)
        if key in self._tasks and self._tasks[key][0].cancelled():
            del self._tasks[key]  # asked for by a trainer that went back, and now again
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
                del self._tasks[key]  # who asks again after an error starts it anew
            if task.cancelled():
                return None
            task.result()
        return self._ledger.state.evaluations[key]

    def cancel_beyond(self, step: int) -> None:
        """The servers get the weights of `step`: who asked for later evaluations has gone back. Results stay."""
        for (asked_after, _), (task, _) in self._tasks.items():
            if asked_after > step:
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
        """Reward and length of one row; counted as failed when it failed or was rejected."""
        engine = EpisodeEngine(self._engine, self._count_tokens)
        try:
            group: TrajectoryGroup | None = await workflow.arun_episode(engine, dict(self._rows[position]))
            episode = None if group is None else encode_episode(position, group)
            if group is not None:
                check_stats(group)
        except Exception as error:  # noqa: BLE001 - user code: an error leaves out this one row
            reason = f"{type(error).__name__}: {error}"
            _log.warning("held-out row %d failed: %s", position, reason)
            results.fail(reason, is_transient=isinstance(error, ServerUnavailable))
            return
        if group is None or episode is None:
            results.fail("the workflow returned None")
            return
        stats = {f"episode/{name}": float(value) for name, value in group.stats.items()}
        results.scored.append(
            stats | {"reward": episode.reward, "generated": episode.num_generated / episode.num_trajectories}
        )

    async def close(self) -> None:
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
