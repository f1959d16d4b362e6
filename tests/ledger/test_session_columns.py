"""Payloads of sessions: what is written is read again, and payloads without sessions are as before."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from areal.api.data import Trajectory, TrajectoryGroup, first_of_sessions
from areal.api.images import ImageRef
from areal.api.routed_experts import ExpertShape, RoutedExperts
from areal.data.pack import to_train_batch
from areal.ledger.payload import encode_episode, group_of_payload, join_experts, payload_head, session_columns
from areal.rollout.train_batches import build_share, share_parts
from tests.expect import raises_code

ROW = Trajectory(
    token_ids=[5, 6, 7],
    loss_mask=[0, 1, 1],
    rollout_logprobs=[0.0, -0.5, -0.25],
    output_versions=[-1, 3, 4],
    reward=1.0,
    finished=True,
)
EXPERTS = RoutedExperts(ExpertShape(2, 2, 4), bytes([0, 1, 2, 3, 3, 2, 1, 0, 255, 255, 255, 255]))
MANY = RoutedExperts(ExpertShape(1, 1, 300), struct.pack("<3h", 299, 0, -1))
IMAGES = tuple(ImageRef(digit * 64, (1, 2, int(digit))) for digit in "123")
PART = replace(ROW, session=2, turns=[-1, 0, 1], turn_rewards=[0.0, 2.0, 1.0], reward_parts={"a": 0.5}, baseline=0.25)


@pytest.mark.parametrize(
    "group",
    [
        TrajectoryGroup(trajectories=[ROW, replace(ROW, reward=0.5, finished=False)]),
        TrajectoryGroup(trajectories=[replace(ROW, baseline=0.5)]),
        TrajectoryGroup(trajectories=[replace(ROW, reward_parts={"b": 1.0})]),
        TrajectoryGroup(trajectories=[replace(ROW, routed_experts=EXPERTS)]),
        TrajectoryGroup(trajectories=[replace(PART, routed_experts=EXPERTS)], record="{}"),
        TrajectoryGroup(trajectories=[replace(ROW, routed_experts=MANY, temperatures=[0.5, 0.5, 1.0])]),
        TrajectoryGroup(trajectories=[PART, replace(PART, token_ids=[1, 2, 3])], record='{"messages": [["é"]]}'),
        TrajectoryGroup(trajectories=[ROW, replace(ROW, images=IMAGES), replace(ROW, images=IMAGES[:1])]),
        TrajectoryGroup(trajectories=[replace(PART, images=IMAGES), PART], record="{}"),
        TrajectoryGroup(trajectories=[replace(ROW, images=IMAGES, temperatures=[0.5, 0.5, 1.0])]),
        TrajectoryGroup(trajectories=[replace(PART, images=IMAGES, routed_experts=EXPERTS)], record="{}"),
    ],
)
def test_a_group_is_read_as_it_was_written(group):
    assert group_of_payload(7, encode_episode(7, group).payload) == group


def test_only_sessions_change_the_format():
    plain = encode_episode(1, TrajectoryGroup(trajectories=[ROW])).payload
    assert plain[:4] == b"ARP1"
    assert session_columns(plain) is None
    assert encode_episode(1, TrajectoryGroup(trajectories=[PART])).payload[:4] == b"ARP4"


def test_images_stay_with_their_sequences_in_a_batch():
    groups = [[ROW], [ROW, replace(ROW, images=IMAGES[:2])], [replace(ROW, images=IMAGES[1:])]]
    payloads = [encode_episode(i, TrajectoryGroup(trajectories=group)).payload for i, group in enumerate(groups)]
    assert [payload[:4] for payload in payloads] == [b"ARP1", b"aRP2", b"aRP2"]
    (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
    share = build_share(payloads, part, step=0, version=5, mask_before=0)
    assert share.images == [(), (), IMAGES[:2], IMAGES[1:]]
    batch = to_train_batch(share)
    assert batch.images == IMAGES
    assert batch.image_index.tolist() == [[-1, -1], [-1, -1], [0, 1], [1, 2]]
    with raises_code("data.inconsistent_batch"):
        to_train_batch(replace(share, images=share.images[:-1]))
    (part,) = share_parts([payload_head(payloads[0])], 1)
    assert to_train_batch(build_share(payloads[:1], part, step=0, version=5, mask_before=0)).image_index is None


def test_routed_experts_stay_at_their_tokens_in_a_batch():
    groups = [[ROW], [replace(ROW, routed_experts=EXPERTS)], [ROW, replace(ROW, routed_experts=EXPERTS)]]
    episodes = [encode_episode(i, TrajectoryGroup(trajectories=group)) for i, group in enumerate(groups)]
    assert [episode.payload[:4] for episode in episodes] == [b"ARP1", b"AEP3", b"AEP3"]
    payloads = [episode.payload for episode in episodes]
    (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
    share = build_share(payloads, part, step=0, version=5, mask_before=0)
    known, unknown = [[[0, 1], [2, 3]], [[3, 2], [1, 0]], [[-1, -1], [-1, -1]]], [[[-1, -1], [-1, -1]]] * 3
    assert share.routed_experts.tolist() == [*unknown, *known, *unknown, *known]
    batch = to_train_batch(share)
    assert batch.routed_experts.tolist() == share.routed_experts.tolist()
    with raises_code("data.inconsistent_batch"):
        to_train_batch(replace(share, routed_experts=share.routed_experts[:-1]))
    without = build_share(payloads[:1], part, step=0, version=5, mask_before=0)
    assert without.routed_experts.size == 0


@pytest.mark.parametrize("experts", [EXPERTS[:2], RoutedExperts(ExpertShape(2, 2, 5), EXPERTS.data)])
def test_routed_experts_of_another_length_or_model_are_refused(experts):
    rows = [replace(ROW, routed_experts=EXPERTS), replace(ROW, routed_experts=experts)]
    with raises_code("workflow.trajectory_lengths"):
        encode_episode(1, TrajectoryGroup(trajectories=rows))
    own = TrajectoryGroup(trajectories=[replace(ROW, routed_experts=MANY)])
    payloads = [encode_episode(1, one).payload for one in (own, TrajectoryGroup(trajectories=rows[:1]))]
    with raises_code("ledger.bad_payload"):
        join_experts(payloads)


def test_a_batch_with_and_without_sessions():
    rows = [replace(PART, reward=4.0, reward_parts={}) for _ in range(3)]
    groups = [[ROW, ROW], [*rows, replace(rows[0], session=0, reward=1.0)]]
    episodes = [encode_episode(i, TrajectoryGroup(trajectories=group)) for i, group in enumerate(groups)]
    payloads = [episode.payload for episode in episodes]
    (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
    share = build_share(payloads, part, step=0, version=5, mask_before=0)
    assert share.sessions.tolist() == [0, 1, 2, 2, 2, 3]
    assert share.turns[:6].tolist() == [-1, 0, 0, -1, 0, 0]
    assert np.array_equal(share.turn_rewards[:6], np.ones(6, np.float32))
    counts = [(one.counts.num_trajectories, one.counts.num_sessions, one.counts.reward) for one in episodes]
    assert counts == [(2, 2, 1.0), (4, 2, 2.5)]


def test_rows_of_one_session_count_once():
    rows = [replace(ROW, session=0, reward=3.0)] * 3 + [replace(ROW, session=1)]
    assert encode_episode(1, TrajectoryGroup(trajectories=rows)).counts.reward == 2.0
    assert len(first_of_sessions([*rows, ROW, ROW])) == 4
    with raises_code("workflow.session_rewards", 3.0, 1.0):
        encode_episode(1, TrajectoryGroup(trajectories=[rows[0], replace(rows[0], reward=1.0)]))
