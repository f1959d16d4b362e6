"""Owns the state of one request inside the native engine: its tokens, its place in the cache, how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

ALL_TOKENS = -1
"""`top_k` of a request that samples among all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Validated by `areal.inference.request_parser`."""

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
    """All ids that end the answer, those of the model included; empty under ignore_eos."""
    is_greedy: bool = field(init=False)
    """Whether the likeliest token is always taken."""
    is_plain: bool = field(init=False)
    """Whether tokens are drawn from the whole softmax, so that no logit has to be changed."""

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
    """Where a sequence is. WAITING and RUNNING may alternate; FINISHED is the end."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a sequence ended, in the words of the wire."""

    kind: str
    """stop | length | abort."""
    matched: int | str | None = None
    """stop: the token id or string that ended it."""
    message: str = ""
    """abort: on whose behalf."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request. The engine thread writes; other threads may read `logprobs` first and then as many outputs."""

    request_id: str
    token_ids: list[int]
    """Prompt and answer."""
    num_prompt: int
    params: SamplingParams
    seed: int = 0
    """With the position of a token it decides the token's random number, whatever else runs."""
    num_prior_output: int = 0
    """Tokens at the end of the prompt that are the beginning of the answer, generated before an interruption."""
    group_id: str = ""
    stream_interval: int = 0
    """Tokens after which the reader of a stream is told each time; 0 = only at the end."""
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list[int])
    """Cache blocks that hold, in order, the keys and values of `token_ids`."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache once the planned step is done."""
    num_written: int = 0
    """Tokens of which that holds before the planned step; may lag behind."""
    num_cached: int = 0
    """Prompt tokens that were first found in the cache instead of computed."""
    logprobs: list[float] = field(default_factory=list[float])
    """One for each token of the answer."""
    version_starts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(index into the answer, policy version) wherever the version changes."""
    num_retractions: int = 0
    finish: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def answer_ids(self) -> list[int]:
        """The whole answer: what was generated before an interruption too."""
        return self.token_ids[self.num_prompt - self.num_prior_output :]

    def append(self, token_id: int, logprob: float, version: str) -> None:
        """Take in one generated token."""
        if not self.version_starts or self.version_starts[-1][1] != version:
            self.version_starts.append((len(self.logprobs), version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def version_spans(self, start: int, end: int) -> list[tuple[str, int, int]]:
        """(version, start, end) for the answer's tokens start..end-1, counted from `start`."""
        starts = self.version_starts
        spans: list[tuple[str, int, int]] = []
        for place, (first, version) in enumerate(starts):
            last = starts[place + 1][0] if place + 1 < len(starts) else end
            low, high = max(first, start), min(last, end)
            if low < high:
                spans.append((version, low - start, high - start))
        return spans
