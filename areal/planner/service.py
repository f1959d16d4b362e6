"""How long the parts of a run take: pure records, which a run, a calibration or the specification of a card fills."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from areal.api.config import PPOConfig
from areal.api.config.experiment import LengthRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """Service times of one server. A decode step of b sequences with C tokens of context together takes
    `step_s + b * sequence_s + C * context_s` seconds, and computes one token of each sequence."""

    step_s: float
    sequence_s: float
    context_s: float = 0.0
    prefill_s: float = 0.0
    """Seconds for each prompt token that it computes; the decode steps wait meanwhile."""
    queued_s: float = 0.0
    """From the arrival of a request to the step that begins with it, when there is room."""
    max_running: float = math.inf
    """Sequences that run at the same time: others wait."""
    max_context: float = math.inf
    """Tokens that its cache holds: with more, requests wait."""
    multiplicity: float = 1.0
    """Sequences that each of its sequences stands for."""
    prepare_s: float = 0.0
    """Seconds to receive new weights, while it generates."""
    install_s: float = 0.0
    """Seconds to exchange the weights, while it does not generate."""
    has_second_copy: bool = True
    """It generates while it receives weights."""
    cores: float = 1.0
    """CPU cores that it uses while it computes, with the controller's work for it."""

    def coarse(self, sequences: float, tokens: int) -> Self:
        """Each of its sequences stands for a number of sequences, and each of its tokens for a number of tokens."""
        return replace(
            self,
            step_s=self.step_s * tokens,
            sequence_s=self.sequence_s * sequences * tokens,
            context_s=self.context_s * sequences * tokens * tokens,
            prefill_s=self.prefill_s * sequences * tokens,
            max_running=self.max_running / sequences,
            max_context=self.max_context / sequences / tokens,
            multiplicity=self.multiplicity * sequences,
        )

    def decode_s(self, steps: float, sequences: int, context: float) -> float:
        """Seconds of a number of steps. The context grows by `sequences` tokens in each."""
        first_s = self.step_s + self.sequence_s * sequences + self.context_s * context
        return steps * first_s + 0.5 * self.context_s * sequences * steps * steps

    def steps_in(self, seconds: float, sequences: int, context: float) -> float:
        """How many steps, and parts of one, are computed in a time: the inverse of `decode_s`."""
        first_s = self.step_s + self.sequence_s * sequences + self.context_s * context
        growth_s = self.context_s * sequences
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """Service times of all ranks together, which work at the same time."""

    before_s: float = 0.0
    before_token_s: float = 0.0
    """Seconds for each token of a batch from its arrival to its update: log-probabilities, advantages."""
    update_s: float = 0.0
    update_token_s: float = 0.0
    publish_s: float = 0.0
    """The part of a publication for which the trainer does nothing else."""
    after_s: float = 0.0
    """Seconds from the report of a step to the request for the next batch: exports, checkpoints, trackers."""
    cores: float = 1.0
    """CPU cores that each data-parallel rank uses while it computes."""
    spread: tuple[float, ...] = (1.0,)
    """What the time of a step is multiplied by: one of these, at random."""

    def divided(self, factor: float) -> Self:
        """The same work on `factor` times as many data-parallel ranks: the time by tokens is divided."""
        before_s, update_s = self.before_token_s / factor, self.update_token_s / factor
        return replace(self, before_token_s=before_s, update_token_s=update_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """All parts of a run."""

    server: ServerTimes
    trainer: TrainerTimes
    rewards_s: tuple[float, ...] = (0.0,)
    """Seconds of the reward of one answer: one of these, at random."""
    reward_workers: int = 2**31
    """Rewards that are computed at the same time."""
    tools_s: tuple[float, ...] = (0.0,)
    """Seconds from an answer of an agent to its next request: one of these, at random."""
    cores: float = math.inf
    """CPU cores that servers and trainer share. The times of both are those with enough cores."""
    source: str = "assumed"
    """Where the figures come from, for people."""
    is_extrapolated: bool = False
    """Whether they are from a specification, not from a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the episodes of a run do. One of them depends on the seed and its number only."""

    prompt: int
    """Tokens."""
    answers: int
    """Answers of each episode (gconfig.n_samples)."""
    rule: LengthRule | None = None
    """Lengths of the answers, where none were recorded."""
    recorded: tuple[tuple[int, ...], ...] = ()
    """Lengths of the answers of recorded episodes."""
    turns: int = 1
    """Turns of each answer."""
    rejected: tuple[tuple[str, float], ...] = ()
    """Share of the episodes that are rejected, by reason."""
    max_tokens: int = 2**31

    def episode(self, seed: int, number: int) -> tuple[Sequence[Sequence[int]], str]:
        """The generated tokens of the turns of each answer; and why the episode is rejected, empty = it is not.

        A recorded episode with another group size gives its lengths as often as needed.
        """
        rng = random.Random(seed * 1_000_003 + number)
        drawn = [self.rule.draw(rng) for _ in range(self.answers)] if self.rule else rng.choice(self.recorded)
        lengths = drawn if len(drawn) == self.answers else rng.choices(drawn, k=self.answers)
        draw, until = rng.random(), accumulate(share for _, share in self.rejected)
        why = next((reason for (reason, _), end in zip(self.rejected, until, strict=True) if draw < end), "")
        return [_parts(max(1, min(length, self.max_tokens)), self.turns) for length in lengths], why

    @property
    def mean_tokens(self) -> float:
        """Generated tokens of an episode."""
        return sum(sum(map(sum, self.episode(1, number)[0])) for number in range(64)) / 64


def _parts(tokens: int, count: int) -> list[int]:
    """`tokens` in `count` parts, of which none is empty, as equal as possible."""
    count = min(tokens, count)
    return [tokens * (part + 1) // count - tokens * part // count for part in range(count)]


def most_running(config: PPOConfig) -> float:
    """Sequences that a server runs at the same time."""
    return config.native.max_running_requests if config.server_backend == "native" else math.inf
