"""Owns what a weight channel needs of others: the controller it talks to, and the agreement of the trainer ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from areal.api.data import WeightUpdate
from areal.api.engine import WeightSource
from areal.api.errors import WeightSyncError


class PublishControl(Protocol):
    """The trainer's line to the controller's fleet."""

    def publish(self, update: WeightUpdate) -> None:
        """Block until the fleet serves the update. WeightSyncError when no replica could take it in."""
        ...

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach (`Fleet.live_replicas`)."""
        ...


def agree(engine: WeightSource, error: BaseException | None, version: int, *, may_retry: bool = False) -> bool:
    """Settle one attempt on all ranks: True = done, False = try again. A collective, and so a barrier too.

    Otherwise raises on every rank: rank 0's own error there, a WeightSyncError on the others.
    """
    well = 1.0 if error is None else 0.5 if may_retry else 0.0
    worst = engine.all_reduce(torch.tensor([well], dtype=torch.float64), "min").item()
    if worst == 0.0:
        raise error or WeightSyncError(f"rank 0 could not publish version {version}: see its log")
    return worst == 1.0
