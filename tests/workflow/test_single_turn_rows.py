"""Rows of single-turn answers are those of a conversation with one answer."""

import random

import pytest

from areal.api.columns import ExpertShape, Packed, RoutedExperts, Runs, packed_ids, packed_logprobs
from areal.api.data import GenerationResponse, TrajectoryGroup
from areal.data.chat import EncodedPrompt
from areal.ledger.payload import encode_episode
from areal.workflow.conversation import Conversation
from areal.workflow.scoring import group_stats, single_turn_rows
from tests.workflow.conftest import CharTokenizer

SHAPE = ExpertShape(layers=2, choices=2, experts=8)


def answer(rng: random.Random, prompt: list[int], *, with_experts: bool) -> GenerationResponse:
    count = rng.choice([1, 2, 6, 6, 6, 30])
    versions = sorted(rng.choice([3, 3, 3, 4]) for _ in range(count))
    rows = len(prompt) + count - 1
    return GenerationResponse(
        request_id="r",
        input_ids=prompt,
        output_ids=packed_ids([rng.randrange(3, 90) for _ in range(count)]),
        output_logprobs=packed_logprobs([-rng.random() for _ in range(count)]),
        output_versions=versions if rng.random() < 0.5 else Runs((version, 1) for version in versions),
        stop_reason=rng.choice(["stop", "length"]),
        temperature=rng.choice([None, 0.5]),
        routed_experts=RoutedExperts(SHAPE, rng.randbytes(rows * SHAPE.row_bytes)) if with_experts else None,
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_a_conversation(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 90) for _ in range(rng.choice([1, 5, 40]))]
    each = [answer(rng, prompt, with_experts=seed % 2 == 1) for _ in range(8)]
    rewards = [rng.random() for _ in each[:-1]]  # the last answer is not trained on
    rows = single_turn_rows(
        packed_ids(prompt), each, rewards, reward_parts=[{"a": reward} for reward in rewards], baseline=0.25
    )
    expected = []
    for response, reward in zip(each, rewards, strict=False):
        conversation = Conversation(CharTokenizer(), EncodedPrompt("", packed_ids(prompt)))
        conversation.add_answer(response)
        expected.append(conversation.to_trajectory(reward, reward_parts={"a": reward}, baseline=0.25))
    assert repr(rows) == repr(expected)  # NaN is not equal to itself
    mine, theirs = (encode_episode(1, TrajectoryGroup(trajectories=actual)) for actual in (rows, expected))
    assert mine.payload == theirs.payload
    assert mine.counts == theirs.counts
    assert group_stats(rows, num_errors=2)["output_tokens"] == sum(sum(row.loss_mask) for row in expected) / 7


def test_rows_of_equal_answers_share_their_columns_and_not_their_tokens() -> None:
    rng = random.Random(0)
    response = answer(rng, [5, 6], with_experts=False)
    first, second = single_turn_rows([5, 6], [response, response], [0.0, 1.0])
    assert first.loss_mask is second.loss_mask
    assert isinstance(first.token_ids, Packed)
    assert first.token_ids is not second.token_ids
    assert response.output_ids == first.token_ids[2:]
