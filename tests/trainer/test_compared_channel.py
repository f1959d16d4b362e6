"""After each publication all trainer ranks score the answer of the servers to the canary probe."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.api.batch import IMAGE_INDEX
from areal.api.data import TEMPERATURES, ProbeScore, ProbeTokens
from areal.api.images import ImageRef
from areal.api.metrics import Metrics
from areal.trainer.ppo_loop import ComparedChannel
from tests.expect import serve
from tests.fake_ranks import FakeRanks


class Control:
    """A controller whose servers differ in the first comparisons."""

    def __init__(self, *differing: list[str]) -> None:
        self.differing = list(differing)
        self.scores: list[ProbeScore] = []
        self.tokens: ProbeTokens | None = ProbeTokens(prompt_ids=[5, 6, 7], answer_ids=[8, 9])

    def probe_tokens(self, version: int) -> ProbeTokens | None:
        return self.tokens

    def compare(self, score: ProbeScore) -> list[str]:
        self.scores.append(score)
        return self.differing.pop(0) if self.differing else []


class Engine:
    """The log-probability of the token after position t is -(t + 1) / 4."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def forward(self, batch: Any) -> Any:
        self.batches.append(batch)
        return SimpleNamespace(logprobs=-torch.arange(1, batch.num_tokens + 1, dtype=torch.float32) / 4)


class Channel:
    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, version: int) -> str:
        self.published.append(version)
        return "sum"

    def wait_served(self) -> None:
        return None

    def metrics(self) -> Metrics:
        return {}

    def close(self) -> None:
        return None


def channel_of(engine: Any, control: Control, ranks: FakeRanks | None = None) -> ComparedChannel:
    return ComparedChannel(Channel(), engine, ranks or FakeRanks(), control, dtype="bfloat16")


def test_the_trainer_scores_the_answer_of_the_servers_at_temperature_1() -> None:
    engine, control = Engine(), Control()
    assert serve(channel_of(engine, control), 4) == "sum"
    [score] = control.scores
    assert (score.version, score.answer_ids, score.logprobs, score.dtype) == (4, [8, 9], [-0.75, -1.0], "bfloat16")
    [batch] = engine.batches
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.columns[TEMPERATURES].tolist() == [1.0] * 5
    assert IMAGE_INDEX not in batch.columns


@pytest.mark.parametrize(("differing", "num_scores"), [([], 1), ([["server-0"]], 2), ([["s"], ["s"], ["s"]], 2)])
def test_servers_that_differ_are_compared_a_second_time(differing: list[list[str]], num_scores: int) -> None:
    control = Control(*differing)
    serve(channel_of(Engine(), control), 1)
    assert len(control.scores) == num_scores


def test_without_an_answer_nothing_is_scored() -> None:
    engine, control = Engine(), Control()
    control.tokens = None
    serve(channel_of(engine, control), 1)
    assert (engine.batches, control.scores) == ([], [])


def test_a_number_that_is_not_finite_differs() -> None:
    engine, control = Engine(), Control()
    engine.forward = lambda batch: SimpleNamespace(logprobs=torch.full((batch.num_tokens,), math.nan))  # type: ignore[method-assign]
    serve(channel_of(engine, control), 1)
    assert max(control.scores[0].logprobs) < -1e6


def test_all_ranks_score_together(toolbox: Any) -> None:
    group, engines, control = toolbox.RankGroup(2), [Engine(), Engine()], Control(["server-0"])
    controls = [control, Control()]
    image = ImageRef("0a" * 32, (1, 4, 6))
    control.tokens = ProbeTokens(prompt_ids=[5, 6, 7], answer_ids=[8, 9], images=[image])

    def publish(rank: int) -> str:
        return serve(channel_of(engines[rank], controls[rank], FakeRanks(rank, group)), 1)

    group.run(publish)
    assert [len(engine.batches) for engine in engines] == [2, 2]
    for engine in engines:
        batch = engine.batches[0]
        assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
        assert (batch.images, batch.columns[IMAGE_INDEX].tolist()) == ((image,), [[0]])
    assert [len(item.scores) for item in controls] == [2, 0]
