"""The rollouts of benchmark/learning.py: the native engine in this thread, with weights of an exact staleness."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from areal.api.batch import BatchShare
from areal.api.config import PPOConfig
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.engine import WeightSource
from areal.api.metrics import Metrics
from areal.inference.engine import Engine, build_engine, load_detokenizer, request_limits
from areal.inference.scheduler import SamplingParams
from areal.inference.scheduler import Sequence as Request
from areal.ledger.payload import encode_episode
from areal.rollout.train_batches import SharePart, build_share

PROMPTS, SAMPLES = 32, 16
MAX_NEW_TOKENS = 8


class Snapshots:
    """Implements `areal.api.engine.WeightChannel`: the weights of the last versions, oldest first."""

    def __init__(self, engine: WeightSource, *, keep: int) -> None:
        self._engine = engine
        self._held: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=keep)

    def publish(self, version: int) -> str:
        self._held.append((version, {name: value.clone() for name, value in self._engine.named_weights()}))
        return ""

    def wait_served(self) -> None:
        return None

    def metrics(self) -> Metrics:
        return {}

    @property
    def oldest(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self._held[0]

    @property
    def newest(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self._held[-1]

    def close(self) -> None:
        """Nothing to release."""


class Generator:
    """The native engine, driven step by step in this thread."""

    def __init__(self, config: PPOConfig, tokenizer: Any) -> None:
        folder = Path(config.actor.path)
        self._finished: list[Request] = []
        self._engine: Engine = build_engine(
            config.native,
            folder,
            "cpu",
            deliver=lambda finished, progressed: self._finished.extend(finished),
            on_failure=_raise,
        )
        limits = request_limits(config.native, self._engine.runner, load_detokenizer(folder))
        self._stop_ids = limits.default_stop_ids
        self._tokenizer = tokenizer
        self._count = 0
        self.num_answers = 0

    def hold(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Use these weights for generation from now on."""

        for name, value in weights.items():
            self._engine.weights.receive_value(name, value)
        self._engine.install_weights(str(version), "retract")

    def answer(self, prompts: Sequence[list[int]], samples: int, seed: int, *, greedy: bool = False) -> list[Request]:
        """`samples` answers to each prompt, in the order of the prompts."""
        params = SamplingParams(
            max_new_tokens=MAX_NEW_TOKENS, temperature=0.0 if greedy else 1.0, stop_token_ids=self._stop_ids
        )
        requests: list[Request] = []
        for prompt in prompts:
            for _ in range(samples):
                self._count += 1
                requests.append(
                    Request(
                        request_id=str(self._count),
                        token_ids=list(prompt),
                        num_prompt=len(prompt),
                        params=params,
                        seed=(seed << 32) + self._count,
                    )
                )
        self._finished.clear()
        for request in requests:
            self._engine.scheduler.add(request)
        while len(self._finished) < len(requests):
            self._engine.step()
        self.num_answers += len(requests)
        return requests


class StaleBatches:
    """Implements `areal.trainer.ppo_loop.BatchSource`: batch k comes from the oldest stored weights."""

    def __init__(
        self,
        config: PPOConfig,
        generator: Generator,
        snapshots: Snapshots,
        rows: Iterator[dict[str, str]],
        tokenizer: Any,
    ) -> None:
        self._config = config
        self._generator = generator
        self._snapshots = snapshots
        self._rows = rows
        self._tokenizer = tokenizer
        self.ages: list[int] = []

    def next_batch(self, step: int) -> BatchShare:
        """One batch of whole groups; groups with equal rewards are replaced if the configuration says so."""
        version, weights = self._snapshots.oldest
        self._generator.hold(version, weights)
        self.ages.append(step - version)
        payloads: list[bytes] = []
        while len(payloads) < PROMPTS:
            rows = [next(self._rows) for _ in range(PROMPTS - len(payloads))]
            for group in self._groups(rows, version):
                rewards = [trajectory.reward for trajectory in group.trajectories]
                if not self._config.rollout.should_accept_fn or min(rewards) < max(rewards):
                    payloads.append(encode_episode(len(payloads), group).payload)
        part = SharePart(list(range(PROMPTS)))
        return build_share(payloads, part, step=step, version=step, mask_before=0)

    def _groups(self, rows: Sequence[dict[str, str]], version: int) -> Iterator[TrajectoryGroup]:
        prompts = [self._tokenizer.encode(row["prompt"]) for row in rows]
        answers = self._generator.answer(prompts, SAMPLES, self._config.seed)
        for index, row in enumerate(rows):
            group = answers[index * SAMPLES : (index + 1) * SAMPLES]
            yield TrajectoryGroup(trajectories=[_trajectory(number, row, self._tokenizer, version) for number in group])

    def consumed(self, step: int, version: int, weights_checksum: str, ess: float | None) -> None:
        """Nothing is recorded."""


def _trajectory(request: Request, row: dict[str, str], tokenizer: Any, version: int) -> Trajectory:
    num_prompt = request.num_prompt
    assert request.finish is not None
    return Trajectory(
        token_ids=list(request.token_ids),
        loss_mask=[0] * num_prompt + [1] * request.num_output,
        rollout_logprobs=[0.0] * num_prompt + list(request.logprobs),
        output_versions=[-1] * num_prompt + [version] * request.num_output,
        reward=reward_of(request, row, tokenizer),
        finished=request.finish.kind == "stop",
    )


def reward_of(request: Request, row: dict[str, str], tokenizer: Any) -> float:
    """1 for the right answer, as the quickstart's reward function scores it."""
    text = tokenizer.decode(request.token_ids[request.num_prompt :], skip_special_tokens=True)
    return float(text.replace(" ", "") == row["answer"])


def _raise(error: BaseException) -> None:
    raise error
