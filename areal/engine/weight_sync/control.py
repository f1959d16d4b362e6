"""Owns what a weight channel needs of others: the controller it talks to, and the agreement of the trainer ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from areal.api.data import WeightUpdate
from areal.api.engine import TrainEngine
from areal.api.errors import WeightSyncError


class PublishControl(Protocol):
    """The trainer's line to the controller's fleet."""

    def publish(self, update: WeightUpdate) -> None:
        """Block until the fleet serves the update. WeightSyncError when no replica could take it in."""
        ...

    def live_replicas(self) -> list[str]:
        """Ids of the replicas that a collective update can reach now (`Fleet.live_replicas`)."""
        ...


def raise_together(engine: TrainEngine, error: BaseException | None, version: int) -> None:
    """Raise on every rank when rank 0 failed: its own error there, a WeightSyncError on the others. A collective."""
    if not all_well(engine, error is None):
        raise error or WeightSyncError(f"rank 0 could not publish version {version}: see its log")


def all_well(engine: TrainEngine, well: bool) -> bool:
    """Whether every rank says it is well. A collective, and so a barrier too."""
    flag = torch.tensor([1.0 if well else 0.0], dtype=torch.float64)
    return bool(engine.all_reduce(flag, "min").item())
