"""`Replica`: the client of one inference server, and the records it exchanges with the fleet.

One adapter per backend implements the protocol.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from areal.api.columns import ExpertShape, RoutedExperts
from areal.api.data import GenerationRequest, PromptScores, ScoredRow, TokenScores, WeightUpdate
from areal.api.errors import ArealError, RequestError
from areal.data.image_files import RunImages

PauseMode = Literal["abort", "retract", "in_place"]
"""abort: running requests return their tokens so far. retract: they stay and continue later with a new cache.
in_place: they stay and keep their cache."""
FinishReason = Literal["stop", "length", "abort"]
ALL_TOKENS = 100_000_000
"""The default of gconfig.top_k, which means no limit; the servers have other values for it."""
NO_VERSION = -1
"""Version of a server without weights, and target of a fleet before its first replicas: it never serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How all answers to the requests of a fleet are returned. Its clients have it from the start."""

    stream_interval: int = 32
    """Tokens per chunk. A request for at most this number is not streamed."""
    experts: ExpertShape | None = None
    """Shape of the model's experts, when the chosen ones are to be returned."""
    vision: RunImages | None = None
    """The images of a model that takes them, also for a prompt without one."""


class PartChunk(NamedTuple):
    """Tokens from a replica. The three columns have equal length."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason | None
    """Set on the last chunk of a part."""
    part_versions: Sequence[int] | None = None
    """Versions of all tokens of the part, on the last chunk of a server that reports them only at the end.

    They replace `versions`, which the client could only estimate, of this and all earlier chunks of the part."""
    routed_experts: RoutedExperts | None = None
    """Experts of the input tokens from number `num_known_experts` on and of the tokens of the part but the last; on the
    last chunk, where requested. None when nothing was computed."""
    num_cached: int = 0
    """Prompt tokens of the part that the server took from its cache, as far as it reports them."""
    prompt_scores: PromptScores | None = None
    """On the last chunk, where requested and computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica reports about itself."""

    version: int
    vocab_size: int
    context_length: int
    weights_whole: bool | None
    """False: an update failed midway, the weights are a mixture. None: the server does not report it."""
    adapters: frozenset[str] | None = None
    """Names of the LoRA adapters that it serves; None: it does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What every replica of a fleet can generate, since an answer may continue on any of them."""

    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is, as it reports."""

    running: int
    queued: int
    cache_usage: float
    """Used share of the KV cache, 0 to 1."""
    generated_tokens: int
    """Tokens generated since its start."""


Chunks = AsyncGenerator[tuple[int, PartChunk | ArealError], None]
"""Number of the request, and its next tokens or why it has failed."""


class Replica(Protocol):
    """A client of one server process.

    Calls raise ServerUnavailable when the server does not answer as agreed, and RequestError when it refuses the call.
    """

    max_group: int = 1
    """Requests that `generate` takes in one call."""
    pulled_bytes: int = 0
    """Bytes of http updates that the server has received over this connection."""
    failed_deltas: int = 0
    """Number of updates for which whole weights were needed, because the differences failed."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Chunks:
        """The answers to requests with equal settings, as their tokens arrive; each ends with a finish reason.

        A caller that closes the iterator or is cancelled ends the requests on the server. Several requests have equal
        prompts, or are not streamed; those with one prompt are next to each other.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one of several requests with its tokens so far."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    @property
    def has_second_copy(self) -> bool:
        """Weights are received into a second copy while the server generates, and exchanged between two steps."""
        ...

    async def prepare_weights(self, update: WeightUpdate, *, rank: int) -> None:
        """The part of an update that needs no pause; the server then serves the weights from before as well.

        Copies the folder of an http update to the machine of the server. A server with a second copy receives the
        weights. `rank`: as in `update_weights`.
        """
        ...

    async def update_weights(self, update: WeightUpdate, *, rank: int, mode: PauseMode) -> None:
        """Install `update.version`, prepared or not: from a folder, or from the update group, after joining a new one.

        `rank` is the first of the server's ranks in the group. `mode`: what happens to the running requests of a server
        that was not paused, and with in_place the cache of the old weights is kept. RequestError: nothing has changed.
        """
        ...

    async def abandon_update(self) -> None:
        """End a collective update that waits for a failed peer; its call fails."""
        ...

    async def info(self) -> ReplicaInfo:
        """The call of a health check. A healthy server answers it during a weight update too: silence is a hang."""
        ...

    async def load(self) -> ReplicaLoad: ...
    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, a folder in PEFT's format, under a new name. RequestError without LoRA."""
        ...

    async def unload_adapter(self, name: str) -> None: ...
    async def score(self, row: ScoredRow, top_k: int) -> TokenScores:
        """Log-probabilities of given tokens under the current weights, with `top_k` tokens of each place."""
        raise RequestError("these servers do not score given tokens", code="server.no_scores")

    async def close(self) -> None:
        """Drop all connections: every running call fails with ServerUnavailable."""
        ...


class ReplicaFactory(Protocol):
    def __call__(self, name: str, address: str, form: AnswerForm, /) -> Replica:
        """The client of the server at `address`."""
        ...
