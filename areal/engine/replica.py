"""Owns what the fleet asks of one replica: a protocol and its records. One adapter per kind of server implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from areal.api.config.inference import GenerationHyperparameters
from areal.api.data import WeightUpdate

PauseMode = Literal["abort", "retract"]
"""abort: running requests return what they have. retract: they stay and are recomputed after the pause."""
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPart:
    """What one replica is asked to add to an answer: the first part of it, or what was left after an interruption."""

    part_id: str
    input_ids: list[int]
    """The prompt and all output tokens so far."""
    num_prior_output_tokens: int
    """How many of the last input_ids are output of earlier parts; they count for penalties, seeds and stop strings."""
    max_new_tokens: int
    min_new_tokens: int
    gconfig: GenerationHyperparameters
    """The other sampling settings; its limits on length concern the whole answer."""
    group_id: str
    seed: int | None
    stream_interval: int
    """Tokens per chunk; a part that may get no more comes in one piece."""


@dataclass(frozen=True, slots=True)
class PartChunk:
    """Tokens as they come from a replica. The three lists have equal length."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None
    """Set on the last chunk of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica says about itself."""

    version: int
    vocab_size: int
    context_length: int
    weights_whole: bool | None
    """False: an update stopped midway, its weights are a mixture. None: the server cannot tell."""


class Replica(Protocol):
    """A client of one server process. Calls raise ServerUnavailable when it does not answer as it should, and
    RequestError when it refuses what was sent."""

    async def generate(self, part: GenerationPart, on_chunk: Callable[[PartChunk], None]) -> None:
        """Run a part; `on_chunk` gets its tokens as they come, the last time with a finish reason."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Make the server hold `update.version`; `rank` is its place in the group of a collective update."""
        ...

    async def abandon_update(self) -> None:
        """End a collective update that waits for a peer which will not come; its `update_weights` fails."""
        ...

    async def info(self) -> ReplicaInfo:
        """What a health check asks; an answer means that the server is well enough to take in weights."""
        ...

    @property
    def answers_during_update(self) -> bool:
        """Whether `info` may be expected to answer while weights are taken in, so that silence means a hang."""
        ...

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        ...


ReplicaFactory = Callable[[str, str], Replica]
"""(name, address) -> the client of that server."""
