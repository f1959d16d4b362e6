"""Updates the inference servers to the policy version that the ledger records.

A weight update waits until the fleet is ready and then for its replicas, each under a time limit of the fleet. All
callers that request the same update wait for one shared task.
"""

import asyncio
from collections.abc import Callable

from areal.api.data import CanaryReport, ProbeScore, ProbeTokens, WeightUpdate
from areal.api.engine import InferenceFleet
from areal.api.errors import ArealError
from areal.ledger.ledger import Ledger
from areal.observe.log import get_logger
from areal.observe.spans import track

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
        tasks = [found[1] for found in (self._task, self._comparison) if found is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
