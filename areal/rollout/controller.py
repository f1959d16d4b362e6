"""The rollout side of a run: connects gate, executor, ledger, batches, evaluations and fleet.

Everything runs on one event loop and nothing polls: when an episode ends, a trainer calls or a weight update ends,
that event calls what it may unblock. The process waits for `ended`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.api.config import PPOConfig
from areal.api.data import CanaryReport, ProbeScore, ProbeTokens, ScoredRow, TokenScores, WeightUpdate
from areal.api.engine import InferenceFleet
from areal.api.errors import ArealError, RequestError
from areal.api.workflow import AcceptFn, RolloutWorkflow
from areal.data.prompt_stream import PromptStream
from areal.ledger.ledger import Ledger
from areal.ledger.state import BatchRecord, LedgerState
from areal.observe.log import get_logger
from areal.observe.spans import track
from areal.rollout.control_requests import RunShape
from areal.rollout.evaluation import BackgroundEvaluation, Evaluations, HeldOutOptions
from areal.rollout.executor import WINDOW_BATCHES, EpisodeAlarms, Executor, ProducerStats
from areal.rollout.gate import GateLimits
from areal.rollout.selection import Selection, selection_text
from areal.rollout.share_codec import WeightsNeeded
from areal.rollout.train_batches import TrainBatches

# ----------------------------------------------------------------------------------------------------------------------
# Updates the inference servers to the policy version that the ledger records.
#
# A weight update waits until the fleet is ready and then for its replicas, each under a time limit of the fleet. All
# callers that request the same update wait for one shared task.

_log = get_logger(__name__)


class FleetWeights:
    """Runs the weight updates of a run, one at a time, and records each in the ledger."""

    def __init__(self, fleet: InferenceFleet, ledger: Ledger, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called when an update starts and when it ends, also when it fails."""
        self._fleet = fleet
        self._ledger = ledger
        self._on_change = on_change
        self.fleet_ready = asyncio.Event()
        self._task: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._comparison: tuple[ProbeScore, asyncio.Task[CanaryReport | None]] | None = None
        self._is_restoring = False
        self.updating_to: int | None = None
        """The version that the servers are receiving from the trainer."""
        self.since_s = 0.0
        """Loop time at which this update started."""
        self.has_published = False
        """A trainer published since this process started, so the version in the ledger is the trainer's."""

    async def fleet_is_ready(self, timeout_s: float) -> bool:
        """Wait for the fleet; False when it is not ready in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.fleet_ready.wait()
        except TimeoutError:
            return False
        return True

    @property
    def lowest_version(self) -> int:
        """The oldest policy version that may answer a request sent now."""
        version = self._ledger.state.version
        return version if self.updating_to is None else min(version, self.updating_to)

    @property
    def needs_trainer(self) -> bool:
        """Some replica waits for weights that only the trainer has, and no update is running."""
        is_updating = self._task is not None and not self._task[1].done()
        if is_updating or self._is_restoring or not self.fleet_ready.is_set():
            return False
        state = self._ledger.state
        is_behind = not self._fleet.version == state.version == state.trainer_version
        return is_behind or bool(self._fleet.status().get("needs_weights"))

    async def publish(self, update: WeightUpdate, *, timeout_s: float) -> bool:
        """Update the fleet to a new version. True: done. False: still running, call again. Repeated calls join.

        Raises LedgerBehind for a version that the recorded batches do not lead to.
        """
        if (self._task is None or self._task[0] != update) and not await self.start(update, timeout_s=timeout_s):
            return False
        assert self._task is not None
        task = self._task[1]
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return False
        if task.exception() is not None:
            self._task = None  # the trainer may try again
        task.result()
        return True

    async def start(self, update: WeightUpdate, *, timeout_s: float) -> bool:
        """Start an update of the fleet, after the one before; False: that is still running, call again.

        Raises LedgerBehind as `publish`.
        """
        self._ledger.state.require_version(update.version)
        if self._task is not None:
            previous, task = self._task
            if not task.done():
                if previous == update:
                    return True
                await asyncio.wait([task], timeout=timeout_s)
                return False  # the repeated call is checked against the version that is served by then
            if (error := task.exception()) is not None:  # the trainer that published it may have died
                _log.warning("the update to version %d failed: %s", previous.version, error)
        self._task = update, asyncio.create_task(self._update(update), name=f"publish-{update.version}")
        return True

    async def settled(self, timeout_s: float) -> bool:
        """Wait for the update that runs; False when it still runs."""
        if self._task is not None:
            await asyncio.wait([self._task[1]], timeout=timeout_s)
        return self._task is None or self._task[1].done()

    async def _update(self, update: WeightUpdate) -> None:
        await self.fleet_ready.wait()
        self.updating_to, self.since_s = update.version, asyncio.get_running_loop().time()
        self._on_change()
        try:
            canary: CanaryReport | None = None
            if not self._is_served(update):
                with track("weight update", str(update.version)):
                    canary = await self._fleet.update_weights(update)
            self._ledger.published(version=update.version, kind=update.kind, path=update.path, canary=canary)
            await self._ledger.durable()  # the trainer changes its weights after the answer: a restart must find this
            self.has_published = True
        finally:
            self.updating_to = None
            self._on_change()

    def _is_served(self, update: WeightUpdate) -> bool:
        """The previous controller process sent these weights but its answer was lost; its group no longer exists.

        A folder is loaded again instead, so that the fleet knows its path.
        """
        if update.is_folder or self._fleet.version != update.version:
            return False
        return not self._fleet.live_replicas(update.version)

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        """What the servers answered to the canary probe of `version`; None without an answer."""
        return self._fleet.probe_tokens(version)

    async def score(
        self, rows: Sequence[ScoredRow], *, version: int, top_k: int, limit_s: float
    ) -> list[TokenScores] | None:
        """See `areal.api.engine.InferenceFleet.score`."""
        return await self._fleet.score(rows, version=version, top_k=top_k, limit_s=limit_s)

    async def compare(self, score: ProbeScore, *, timeout_s: float) -> list[str] | None:
        """Compare the servers with the trainer. Returns the replicas that differed; None: still running, call again."""
        if self._comparison is not None and self._comparison[0] != score:  # of a trainer that died
            await asyncio.wait([self._comparison[1]], timeout=timeout_s)
            if not self._comparison[1].done():
                return None
            self._comparison = None
        if self._comparison is None:
            task = asyncio.create_task(self._fleet.compare(score), name=f"compare-{score.version}")
            self._comparison = (score, task)
        task = self._comparison[1]
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return None
        self._comparison = None
        report = task.result()
        if report is None:
            return []
        self._ledger.compared(score.version, report)
        return report.differing

    async def restore(self) -> None:
        """Update the fleet to the ledger's version, and give it the folder for replicas that join later.

        When the folder is missing or the update used a collective, the trainer must publish again (`needs_trainer`).
        Nothing is restored when the trainer has a newer version: it sends that version again, or has sent it already.
        """
        await self.fleet_ready.wait()
        state, last = self._ledger.state, self._ledger.state.last_published
        is_newest = last is not None and last["version"] == state.version == state.trainer_version
        if last is None or last["kind"] == "collective" or not is_newest:
            return
        _log.info("restoring policy version %d on the servers from %s", state.version, last["path"])
        self._is_restoring = True
        try:
            update = WeightUpdate(version=state.version, kind=last["kind"], path=last["path"])
            await self._fleet.update_weights(update)
        except ArealError as error:
            _log.warning("version %d could not be restored on the servers: %s", state.version, error)
        finally:
            self._is_restoring = False

    async def close(self) -> None:
        tasks = [pending[1] for pending in (self._task, self._comparison) if pending is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BatchUnavailable(RequestError):
    """This batch will never exist (HTTP 410)."""


class Controller:
    """The rollout side of a run. A restarted controller is rebuilt from the ledger and continues from there."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        fleet: InferenceFleet,
        workflow: RolloutWorkflow,
        rows: PromptStream[dict[str, Any]],
        ledger: Ledger,
        total_steps: int,
        eval_sets: Mapping[str, Sequence[dict[str, Any]]] | None = None,
        eval_workflows: Mapping[str, RolloutWorkflow] | None = None,
        eval_options: HeldOutOptions | None = None,
        accept: AcceptFn | None = None,
        alarms_path: Path | None = None,
    ) -> None:
        """`alarms_path`: of alarms.jsonl; None = alarms about episodes are only in the log."""
        limits, options = GateLimits.of(config, total_steps=total_steps), config.rollout
        self._fleet, self._rows, self._ledger = fleet, rows, ledger
        self._workflows = list({id(each): each for each in [workflow, *(eval_workflows or {}).values()]}.values())
        self.shape = RunShape.of(config, total_steps=total_steps)
        self._failure: Exception | None = None
        self._ended, self._failure_reported = asyncio.Event(), asyncio.Event()
        self.weights = FleetWeights(fleet, ledger, on_change=self._on_weight_update)
        self._is_attached = self._has_met_trainer = False
        self._restoring: asyncio.Task[None] | None = None
        selection = Selection(WINDOW_BATCHES * config.train_dataset.batch_size)
        self._producer = ProducerStats(selection, lambda: self._sums("pulled_bytes", "failed_deltas"))
        alarms = EpisodeAlarms(
            config.alarms.chosen(),
            alarms_path,
            batch_size=limits.batch_size,
            steps_done=lambda: ledger.state.trained_steps or 0,
            invalid_answers=self._invalid_answers,
            on_stop=self.fail,
        )
        self.batches = TrainBatches(
            ledger,
            batch_size=limits.batch_size,
            smallest_batch=limits.smallest_batch,
            max_staleness=limits.max_staleness,
            on_stale=options.on_stale,
            by_tree=self.shape.dp_size > 1 and config.actor.shared_prefixes == "tree",
            setpoint=limits.setpoint,
            producer=self._producer,
            on_fatal=self.fail,
        )
        self._executor = Executor(
            limits=limits,
            temperature=config.gconfig.temperature,
            longest_row=min(
                (model.mb_spec.max_tokens_per_mb or 2**31 for model in config.models.values()), default=2**31
            ),
            engine=fleet,
            workflow=workflow,
            rows=rows,
            ledger=ledger,
            accept=accept,
            options=options,
            source_key=config.reward.source_key,
            producer=self._producer,
            alarms=alarms,
            on_decided=self.batches.compose_if_ready,
            on_fatal=self.fail,
        )
        self._evaluations = Evaluations(
            fleet=fleet,
            workflows=eval_workflows or {},
            sets=eval_sets or {},
            options=eval_options or HeldOutOptions(),
            # as many answers as training has: an episode of an evaluation is one answer
            max_concurrent=config.max_concurrent_rollouts * config.gconfig.n_samples,
            count_answer=self._producer.count_answer,
            ledger=ledger,
        )

    def _invalid_answers(self) -> dict[str, int]:
        replicas: list[dict[str, Any]] = self._fleet.status().get("replicas", [])
        return {replica["name"]: replica.get("invalid_answers", 0) for replica in replicas}

    def _sums(self, *names: str) -> dict[str, float]:
        """Counts of the servers since this process started, over all servers."""
        replicas: list[dict[str, Any]] = self._fleet.status().get("replicas", [])
        return {name: float(sum(replica.get(name, 0) for replica in replicas)) for name in names}

    async def start(self) -> None:
        """Start writing the ledger and wait for the fleet. Episodes start once a trainer is attached."""
        for path in self._ledger.lost:
            _log.error("%s is missing: its events were lost, and the run continues from the events before them", path)
        self._ledger.start(self.fail)
        self._ledger.started(self._rows, total_steps=self.shape.total_steps)
        await self._fleet.start()
        self.weights.fleet_ready.set()
        self._update_gate()

    def _resume_with_trainer(self) -> None:
        """Continue at the ledger's position for a trainer that attached to the previous controller process.

        This waits for a call of the trainer. A restarted trainer attaches first, perhaps at an earlier step; until
        then no episode may run under, and no server may load, a version that this trainer has yet to make.
        """
        if not self._has_met_trainer and self._ledger.state.trained_steps is not None:
            self._has_met_trainer = True
            self._restoring = asyncio.create_task(self._restore(), name="restore-weights")

    async def _restore(self) -> None:
        try:
            await self.weights.restore()
            self._is_attached = True
            self._update_gate()
        except Exception as error:  # noqa: BLE001 - a background task: its error ends the run
            self.fail(error)

    def _update_gate(self) -> None:
        """Admit episodes while a trainer is attached and the fleet serves the version of the ledger.

        While a recovered trainer makes versions again that were published before, nothing is admitted and the next
        request of each running episode waits: no older policy generates a token to train on.
        """
        state, executor = self._ledger.state, self._executor
        executor.hold_requests(self._is_catching_up)
        may_start = self._has_trainer and self._fleet.version == state.version and not self._is_catching_up
        executor.is_open = may_start and not self.is_over
        if executor.is_open:
            executor.admit()

    @property
    def _has_trainer(self) -> bool:
        """The position of the trainer is known from itself, not only from the ledger of the previous process.

        A restarted trainer publishes before it attaches if its weights differ from those the servers start with.
        """
        has_published = self.weights.has_published and self._ledger.state.trained_steps is not None
        return self._is_attached or has_published

    @property
    def _is_catching_up(self) -> bool:
        return self.weights.lowest_version < self._ledger.state.highest_version

    def _on_weight_update(self) -> None:
        if self.weights.updating_to is not None:  # an older policy must not answer the remaining rows
            self._evaluations.cancel_beyond(self.weights.updating_to)
        elif self.weights.fleet_ready.is_set():
            self._evaluations.served(self._fleet.version)
        self._executor.drop_stale()
        self._update_gate()
        self.batches.compose_if_ready()  # a trainer that catches up may have reached the newest version

    def fail(self, error: Exception) -> None:
        """End the run with `error`. Trainers that wait for a batch receive it first."""
        if self._failure is None:
            self._failure = error
            self._executor.is_open = False
            self.batches.cancel_requests()
            self._ended.set()

    async def ended(self, *, report_s: float = 5.0) -> None:
        """Return when the trainers have finished. Raises the error that ended the run once a trainer received it,
        at the latest after `report_s`."""
        await self._ended.wait()
        if self._failure is not None:
            if self._ledger.state.trained_steps is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._failure_reported.wait(), report_s)
            raise self._failure

    def require_running(self) -> None:
        """Raise BatchUnavailable with the error that ended the run."""
        if self._failure is not None:
            self._failure_reported.set()
            code = self._failure.code if isinstance(self._failure, ArealError) else "rollout.stopped"
            raise BatchUnavailable(f"the rollout controller stopped: {self._failure}", code=code)

    async def attach(self, *, rank: int, world_size: int, dp_size: int, step: int, version: int) -> None:
        """A trainer rank reports its position. The first one opens the gate."""
        self.require_running()
        _log.info("trainer rank %d of %d attached at step %d, policy version %d", rank, world_size, step, version)
        if step > 0 and self._ledger.state.trained_steps is None:
            _log.warning("the ledger is new, but the trainer is at step %d: rows of earlier steps are used again", step)
        if rank == 0 or not self._is_attached or self._ledger.state.trained_steps != step:
            is_lost = version < self._ledger.state.highest_version and not self._ledger.state.batches
            self._ledger.attached(step=step, version=version)
            if is_lost:
                self._executor.restart_running()  # no recorded batch leads to the version these episodes wait for
            self._has_met_trainer = self._is_attached = True
            self.batches.cancel_requests(beyond=step)
            await self._ledger.durable()
        self._update_gate()
        self.batches.compose_if_ready()

    async def next_batch(self, step: int, *, timeout_s: float) -> BatchRecord | None:
        """The composition of batch `step`, durable with its payloads; None = not ready, call again.

        Raises BatchUnavailable when it will never be ready, WeightsNeeded when the trainer must publish first.
        """
        self.require_running()
        if step >= self.shape.total_steps:
            raise BatchUnavailable(
                f"step {step} is after the end of the run, which has {self.shape.total_steps} steps",
                code="rollout.past_the_end",
            )
        self._ledger.state.require_reached(step)
        self._resume_with_trainer()
        if step not in self._ledger.state.batches:
            self._require_weights()
        record = await self.batches.get(step, timeout_s=timeout_s)
        self._executor.admit()  # a batch leaves room in the queue, and moves the set-point of staleness
        if record is None:
            self.require_running()
            self._require_weights()
        return record

    def _require_weights(self) -> None:
        """Raise WeightsNeeded while a server waits for weights that only the trainers can send."""
        if self._has_trainer and self.weights.needs_trainer:
            raise WeightsNeeded(f"a server waits for policy version {self._ledger.state.trainer_version}")

    async def live_replicas(self, version: int, *, timeout_s: float) -> list[str] | None:
        """Ids of the replicas that an update to `version` must reach; None = the fleet is not ready, call again.

        Empty: all live replicas have it, or none is alive. An update to no replica then succeeds or fails accordingly.
        """
        self.require_running()
        if not await self.weights.fleet_is_ready(timeout_s):
            return None
        return self._fleet.live_replicas(version)

    async def consumed(self, step: int, version: int, weights_checksum: str = "", *, ess: float | None = None) -> None:
        """The trainer has trained on batch `step` and sent `version`, which the fleet may be installing."""
        self._ledger.state.require_batch(step, version)
        self._ledger.consumed(step=step, version=version, weights=weights_checksum, ess=ess)
        self._executor.drop_stale()
        await self._ledger.durable()
        self._resume_with_trainer()
        self._executor.admit()
        self.batches.compose_if_ready()

    async def evaluate(self, step: int, mode: str, *, timeout_s: float) -> dict[str, float] | None:
        """Result of the evaluation after `step` train steps; None = not ready, call again.

        It runs only under the trainer's weights; raises WeightsNeeded when the trainer must publish them first.
        """
        self.require_running()
        self._evaluations.check(mode)
        self._ledger.state.require_reached(step)
        if (step, mode) not in self._ledger.state.evaluations:
            self._resume_with_trainer()
            if not await self.weights.fleet_is_ready(timeout_s):
                return None
            if self._restoring is not None:
                await asyncio.wait([self._restoring], timeout=timeout_s)
                if not self._restoring.done():
                    return None
            if not await self.weights.settled(timeout_s):
                return None
            self._require_weights()
        result = await self._evaluations.get(step, mode, timeout_s=timeout_s)
        if result is None:
            self.require_running()
            self._require_weights()
        return result

    async def background_evaluation(self, step: int, *, begins: bool, timeout_s: float) -> BackgroundEvaluation:
        """The state of the evaluation after `step` train steps, on one replica that keeps its version.

        `begins`: this is the newest step, and the evaluation is to begin.
        """
        self.require_running()
        self._resume_with_trainer()
        if begins:
            self._evaluations.begin(step)
            if self.weights.updating_to is None and self.weights.fleet_ready.is_set():
                self._evaluations.served(self._fleet.version)
        return await self._evaluations.background(step, timeout_s=timeout_s)

    async def committed(self, step: int, path: str) -> None:
        """A recovery checkpoint after `step` train steps is complete."""
        self._ledger.state.require_reached(step)
        if self._ledger.state.committed_step != step:  # otherwise a repeated call
            self._ledger.committed(step=step, path=path)
        await self._ledger.durable()
        await self._ledger.prune()
        self._resume_with_trainer()

    @property
    def state(self) -> LedgerState:
        """The state of the run as its ledger records it."""
        return self._ledger.state

    @property
    def is_over(self) -> bool:
        """The trainers have finished, or an error ended the run."""
        return self._ended.is_set()

    def finish(self) -> None:
        """The trainers are done, or a signal stops this process: `ended` returns."""
        self._ended.set()

    async def close(self) -> None:
        """Stop episodes and evaluations, flush the ledger, close workflows and the fleet."""
        self._ended.set()
        self.batches.cancel_requests()
        await self.batches.close()
        await self._executor.close()
        await self._evaluations.close()
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        await self.weights.close()
        try:
            await self._ledger.close()
        finally:
            for workflow in self._workflows:
                await workflow.aclose()
            await self._fleet.close()

    def episodes(self) -> dict[str, Any]:
        """The numbers of episodes by state and reason, and the first failure, JSON-ready."""
        state, first = self._ledger.state, self._executor.first_failure
        selection = selection_text(self._producer.selection.stats())
        return {**state.episodes(), "first_failure": first, "selection": selection}

    def status(self) -> dict[str, Any]:
        """The state of the run, JSON-ready."""
        state, last, now_s = self._ledger.state, self.batches.last, asyncio.get_running_loop().time()
        stats, since_s = last.stats if last else {}, self._waiting_since_s()
        return {
            "step": state.trained_steps or 0,
            "newest_step": state.newest_step,
            "total_steps": self.shape.total_steps,
            "version": state.version,
            "highest_version": state.highest_version,
            "catching_up": self._is_catching_up,
            "updating_to": self.weights.updating_to,
            **self.episodes(),
            "accepted": state.num_accepted,
            "staleness_mean": stats.get("staleness_mean"),
            "staleness_max": stats.get("staleness_max"),
            "reward_mean": stats.get("reward"),
            "generated_tokens": self._producer.generated_tokens,
            "tokens_per_s": self._producer.tokens_per_s(now_s),
            "replicas": self._fleet.status(),
            "waiting_for": self.waiting_for(),
            "awaited": self._awaited(),
            "gate_closed_because": self._why_closed(),
            "rewards": self._rewards(),
            "waiting_since_s": None if since_s is None else now_s - since_s,
        }

    def waiting_for(self) -> str:
        """One sentence on what the run waits for, why the gate is closed, and which servers do not serve."""
        fleet, version = self._fleet.status(), self.weights.updating_to
        if version is None:
            version = self._ledger.state.version
        closed = self._why_closed()
        parts = [self._awaited(), closed and f"no episode starts because {closed}", self._rewards()]
        if self._failure is None and self._has_trainer:
            behind = ", ".join(
                f"{replica['name']} (version {replica['version']}) is {replica['state']}"
                + (f": {replica['reason']}" if replica["reason"] else "")
                for replica in fleet.get("replicas", [])
                if replica["state"] != "serving" or replica["version"] != version
            )
            cause = fleet.get("waiting_for", "")
            parts += [behind and f"not serving version {version}: {behind}", cause and f"requests wait for {cause}"]
        return "; ".join(part for part in parts if part)

    def _awaited(self) -> str:
        state = self._ledger.state
        if self._failure is not None:
            return f"the end of the run: {self._failure}"
        if self.weights.updating_to is not None:
            return f"the servers to load policy version {self.weights.updating_to}"
        if self._restoring is not None and not self._restoring.done():
            return f"the servers to load the trainer's policy version {state.version}"
        if self._evaluations.active:
            return f"the evaluation: {self._evaluations.active}"
        step = self.batches.wanted_step
        if step is not None:
            accepted = f"{len(state.waiting)} of {self._rows.batch_size} episodes accepted"
            return f"batch {step}: {accepted}, {len(state.running)} running"
        return "the trainer" if self._has_trainer else "a trainer to attach"

    def _why_closed(self) -> str:
        """Why no episode may start; empty while one may."""
        state = self._ledger.state
        if self._failure is not None or not self._has_trainer:
            return ""
        if self._is_catching_up:
            return (
                f"the trainer recovered at version {self.weights.lowest_version} and "
                f"has to reach version {state.highest_version} again"
            )
        if self._fleet.version != state.version and self.weights.updating_to is None:
            return f"the servers hold policy version {self._fleet.version}, not {state.version}"
        return self._executor.why_closed()

    def _rewards(self) -> str:
        """The reward calls that bound the run; empty when they do not."""
        return next((text for workflow in self._workflows if (text := workflow.waits_for())), "")

    def _waiting_since_s(self) -> float | None:
        """Loop time at which the current wait started, if known."""
        if self.weights.updating_to is not None:
            return self.weights.since_s
        if self._evaluations.active:
            return self._evaluations.since_s
        step = self.batches.wanted_step
        return None if step is None else self.batches.waiting_since_s(step)
