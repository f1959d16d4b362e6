"""Owns what the fleet serves against what the ledger says: publications, and the way back to the ledger's version.

A publication waits for the fleet to be ready and then for its replicas, each under a time limit of the fleet. Callers
wait for one shared task per update, so a repeated call joins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal.api.data import WeightUpdate
from areal.api.engine import InferenceFleet
from areal.api.errors import ArealError
from areal.ledger.ledger import Ledger
from areal.observe.log import get_logger

_log = get_logger(__name__)


class Publications:
    """The policy versions of a run on their way to the fleet."""

    def __init__(self, fleet: InferenceFleet, ledger: Ledger, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a publication begins and when it ends, well or not."""
        self._fleet = fleet
        self._ledger = ledger
        self._on_change = on_change
        self._fleet_ready = asyncio.Event()
        self._task: tuple[WeightUpdate, asyncio.Task[None]] | None = None
        self._is_restoring = False
        self.publishing: int | None = None
        """The version that the servers are taking in for the trainer."""
        self.since_s = 0.0
        """Loop time at which that began."""
        self.has_published = False
        """A trainer published while this process lived, so the ledger's version is the trainer's."""

    def begin(self) -> None:
        """The fleet is ready: do what was asked meanwhile."""
        self._fleet_ready.set()

    async def fleet_is_ready(self, timeout_s: float) -> bool:
        """Wait for the fleet; False when it is not ready in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._fleet_ready.wait()
        except TimeoutError:
            return False
        return True

    @property
    def lowest_version(self) -> int:
        """The oldest policy under which a request sent now may be answered."""
        version = self._ledger.state.version
        return version if self.publishing is None else min(version, self.publishing)

    @property
    def needs_trainer(self) -> bool:
        """Some replica waits for weights that only the trainer has, and no publication is under way."""
        if self.publishing is not None or self._is_restoring or not self._fleet_ready.is_set():
            return False
        return self._fleet.version != self._ledger.state.version or bool(self._fleet.status().get("needs_publication"))

    async def publish(self, update: WeightUpdate, *, timeout_s: float) -> bool:
        """Bring the fleet to a new version; True when done, False = not yet, ask again. Repeated calls join."""
        if self._task is not None and self._task[0] != update:
            before, task = self._task
            await asyncio.wait([task], timeout=timeout_s)
            if not task.done():
                return False
            if (error := task.exception()) is not None:  # who asked for it may be gone
                _log.warning("version %d was not published: %s", before.version, error)
        if self._task is None or self._task[0] != update:
            task = asyncio.create_task(self._publish(update), name=f"publish-{update.version}")
            self._task = (update, task)
        task = self._task[1]
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            return False
        if task.exception() is not None:
            self._task = None  # the trainer may try again
        task.result()
        return True

    async def _publish(self, update: WeightUpdate) -> None:
        await self._fleet_ready.wait()
        self.publishing, self.since_s = update.version, asyncio.get_running_loop().time()
        self._on_change()
        try:
            if not self._is_served(update):
                await self._fleet.update_weights(update)
            self._ledger.published(version=update.version, kind=update.kind, path=update.path)
            await self._ledger.durable()  # the trainer goes on from the answer: a successor of this process must know
            self.has_published = True
        finally:
            self.publishing = None
            self._on_change()

    def _is_served(self, update: WeightUpdate) -> bool:
        """A predecessor of this process sent these weights, but its answer was lost: the group it made is gone.

        A folder is loaded again instead, so that the fleet knows it.
        """
        if update.kind == "disk" or self._fleet.version != update.version:
            return False
        return not self._fleet.live_replicas(update.version)

    async def restore(self) -> None:
        """Bring the fleet back to the ledger's version, and let it know the folder for replicas that come later.

        Where the folder is gone or there was none, the trainer is asked to publish again (`needs_trainer`).
        """
        await self._fleet_ready.wait()
        state, last = self._ledger.state, self._ledger.state.last_publication
        if last is None or last["kind"] != "disk" or last["version"] != state.version:
            return
        _log.info("the servers are to hold policy version %d, from %s", state.version, last["path"])
        self._is_restoring = True
        try:
            await self._fleet.update_weights(WeightUpdate(version=state.version, kind="disk", path=last["path"]))
        except ArealError as error:
            _log.warning("the servers could not go back to version %d: %s", state.version, error)
        finally:
            self._is_restoring = False

    async def close(self) -> None:
        if self._task is not None:
            self._task[1].cancel()
            await asyncio.gather(self._task[1], return_exceptions=True)
