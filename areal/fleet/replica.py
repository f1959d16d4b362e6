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
MemoryTag = Literal["weights", "kv_cache"]


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
    adapter: str
    """Versioned name of the LoRA adapter to generate with; empty = the base model."""
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
    part_versions: list[int] | None = None
    """On a last chunk, where the server tells versions only at the end: one per token of the whole part. They replace
    `versions`, which the client could only track, of this and all earlier chunks of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica says about itself."""

    version: int
    vocab_size: int
    context_length: int
    weights_whole: bool | None
    """False: an update stopped midway, its weights are a mixture. None: the server cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is, as it says itself."""

    running: int
    queued: int
    cache_usage: float
    """Used share of the KV cache, 0 to 1."""
    generated_tokens: int
    """Since its start."""


class Replica(Protocol):
    """A client of one server process. Calls raise ServerUnavailable when it does not answer as it should, and
    RequestError when it refuses what was sent."""

    async def generate(self, part: GenerationPart, on_chunk: Callable[[PartChunk], None]) -> None:
        """Run a part; `on_chunk` gets its tokens as they come, the last time with a finish reason."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """Make the server hold `update.version`; `rank` is the first of its ranks in the group of a collective."""
        ...

    async def abandon_update(self) -> None:
        """End a collective update that waits for a peer which will not come; its `update_weights` fails."""
        ...

    async def info(self) -> ReplicaInfo:
        """What a health check asks; an answer means that the server is well enough to take in weights. It comes while
        weights are taken in, too: silence means a hang."""
        ...

    async def load(self) -> ReplicaLoad:
        """How busy it is now."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Make a LoRA adapter, a folder in PEFT's format, known under a name never used before. RequestError where the
        server has no adapters."""
        ...

    async def unload_adapter(self, name: str) -> None: ...
    async def release_memory(self, tags: list[MemoryTag]) -> None:
        """Give up GPU memory of an idle server until it is resumed. RequestError where the server cannot."""
        ...

    async def resume_memory(self, tags: list[MemoryTag]) -> None: ...
    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        ...


ReplicaFactory = Callable[[str, str], Replica]
"""(name, address) -> the client of that server."""
