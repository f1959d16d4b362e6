"""Protocols between packages: train engine, trainer ranks, inference engine, fleet, weight channel."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areal.api.data import (
    CanaryReport,
    GenerationRequest,
    GenerationResponse,
    ProbeScore,
    ProbeTokens,
    ScoredRow,
    TokenChunk,
    TokenScores,
    WeightSpec,
    WeightUpdate,
)
from areal.api.errors import RequestError
from areal.api.metrics import gather_or_cancel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from areal.api.batch import LossFn, TokenOutputs, TrainBatch
    from areal.api.metrics import Metrics

ReduceOp = Literal["sum", "max", "min"]
ModelRole = Literal["actor", "ref", "critic", "reward"]
"""What a model computes. actor and ref: log-probabilities. critic: `TokenOutputs.values`. reward:
`TokenOutputs.scores` of a model with the same head as a critic."""


class Ranks(Protocol):
    """All trainer ranks, as one of them sees them. Decisions that every rank must take alike are agreed here."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU float64 tensor over all trainer ranks; the argument is unchanged. A barrier too."""
        ...

    def gather(self, content: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        """On rank 0 the contents [n_r], n_r > 0, of the other ranks in their order, one at a time; elsewhere nothing.
        A collective: rank 0 iterates to the end."""
        ...

    def for_thread(self) -> Ranks:
        """The same ranks for the collectives of one other thread, apart from those of this object; a collective."""
        ...


class WeightSource(Protocol):
    """The part of a train engine that a weight channel reads."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by Hugging Face name, gathered one by one; tied weights once. Every rank iterates to the end."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """Describe what `named_weights` yields, in its order, without communication."""
        ...


class AdapterSource(WeightSource, Protocol):
    """The LoRA adapters of a train engine, by the names of peft."""

    def write(self, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write `named_weights`, gathered by all ranks, as a folder that peft and the servers load; on one rank."""
        ...


class StagedState(Protocol):
    """One rank's part of an engine's recovery state, which may be written while the engine trains."""

    def write(self, folder: Path) -> Mapping[str, int]:
        """Write this rank's files into an existing folder and sync them to disk; returns CRC-32 by name.

        The folder is shared by all ranks, with other names on each. No collective: a thread calls it. Raises OSError.
        """
        ...


class TrainEngine(WeightSource, Protocol):
    """A model, with an optimiser if it is trained, on all trainer ranks. Knows nothing about rollouts or algorithms.

    Ranks with the same `dp_rank` form one data-parallel rank: they hold the same share of every batch. Every method is
    a collective over all trainer ranks unless it says otherwise.
    """

    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    def all_reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a CPU float64 tensor over the data-parallel ranks: each share of the batch counts once."""
        ...

    def forward(self, batch: TrainBatch, *, with_adapters: bool = True) -> TokenOutputs:
        """Compute the outputs of the whole batch in its own order, without gradients, on the CPU.

        `with_adapters` false: those of the base model, if this model has adapters.
        """
        ...

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, denominator: float) -> Metrics:
        """Accumulate gradients of (sum of losses over all micro-batches and data-parallel ranks) / denominator."""
        ...

    def optimizer_step(self) -> Metrics:
        """Clip, step, advance the schedule, clear gradients.

        Raises TrainingDiverged on every rank when a loss, a gradient or an updated weight of any rank is not finite.
        """
        ...

    def reset_optimizer(self) -> None:
        """Clear the optimiser's moments; the schedule continues. Local."""
        ...

    def named_weights(self, *, stored: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights, as in `WeightSource`; `stored`: in the type that the optimiser updates, for exact copies."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full weights by Hugging Face name into the model, in this engine's types.

        Accepts `named_weights` of an engine of any class. Names that the model does not have are ignored. Raises
        InputError when a weight of the model is missing or has another shape; other weights may be copied by then.
        """
        ...

    def save(self, path: Path, *, with_optimizer: bool) -> None:
        """False: Hugging Face checkpoint. True: recovery state (weights and, if any, optimiser and schedule).

        Raises InputError on every rank when one cannot write; `path` then does not exist.
        """
        ...

    def stage(self, *, copies: bool) -> StagedState:
        """The recovery state, to be written into a folder. Local.

        `copies`: in host memory, which the next call uses again, so that this engine may train before it is written.
        """
        ...

    def load(self, path: Path) -> None:
        """Continue from recovery state in a folder, of any number of ranks in any mesh. Raises InputError otherwise."""
        ...


class InferenceEngine(Protocol):
    """Anything that generates: a fleet of servers, an embedded engine, a simulation."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResponse: ...
    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same answer, token by token as far as the engine knows it earlier. No token is withdrawn or repeated.

        A caller that closes the iterator cancels the request: use `contextlib.aclosing`.
        """
        response = await self.agenerate(request)
        yield TokenChunk(response.output_ids, response.output_logprobs, response.output_versions, response)

    async def agenerate_group(self, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
        """The answers to requests with one prompt, in order. When one fails, the others are cancelled."""
        return await gather_or_cancel([self.agenerate(request) for request in requests])

    @property
    def version(self) -> int: ...
    async def keep_policy(self, parent: Path) -> Path:
        """The adapter of the served policy, in a folder of its version in `parent`. RequestError unless the servers get
        adapters alone."""
        raise RequestError(f"{type(self).__name__} has no adapters", code="fleet.no_adapters")

    def older_policy(self, folder: Path) -> AbstractAsyncContextManager[None]:
        """Within it, requests with `adapter=folder.name` are answered by the policy that `keep_policy` wrote to
        `folder`."""
        raise RequestError(f"{type(self).__name__} has no adapters", code="fleet.no_adapters")


class PinnedReplica(InferenceEngine, Protocol):
    """One replica of a fleet, which keeps its version while the others get newer ones."""

    @property
    def is_lost(self) -> bool:
        """Its server was replaced, or its weights were found to be wrong: answers so far count for nothing."""
        ...

    def release(self) -> None:
        """It gets the newest version and serves the fleet again."""
        ...


class InferenceFleet(InferenceEngine, Protocol):
    """The controller's view of its replicas."""

    async def score(
        self, rows: Sequence[ScoredRow], *, version: int, top_k: int, limit_s: float
    ) -> list[TokenScores] | None:
        """The scores of each row by one server that serves `version`, with the `top_k` likeliest tokens at each place.

        A row that fills the context of the server has no score of its last token. None when no server has that version
        or its answer does not come within `limit_s` seconds.
        """
        return None

    def pin(self) -> PinnedReplica | None:
        """Take a replica from the fleet, with the version that it serves; None when none can be spared."""
        return None

    @property
    def vocab_size(self) -> int:
        """The served model's size, once `start` has returned; a fleet that does not know it takes any token id."""
        return 2**31

    async def start(self) -> None:
        """Find the replicas and wait until each is healthy."""
        ...

    async def update_weights(self, update: WeightUpdate) -> CanaryReport | None:
        """Update every live replica to `update.version`; returns when each serves it. Raises WeightSyncError.

        The result is None when no answers to the canary probe were compared.
        """
        ...

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        """What the replicas answered to the canary probe of `version`; None without an answer."""
        ...

    async def compare(self, score: ProbeScore) -> CanaryReport | None:
        """Compare the answer of the replicas to the canary probe with the trainer's score of it.

        Replicas that differ get no requests until they were updated again, or restarted. None when their answer is
        another one by now.
        """
        ...

    def live_replicas(self, version: int) -> list[str]:
        """Ids of the live replicas that do not serve `version` yet, for `WeightUpdate.replicas`."""
        ...

    def status(self) -> dict[str, Any]:
        """JSON-ready: per replica its name, address, health, version, running requests."""
        ...

    async def close(self) -> None: ...


class WeightChannel(Protocol):
    """How the trainer's weights reach the servers. Every rank calls it; rank 0 talks to the controller."""

    def publish(self, version: int) -> str:
        """Send the engine's current weights to the servers as policy `version`, and return while they install it.

        Returns the checksum of the weights on rank 0, "" on the other ranks. Raises WeightSyncError on every rank when
        the weights could not be sent.
        """
        ...

    def wait_served(self) -> None:
        """Return when every serving replica holds the version sent last; at once when it was waited for before.

        The engine's weights must not change before: they may have to be sent again. Raises WeightSyncError on every
        rank when no replica could be updated.
        """
        ...

    def metrics(self) -> Metrics:
        """The metrics of the last publication, with the same names on every rank; a count of 0 = no value."""
        ...

    def close(self) -> None: ...
