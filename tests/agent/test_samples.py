import struct
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.agent.transcript import Cut, Transcript, rows_of_tree, trajectories, tree_of_rows
from areal.agent.turns import TurnRequest
from areal.api.columns import ROUTED_EXPERTS
from areal.api.data import TURN_REWARDS, TURNS, TrajectoryGroup
from areal.ledger.payload import TokenLimits, encode_episode
from tests.agent.char_bridge import CharBridge, answer, messages_of, request_of, response_of, text_of

CUTS = get_args(Cut)


def trained(rows):
    """Every trained token with the tokens before it and what is recorded about it."""
    result = []
    for row in rows:
        encode_episode(0, TrajectoryGroup(trajectories=[row]), TokenLimits(2**16, 99, strict=True))
        rewards = row.columns.get(TURN_REWARDS) or [row.reward] * len(row.token_ids)
        for place, flag in enumerate(row.loss_mask):
            if flag:
                facts = (
                    row.rollout_logprobs[place],
                    row.output_versions[place],
                    row.columns[TURNS][place],
                    rewards[place],
                )
                result.append((tuple(row.token_ids[: place + 1]), *facts))
    return sorted(result)


@st.composite
def transcripts(draw):
    """Sessions with extensions, best-of-n answers, changed histories and templates that strip reasoning."""
    strips, on_drift = draw(st.booleans()), draw(st.sampled_from(["fork", "realign"]))
    transcript = Transcript(CharBridge(strips=strips), on_drift=on_drift)
    histories = [messages_of("u:hi")]
    for turn in range(draw(st.integers(1, 6))):
        history = draw(st.sampled_from(histories))
        text = draw(st.sampled_from(["ok>", "hm!ok>", "hm!fine", "no, wait>"]))
        delivered = answer(transcript, TurnRequest(messages=history), text, f"t{turn}", version=turn)
        if draw(st.integers(0, 4)) == 0:
            delivered = delivered | {"content": "changed"}
        histories.append((*history, delivered, *messages_of(draw(st.sampled_from(["u:go", "t:3"])))))
    return transcript


@settings(max_examples=60, deadline=None)
@given(transcripts())
def test_every_cut_trains_the_same_tokens_once(transcript):
    rewards = {turn_id: float(number) for number, turn_id in enumerate(transcript.turns)}
    cuts = [
        trained(trajectories(transcript, cut=cut, reward=1.0, session=0, turn_rewards=rewards))
        for cut in ("tree", "concat", "per_turn")
    ]
    assert cuts[0] == cuts[1] == cuts[2]
    if not any(turn.is_overwritten for turn in transcript.turns.values()):
        assert len(cuts[0]) == sum(turn.num_tokens for turn in transcript.turns.values())


@settings(max_examples=30, deadline=None)
@given(transcripts(), st.sampled_from(CUTS))
def test_recorded_rows_can_be_cut_again(transcript, cut):
    rows = trajectories(transcript, cut=cut, reward=1.0, session=0)
    tree, order = tree_of_rows(rows), {str(number): number for number in range(len(transcript.turns))}
    for other in CUTS:
        again = rows_of_tree(tree, order, cut=other, reward=1.0, finished=True, session=0)
        assert trained(again) == trained(rows)


def forked() -> Transcript:
    """The second branch is the longer one; the branches share the first part of an answer."""
    transcript = Transcript(CharBridge())
    answer(transcript, request_of("u:hi"), "okay>", "1")
    answer(transcript, request_of("u:hi", "a:ok", "u:go on"), "fine>", "2", stop_reason="length")
    return transcript


class TestRows:
    def test_tree_trains_shared_tokens_in_the_first_branch(self):
        first, second = trajectories(forked(), cut="tree", reward=0.5, session=3)
        assert [text_of(row.token_ids) for row in (first, second)] == ["<uhi><aokay>", "<uhi><aok><ugo on><afine>"]
        assert text_of(t for t, m in zip(first.token_ids, first.loss_mask, strict=True) if m) == "okay>"
        assert text_of(t for t, m in zip(second.token_ids, second.loss_mask, strict=True) if m) == "fine>"
        assert (first.session, second.session, first.reward, second.reward) == (3, 3, 0.5, 0.5)

    def test_concat_trains_shared_tokens_in_the_longest_branch(self):
        first, second = trajectories(forked(), cut="concat", reward=0.5, session=0)
        assert text_of(t for t, m in zip(first.token_ids, first.loss_mask, strict=True) if m) == "ay>"
        assert text_of(t for t, m in zip(second.token_ids, second.loss_mask, strict=True) if m) == "okfine>"

    def test_per_turn_has_a_row_for_each_answer(self):
        transcript = Transcript(CharBridge())
        answer(transcript, request_of("u:hi"), "a>", "1")
        answer(transcript, request_of("u:hi", "a:a", "t:3"), "b>", "2")
        rows = trajectories(transcript, cut="per_turn", reward=1.0, session=0)
        assert [text_of(row.token_ids) for row in rows] == ["<uhi><aa>", "<uhi><aa><t3><ab>"]
        assert [sum(row.loss_mask) for row in rows] == [2, 2]
        assert [max(row.columns[TURNS]) for row in rows] == [0, 1]

    @pytest.mark.parametrize("cut", CUTS)
    def test_all_rows_are_finished_as_the_last_answer_is(self, cut):
        assert {row.finished for row in trajectories(forked(), cut=cut, reward=0.0, session=0)} == {False}

    @pytest.mark.parametrize("cut", CUTS)
    def test_a_session_without_tokens_has_no_rows(self, cut):
        transcript = Transcript(CharBridge())
        assert trajectories(transcript, cut=cut, reward=0.0, session=0) == []
        context = transcript.context(request_of("u:hi"))
        transcript.add_answer(context, "1", response_of(""), {"role": "assistant", "content": ""})
        assert trajectories(transcript, cut=cut, reward=0.0, session=0) == []

    def test_turn_rewards_are_recorded_only_when_they_differ(self):
        rows = trajectories(forked(), cut="tree", reward=1.0, session=0, turn_rewards={"1": 1.0, "2": 1.0})
        assert all(TURN_REWARDS not in row.columns for row in rows)
        first, second = trajectories(forked(), cut="tree", reward=1.0, session=0, turn_rewards={"1": 2.0})
        assert (set(first.columns[TURN_REWARDS]), set(second.columns[TURN_REWARDS])) == ({1.0, 2.0}, {1.0})


@settings(max_examples=60, deadline=None)
@given(transcripts(), st.sampled_from(CUTS))
def test_routed_experts_are_those_of_the_answer_that_a_token_is_part_of(transcript, cut):
    is_overwritten = any(turn.is_overwritten for turn in transcript.turns.values())
    for row in trajectories(transcript, cut=cut, reward=1.0, session=0):
        result = list(struct.iter_unpack("<2h", row.columns[ROUTED_EXPERTS].tobytes()))
        assert len(result) == len(row.token_ids)
        for place, (token, version) in enumerate(result):
            assert token in (row.token_ids[place], -1)
            if place + 1 < len(result) and row.loss_mask[place + 1]:
                made_by = row.output_versions[place + 1]
                assert version == made_by or (is_overwritten and version == -1)
