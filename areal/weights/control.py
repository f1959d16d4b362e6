"""The parts that the weight channels share: the controller as they see it, and one attempt on all trainer ranks.

Rank 0 waits for the controller; the other ranks wait for rank 0 in a collective.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from areal.api.data import WeightUpdate
from areal.api.engine import Ranks
from areal.api.errors import WeightSyncError
from areal.observe.log import get_logger
from areal.weights.weight_files import WeightsChecksum


class FleetControl(Protocol):
    """The controller, as trainer rank 0 calls it."""

    def start_update(self, update: WeightUpdate) -> None:
        """Return when the update of the fleet has started."""
        ...

    def publish(self, update: WeightUpdate) -> None:
        """Block until the fleet serves `update.version`; joins an update that has started. Raises WeightSyncError when
        no replica could be updated."""
        ...

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach."""
        ...


def send_once(
    weights: Iterator[tuple[str, Tensor]],
    ranks: Ranks,
    version: int,
    send: Callable[[Iterator[tuple[str, Tensor]]], None],
    *,
    may_retry: bool = False,
) -> str | None:
    """One attempt: rank 0 calls `send` with the weights, the other ranks only iterate. A collective.

    Returns the checksum of the weights ("" on ranks above 0), or None on every rank when `send`
    raised WeightSyncError and `may_retry` is set. Otherwise raises on every rank: the error of `send` on rank 0,
    WeightSyncError elsewhere.
    """
    checksum = WeightsChecksum()
    error: Exception | None = None
    if ranks.rank == 0:
        weights = checksum.adding(weights)
        try:
            send(weights)
        except Exception as failure:  # noqa: BLE001 - the other ranks must be notified before it is raised
            error = failure
    for _ in weights:  # gathering is a collective: every rank iterates to the end, also after an error
        pass
    if not succeeded(ranks, version, error, may_retry=may_retry):
        return None
    return checksum.hexdigest() if ranks.rank == 0 else ""


def succeeded(ranks: Ranks, version: int, error: Exception | None, *, may_retry: bool = False) -> bool:
    """Whether rank 0, which has an `error` or None, published `version`; a collective.

    False when `may_retry` and the error is a WeightSyncError. Any other error is raised: itself on rank 0,
    WeightSyncError elsewhere.
    """
    may_retry = may_retry and isinstance(error, WeightSyncError)
    outcome = torch.tensor([1.0 if error is None else 0.5 if may_retry else 0.0], dtype=torch.float64)
    worst = ranks.all_reduce(outcome, "min").item()
    if worst == 0.0:
        message = f"rank 0 could not publish version {version}: see its log"
        raise error or WeightSyncError(message, code="weights.not_published")
    if error is not None:
        get_logger(__name__).warning("version %d could not be published, retrying: %s", version, error)
    return worst == 1.0
