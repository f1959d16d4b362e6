"""Payloads of sessions: what is written is read again, and payloads without sessions are as before."""

from dataclasses import replace

import numpy as np
import pytest

from areal.api.data import Trajectory, TrajectoryGroup, first_of_sessions
from areal.ledger.payload import encode_episode, payload_head
from areal.ledger.session_columns import group_of_payload, session_columns
from areal.rollout.batching import build_share, share_parts
from tests.expect import raises_code

ROW = Trajectory(
    token_ids=[5, 6, 7],
    loss_mask=[0, 1, 1],
    rollout_logprobs=[0.0, -0.5, -0.25],
    output_versions=[-1, 3, 4],
    reward=1.0,
    finished=True,
)
PART = replace(ROW, session=2, turns=[-1, 0, 1], turn_rewards=[0.0, 2.0, 1.0], reward_parts={"a": 0.5}, baseline=0.25)


@pytest.mark.parametrize(
    "group",
    [
        TrajectoryGroup(trajectories=[ROW, replace(ROW, reward=0.5, finished=False)]),
        TrajectoryGroup(trajectories=[replace(ROW, baseline=0.5)]),
        TrajectoryGroup(trajectories=[replace(ROW, reward_parts={"b": 1.0})]),
        TrajectoryGroup(trajectories=[PART, replace(PART, token_ids=[1, 2, 3])], record='{"messages": [["é"]]}'),
    ],
)
def test_a_group_is_read_as_it_was_written(group):
    assert group_of_payload(7, encode_episode(7, group).payload) == group


def test_only_sessions_change_the_format():
    plain = encode_episode(1, TrajectoryGroup(trajectories=[ROW])).payload
    assert plain[:4] == b"ARP1"
    assert session_columns(plain) is None
    assert encode_episode(1, TrajectoryGroup(trajectories=[PART])).payload[:4] == b"ARP4"


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
