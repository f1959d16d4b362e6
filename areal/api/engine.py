"""Protocols between packages: train engine, inference engine, fleet, weight channel."""

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
        """Clear the moments of the optimiser; the learning-rate schedule continues."""
        ...

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def close(self) -> None: ...


class InferenceEngine(Protocol):
    """Generates answers: a fleet of servers, an embedded engine, or a simulation."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse: ...
    @property
    def version(self) -> int: ...


class InferenceFleet(InferenceEngine, Protocol):
    """The controller's view of its replicas."""

    async def start(self) -> None:
        """Find the replicas and wait until each is healthy."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Update every live replica to `update.version` and wait until each serves it. Raises WeightSyncError."""
        ...

    def live_replicas(self, version: int) -> list[str]:
        """Names of the replicas that need an update to `version` (for `WeightUpdate.replicas`): alive, at another
        version."""
        ...

    def status(self) -> dict[str, Any]:
        """State of the fleet for JSON: name, address, health, version and running requests of every replica."""
        ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """The part of a train engine that a weight channel uses, on every rank."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `TrainEngine.named_weights`: every rank iterates to the end."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """As `TrainEngine.weight_specs`."""
        ...

    def all_reduce(self, values: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """As `TrainEngine.all_reduce`."""
        ...


class WeightChannel(Protocol):
    """Publishes the trainer's weights. Every rank calls it; rank 0 communicates with the controller."""

    def publish(self, version: int) -> None:
        """Install the engine's current weights as policy `version` on every serving replica."""
        ...

    def close(self) -> None: ...
