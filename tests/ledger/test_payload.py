"""Payloads of columns beyond the core: what is written is read again, and joined in a batch."""

import struct
from dataclasses import replace

import pytest

from areal.api.batch import IMAGE_INDEX
from areal.api.columns import ROUTED_EXPERTS, ExpertShape, RoutedExperts
from areal.api.data import (
    BASELINE,
    TEMPERATURES,
    TURN_REWARDS,
    TURNS,
    Trajectory,
    TrajectoryGroup,
    first_of_sessions,
    reward_part,
)
from areal.api.images import ImageRef
from areal.api.table import SESSION, images_of
from areal.data.pack import SESSION_IDS, session_view, to_train_batch
from areal.ledger.payload import encode_episode, group_of_payload, payload_head
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
SESSION_COLUMNS = {TURNS: [-1, 0, 1], TURN_REWARDS: [0.0, 2.0, 1.0], reward_part("a"): 0.5, BASELINE: 0.25}
PART = replace(ROW, session=2, columns=SESSION_COLUMNS)
HEAT = {TEMPERATURES: [0.5, 0.5, 1.0]}


def with_experts(experts, row=ROW):
    return replace(row, columns={**row.columns, ROUTED_EXPERTS: experts.array})


def share_of(groups):
    """The whole batch of groups of trajectories."""
    episodes = [encode_episode(i, TrajectoryGroup(trajectories=group)) for i, group in enumerate(groups)]
    payloads = [episode.payload for episode in episodes]
    (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
    return build_share(payloads, part, step=0, version=5, mask_before=0)


@pytest.mark.parametrize(
    "group",
    [
        TrajectoryGroup(trajectories=[ROW, replace(ROW, reward=0.5, finished=False)]),
        TrajectoryGroup(trajectories=[ROW, replace(ROW, columns={BASELINE: 0.5})]),
        TrajectoryGroup(trajectories=[replace(ROW, columns={reward_part("b"): 1.0, **HEAT})]),
        TrajectoryGroup(trajectories=[PART, replace(PART, token_ids=[1, 2, 3])], record='{"messages": [["é"]]}'),
        TrajectoryGroup(trajectories=[ROW, replace(ROW, images=IMAGES), replace(ROW, images=IMAGES[:1])]),
        TrajectoryGroup(trajectories=[replace(PART, images=IMAGES), PART], record="{}"),
    ],
)
def test_a_group_is_read_as_it_was_written(group):
    assert group_of_payload(7, encode_episode(7, group).payload) == group


@pytest.mark.parametrize("experts", [EXPERTS, MANY])
def test_routed_experts_are_read_as_they_were_written(experts):
    group = TrajectoryGroup(trajectories=[with_experts(experts, PART), ROW], record="{}")
    first, second = group_of_payload(7, encode_episode(7, group).payload).trajectories
    assert RoutedExperts.of_array(first.columns[ROUTED_EXPERTS]).data == experts.data
    assert second == ROW


def test_images_stay_with_their_sequences_in_a_batch():
    share = share_of([[ROW], [ROW, replace(ROW, images=IMAGES[:2])], [replace(ROW, images=IMAGES[1:])]])
    assert images_of(share.table) == [(), (), IMAGES[:2], IMAGES[1:]]
    batch = to_train_batch(share)
    assert batch.images == IMAGES
    assert batch.columns[IMAGE_INDEX].tolist() == [[-1, -1], [-1, -1], [0, 1], [1, 2]]
    assert IMAGE_INDEX not in to_train_batch(share_of([[ROW]])).columns


def test_routed_experts_stay_at_their_tokens_in_a_batch():
    share = share_of([[ROW], [with_experts(EXPERTS)], [ROW, with_experts(EXPERTS)]])
    known, unknown = EXPERTS.array.tolist(), [[[255, 255], [255, 255]]] * 3
    batch = to_train_batch(share)
    assert batch.columns[ROUTED_EXPERTS].tolist() == [*unknown, *known, *unknown, *known]


@pytest.mark.parametrize("experts", [EXPERTS[:2], RoutedExperts(ExpertShape(1, 2, 4), bytes(6)), MANY])
def test_routed_experts_of_another_length_or_model_are_refused(experts):
    with raises_code("workflow.trajectory_lengths"):
        encode_episode(1, TrajectoryGroup(trajectories=[with_experts(EXPERTS), with_experts(experts)]))
    with raises_code("ledger.bad_payload"):
        share_of([[with_experts(EXPERTS)], [with_experts(MANY)]])


def test_a_batch_with_and_without_sessions():
    row = replace(PART, reward=4.0)
    share = share_of([[ROW, ROW], [row, row, row, replace(ROW, session=0), replace(ROW, session=0)]])
    assert share.table.columns[SESSION].tolist() == [-1, -1, 2, 2, 2, 0, 0]
    batch = to_train_batch(share)
    ids = batch.columns[SESSION_IDS].tolist()
    assert [ids.index(number) for number in ids] == [0, 1, 2, 2, 2, 5, 5]
    view = session_view(batch)
    assert SESSION_IDS not in view.batch.columns
    last = view.positions[view.batch.sequence_index == ids[-1]].tolist()
    assert last == [15, 15, 16, 18, 18, 19], "rows without turns follow each other"


def test_rows_of_one_session_count_once():
    rows = [replace(ROW, session=0, reward=3.0)] * 3 + [replace(ROW, session=1)]
    counts = encode_episode(1, TrajectoryGroup(trajectories=rows)).counts
    assert (counts.num_trajectories, counts.num_sessions, counts.reward) == (4, 2, 2.0)
    assert len(first_of_sessions([*rows, ROW, ROW])) == 4
    with raises_code("workflow.session_rewards", 3.0, 1.0):
        encode_episode(1, TrajectoryGroup(trajectories=[rows[0], replace(rows[0], reward=1.0)]))
