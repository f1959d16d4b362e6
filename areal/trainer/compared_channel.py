"""A weight channel that compares the servers with the trainer after each publication: its part of the canary."""

import math
from dataclasses import replace
from typing import Protocol

import torch

from areal.api.batch import TokenOutputs, TrainBatch, required
from areal.api.data import ProbeScore, ProbeTokens
from areal.api.engine import Ranks, WeightChannel
from areal.api.images import ImageRef
from areal.data.pack import rows_to_train_batch
from areal.observe.log import get_logger

log = get_logger("trainer")

_MAX_COMPARISONS = 2
"""For each publication: servers that differ are updated again, and then compared a second time."""
_IMAGE_NUMBERS = 35
"""Of an image in a message between ranks: 3 of its grid, 32 bytes of its digest."""
_NOT_FINITE = -1e9
"""JSON has no NaN."""


class ScoringEngine(Protocol):
    """The part of a train engine that scores tokens."""

    def forward(self, batch: TrainBatch) -> TokenOutputs: ...


class ProbeControl(Protocol):
    """The controller, as trainer rank 0 calls it."""

    def probe_tokens(self, version: int) -> ProbeTokens | None: ...
    def compare(self, score: ProbeScore) -> list[str]: ...


class ComparedChannel:
    """Implements `areal.api.engine.WeightChannel` over another channel. All ranks score the tokens together."""

    def __init__(
        self, channel: WeightChannel, engine: ScoringEngine, ranks: Ranks, control: ProbeControl, *, dtype: str
    ) -> None:
        self._channel, self._engine, self._ranks, self._control = channel, engine, ranks, control
        self._dtype = dtype
        self._sent: int | None = None
        """The version that was sent and not compared yet."""

    def publish(self, version: int) -> str:
        self._sent = None
        checksum = self._channel.publish(version)
        self._sent = version
        return checksum

    def wait_served(self) -> None:
        self._channel.wait_served()
        version, self._sent = self._sent, None
        if version is not None:
            self._compare(version)

    def _compare(self, version: int) -> None:
        for _ in range(_MAX_COMPARISONS):
            tokens = self._shared(self._control.probe_tokens(version) if self._ranks.rank == 0 else None)
            if tokens is None:
                break
            logprobs = self._score(tokens)
            differing: list[str] = []
            if self._ranks.rank == 0:
                score = ProbeScore(version=version, answer_ids=tokens.answer_ids, logprobs=logprobs, dtype=self._dtype)
                differing = self._control.compare(score)
            if not self._ranks.all_reduce(torch.tensor([len(differing)], dtype=torch.float64), "max").item():
                break
            if differing:
                log.warning("version %d: %s had other weights and got them again", version, ", ".join(differing))

    def close(self) -> None:
        self._channel.close()

    def _shared(self, tokens: ProbeTokens | None) -> ProbeTokens | None:
        """The tokens of rank 0, on every rank."""
        numbers = [] if tokens is None else _numbers_of(tokens)
        size = int(self._ranks.all_reduce(torch.tensor([len(numbers)], dtype=torch.float64), "sum").item())
        if not size:
            return None
        message = torch.tensor(numbers or [0] * size, dtype=torch.float64)
        return _tokens_of([int(number) for number in self._ranks.all_reduce(message, "sum").tolist()])

    def _score(self, tokens: ProbeTokens) -> list[float]:
        """The log-probability of each token of the answer at temperature 1; a collective."""
        first, row = len(tokens.prompt_ids), [*tokens.prompt_ids, *tokens.answer_ids]
        mask = [0] * first + [1] * (len(row) - first)
        batch = replace(rows_to_train_batch([row], [mask], [tokens.images]), temperatures=torch.ones(len(row)))
        # Position t has the log-probability of token t + 1.
        found = required(self._engine.forward(batch).logprobs, "logprobs")[first - 1 : len(row) - 1]
        return [value if math.isfinite(value) else _NOT_FINITE for value in found.double().tolist()]


def _numbers_of(tokens: ProbeTokens) -> list[int]:
    images = [number for image in tokens.images for number in (*image.grid, *bytes.fromhex(image.sha256))]
    return [len(tokens.prompt_ids), len(tokens.answer_ids), *tokens.prompt_ids, *tokens.answer_ids, *images]


def _tokens_of(numbers: list[int]) -> ProbeTokens:
    """Inverse of `_numbers_of`."""
    num_prompt, num_answer, *rest = numbers
    end = num_prompt + num_answer
    rows = [rest[first : first + _IMAGE_NUMBERS] for first in range(end, len(rest), _IMAGE_NUMBERS)]
    return ProbeTokens(
        prompt_ids=rest[:num_prompt],
        answer_ids=rest[num_prompt:end],
        images=[ImageRef(bytes(row[3:]).hex(), (row[0], row[1], row[2])) for row in rows],
    )
