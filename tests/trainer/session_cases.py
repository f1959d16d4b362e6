"""Sessions for the tests of cut invariance: transcripts with forks and best-of-n answers, cut into rows and packed."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import torch

from areal.agent.bridge import BridgeGap
from areal.agent.transcript import Transcript, trajectories
from areal.agent.turns import TurnRequest
from areal.api.batch import TrainBatch
from areal.api.data import BASELINE, GenerationResponse, TrajectoryGroup
from areal.data.pack import to_train_batch
from areal.ledger.payload import encode_episode, payload_head
from areal.rollout.train_batches import build_share, share_parts

CUTS = ("tree", "concat", "per_turn")
VOCABULARY = 6


class DigitBridge:
    """Messages are digits; a message after an answer that contains "5" changes the history, so that it forks."""

    stop_token_ids = frozenset()

    def prompt(self, messages, tools):
        return [0, *(int(digit) for message in messages for digit in message["content"].replace("5", ""))]

    def extension(self, history, new_messages, tools):
        if any("5" in item["content"] for item in history):
            return BridgeGap(reason="history_edited", detail="a 5 is removed")
        return [int(digit) for message in new_messages for digit in message["content"]]


def session(seed: int) -> Transcript:
    """Three to five answers; some extend an earlier one, some are siblings, some fork in the middle of an answer."""
    dice = random.Random(seed)
    transcript = Transcript(DigitBridge())
    histories = [({"role": "user", "content": "12"},)]
    for turn in range(dice.randint(3, 5)):
        history = histories[-1] if dice.random() < 0.7 else dice.choice(histories)
        context = transcript.context(TurnRequest(messages=history))
        ids = [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 4))]
        response = GenerationResponse(
            request_id="",
            input_ids=[],
            output_ids=ids,
            output_logprobs=[-dice.random() * 3 for _ in ids],
            output_versions=[dice.randrange(3) for _ in ids],
            stop_reason="length" if dice.random() < 0.3 else "stop",
        )
        message = {"role": "assistant", "content": "".join(map(str, ids))}
        transcript.add_answer(context, f"t{turn}", response, message)
        histories.append((*history, message, {"role": "user", "content": dice.choice(["3", "41"])}))
    return transcript


@functools.cache
def batch_of(cut: str, *, seed: int = 0, with_turn_rewards: bool = False, mask_before: int = 0) -> TrainBatch:
    """Three groups of three sessions and one row that is no session, in float64."""
    payloads = []
    for group in range(3):
        rows = []
        for number in range(3):
            key = 100 * seed + 10 * group + number
            dice, transcript = random.Random(key), session(key)
            turns = {turn_id: dice.choice([0.0, 1.0, 2.5]) for turn_id in transcript.turns}
            rows += trajectories(
                transcript,
                cut=cut,
                reward=dice.choice([-1.0, 0.5, 2.0]),
                session=number,
                turn_rewards=turns if with_turn_rewards else None,
                reward_parts={"a": dice.random(), "b": dice.random()},
            )
        if group == 1:
            plain = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rollout_logprobs": [0.0, -1.0, -1.0]}
            plain |= {"output_versions": [-1, 0, 1], "session": -1, "reward": 0.25}
            parts = {spec: value for spec, value in rows[0].columns.items() if spec.per == "sequence"}
            rows.append(replace(rows[0], **plain, columns=parts))
        rows = [replace(row, columns={**row.columns, BASELINE: 0.5}) for row in rows]
        payloads.append(encode_episode(group, TrajectoryGroup(trajectories=rows)).payload)
    (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
    share = build_share(payloads, part, step=0, version=2, mask_before=mask_before)
    batch = to_train_batch(share)

    def double(values):
        return values.double() if values.is_floating_point() else values

    return batch.mapped(token=double, sequence=double, cu_seqlens=batch.cu_seqlens, sequence_index=batch.sequence_index)


def batch_of_two(cut: str) -> TrainBatch:
    """A session with answers of 2 and 3 tokens, and one of 1 token in a fork; and one with an answer of 2 tokens."""
    first, second = Transcript(DigitBridge()), Transcript(DigitBridge())
    question = {"role": "user", "content": "1"}
    _say(first, (question,), "22")
    _say(first, (question, {"role": "assistant", "content": "22"}, question), "333")
    _say(first, ({"role": "user", "content": "4"},), "0")
    _say(second, (question,), "22")
    sessions = [trajectories(item, cut=cut, reward=1.0, session=i) for i, item in enumerate((first, second))]
    payload = encode_episode(0, TrajectoryGroup(trajectories=[*sessions[0], *sessions[1]])).payload
    (part,) = share_parts([payload_head(payload)], 1)
    return to_train_batch(build_share([payload], part, step=0, version=2, mask_before=0))


def _say(transcript: Transcript, messages, digits: str) -> None:
    """Add an answer of digits."""
    ids = [int(digit) for digit in digits]
    response = GenerationResponse(
        request_id="",
        input_ids=[],
        output_ids=ids,
        output_logprobs=[-1.0] * len(ids),
        output_versions=[1] * len(ids),
        stop_reason="stop",
    )
    message = {"role": "assistant", "content": digits}
    context = transcript.context(TurnRequest(messages=messages))
    transcript.add_answer(context, f"t{len(transcript.turns)}", response, message)


def gradient_weights(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
