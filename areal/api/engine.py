"""Owns the protocols through which packages meet: training engine, generation engine, fleet, weight channel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areal.api.data import GenerationRequest, GenerationResponse, WeightSpec, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from areal.api.batch import LossFn, TokenOutputs, TrainBatch
    from areal.api.metrics import Metrics


class TrainEngine(Protocol):
    """A model with an optimiser on all trainer ranks. Knows nothing about rollouts or algorithms."""

    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    def forward(self, batch: TrainBatch) -> TokenOutputs:
        """Outputs for the whole batch in its own order, no gradient, on the CPU."""
        ...

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        """Accumulate gradients of (sum of losses over all micro-batches and ranks) / denominator."""
        ...

    def optimizer_step(self) -> Metrics:
        """Clip, step, advance the schedule, clear gradients. A gradient norm that is not finite skips the step."""
        ...

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Reduce a CPU float64 tensor over the data-parallel ranks."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by Hugging Face name, gathered one by one on every rank (a collective)."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """What `named_weights` yields, in its order, without gathering anything."""
        ...

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        """False: Hugging Face export. True: recovery state (shards and, where there are any, optimiser, schedule)."""
        ...

    def load(self, path: Path, *, with_optimizer: bool) -> None: ...
    def copy_weights(self, source: TrainEngine) -> None:
        """Take over the weights of an engine of the same backend, model and ranks, in this engine's types; no disk."""
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimiser's moments; the schedule goes on."""
        ...

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def close(self) -> None: ...


class InferenceEngine(Protocol):
    """Whatever generates: a fleet of servers, an embedded engine, a simulation."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse: ...
    @property
    def version(self) -> int: ...


class InferenceFleet(InferenceEngine, Protocol):
    """The controller's view of its replicas."""

    async def start(self) -> None:
        """Find the replicas and wait until each is healthy."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Bring every live replica to `update.version`; returns when each serves it. WeightSyncError otherwise."""
        ...

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the replicas that an update to `version` must reach, for `WeightUpdate.replicas`: alive, and not
        serving that version already."""
        ...

    def status(self) -> dict[str, Any]:
        """JSON-ready: per replica its name, address, health, version, running requests."""
        ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """What a weight channel needs of a train engine, on every rank."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `TrainEngine.named_weights`: every rank goes through to the end."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """As `TrainEngine.weight_specs`."""
        ...

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """As `TrainEngine.all_reduce`."""
        ...


class WeightChannel(Protocol):
    """The trainer's end of a weight publication. Every rank calls it; rank 0 talks to the controller."""

    def publish(self, version: int) -> None:
        """Make the engine's current weights policy `version` on every serving replica."""
        ...

    def close(self) -> None: ...
