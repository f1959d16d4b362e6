"""The state of one request in the native engine: sampling parameters, tokens, cache blocks, finish reason."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

ALL_TOKENS = -1
"""`top_k` of a request that samples among all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of one request. Validated by `areal.inference.request_parser`."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """All ids that end the answer, including those of the model; empty with ignore_eos."""
    is_greedy: bool = field(init=False)
    """Whether the most likely token is always chosen."""
    is_plain: bool = field(init=False)
    """Whether tokens are sampled from the unmodified softmax."""

    def __post_init__(self) -> None:
        is_greedy = self.temperature == 0 or self.top_k == 1
        is_plain = (
            not is_greedy
            and self.top_p >= 1
            and self.top_k == ALL_TOKENS
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.min_new_tokens == 0
        )
        object.__setattr__(self, "is_greedy", is_greedy)
        object.__setattr__(self, "is_plain", is_plain)


class Status(IntEnum):
    """The state of a sequence. WAITING and RUNNING may alternate; FINISHED is final."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a sequence ended, as in `finish_reason` of the HTTP answer."""

    kind: str
    """stop | length | abort | error."""
    matched: int | str | None = None
    """stop: the token id or string that ended it."""
    message: str = ""
    """abort, error: the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image of a prompt. Equal images at equal places have equal keys and values."""

    sha256: str
    start: int
    """Number of its first placeholder in the prompt."""
    count: int
    """Of placeholders."""
    grid: tuple[int, int, int] = field(compare=False)
    """Patches: time, height, width."""
    shift_after: int
    """The position of token i behind it, up to the next image, is i + shift_after."""
    colours: np.ndarray = field(compare=False, repr=False)
    """uint8 [height, width, 3], one array for all requests with this image."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request. The engine thread writes it. Another thread must read `logprobs` first, then as many outputs."""

    request_id: str
    token_ids: list[int]
    """Prompt and answer."""
    num_prompt: int
    params: SamplingParams
    seed: int = 0
    """Seed and token position alone determine the random number of a token."""
    num_prior_output: int = 0
    """Tokens at the end of the prompt that belong to the answer, generated before an interruption."""
    group_id: str = ""
    stream_interval: int = 0
    """Tokens per event of a stream; 0 = one answer at the end."""
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list[int])
    """Cache blocks with the keys and values of `token_ids`, in order."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache after the planned step."""
    num_written: int = 0
    """A lower bound of the tokens whose keys and values are in the cache before the planned step."""
    may_share: bool = True
    """Whether later sequences of its group may use its blocks."""
    num_cached: int = 0
    """Prompt tokens that were taken from the cache at the first start."""
    logprobs: list[float] = field(default_factory=list[float])
    """One per token of the answer."""
    version_starts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(index into the answer, policy version) at each change of the version."""
    num_retractions: int = 0
    started_ns: int = 0
    """time.perf_counter_ns at its first start; 0 = it waits."""
    finish: FinishReason | None = None
    images: tuple[PlacedImage, ...] = ()
    """In the order of their placeholders."""
    image_end: int = field(init=False)
    """Number of tokens up to the last placeholder; 0 = there are no images."""
    position_shift: int = field(init=False)
    """The position of token i behind the images is i + position_shift."""
    experts_start: int | None = None
    """First token whose chosen experts are to be recorded; None = none are."""
    experts: list[bytes] = field(default_factory=list[bytes])
    """A record for each token from `experts_start` on, set when the sequence ends or loses its cache."""

    def __post_init__(self) -> None:
        last = self.images[-1] if self.images else None
        self.image_end = last.start + last.count if last else 0
        self.position_shift = last.shift_after if last else 0

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def answer_ids(self) -> list[int]:
        """The whole answer, including tokens generated before an interruption."""
        return self.token_ids[self.num_prompt - self.num_prior_output :]

    def append(self, token_id: int, logprob: float, version: str) -> None:
        """Append one generated token."""
        if not self.version_starts or self.version_starts[-1][1] != version:
            self.version_starts.append((len(self.logprobs), version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def version_spans(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """(version, start, end) for the tokens start..end-1 of the answer, with indices relative to `start`."""
        starts = self.version_starts
        spans: list[tuple[str, int, int]] = []
        for place, (first, version) in enumerate(starts):
            last = starts[place + 1][0] if place + 1 < len(starts) else end
            low, high = max(first, start), min(last, end)
            if low < high:
                spans.append((version, low - start, high - start))
        return spans
