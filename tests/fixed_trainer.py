"""A trainer whose weights are those of a model, and its line to a fleet without a controller between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future

from torch import Tensor, nn

from areal.api.data import WeightSpec, WeightUpdate
from areal.fleet.fleet import Fleet


class FixedTrainer:
    """A train engine of one rank that holds whole weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.num_gathered = 0

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.model.named_parameters():
            self.num_gathered += 1
            yield name, value

    def weight_specs(self) -> list[WeightSpec]:
        return [
            WeightSpec(name=name, shape=list(value.shape), dtype=str(value.dtype).removeprefix("torch."))
            for name, value in self.model.named_parameters()
        ]


class FleetControl:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()

    def start_update(self, update: WeightUpdate) -> None:
        return None  # `publish` does all of it

    def publish(self, update: WeightUpdate) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(self._fleet.update_weights(update), self._loop)
        future.result(timeout=250)

    def live_replicas(self, version: int) -> list[str]:
        return self._fleet.live_replicas(version)
