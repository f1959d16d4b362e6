"""Replays with other rewards, discounts and cuts: equal to the run that they would have made."""

from dataclasses import replace

import pytest

from areal.agent.images import DialogueImages
from areal.agent.transcript import trajectories
from areal.agent.turns import answer_message
from areal.api.config import AgentConfig, GRPOConfig
from areal.api.data import TURN_REWARDS, TURNS, TrajectoryGroup
from areal.data.image_files import ImageFiles, RunImages
from areal.data.tiny_model import character_tokenizer
from areal.ledger.payload import encode_episode, group_of_payload
from areal.replay import __main__ as command
from areal.replay import regrade
from areal.replay.recorded import RecordedRun, read_metrics
from areal.workflow.scoring import Score
from tests.agent.test_images import LAYOUT, TEMPLATE, TOKENS, image, session_of, text, turn
from tests.expect import raises_code
from tests.trainer.session_cases import CUTS, session

SOURCE = """
def count(prompt, completion, prompt_ids, completion_ids, **row):
    assert row["answer"] == "x" and completion == "".join(chr(97 + token) for token in completion_ids)
    return sum(completion_ids) % 5 / 2
"""


class Letters:
    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(97 + token) for token in token_ids)


@pytest.mark.usefixtures("ranks_in_process")
def test_another_reward_makes_the_update_of_a_run_with_it(
    recorded, recorded_with_rewards, tmp_path, monkeypatch, capsys
):
    other = recorded_with_rewards(lambda token_ids: sum(token_ids) % 5 / 2)
    (tmp_path / "new.py").write_text(SOURCE)
    monkeypatch.setattr(regrade, "tokenizer_of", lambda config, path: Letters())
    monkeypatch.setattr(regrade, "load_rows", lambda config, **options: [{"prompt": "a", "answer": "x"}] * 8)
    words = ["--run", str(recorded.folder), "--name", tmp_path.name]
    words += [f"reward_fn={tmp_path}/new.py:count", "reward.workers=1", "reward.on_error=fail"]
    assert command.replay(command.read_command_line(words)) == 0
    capsys.readouterr()
    weights = RecordedRun.read(other.folder).weights
    ours = read_metrics(recorded.folder / "replays" / tmp_path.name / "metrics.jsonl")
    assert {step - 1: row["weights"] for step, row in ours.items()} == weights
    live = read_metrics(other.folder / "metrics.jsonl")
    assert [row["batch/reward"] for row in ours.values()] == [row["batch/reward"] for row in live.values()]


def config_of(**agent) -> GRPOConfig:
    return GRPOConfig(experiment_name="a", trial_name="b", agent=AgentConfig(**agent))


def group_of(cut: str, discount: float, rewards, *, reward: float = 3.0) -> TrajectoryGroup:
    """Three sessions with a reward of each answer; the one of the last contains that of the session."""
    rows = []
    for number in range(3):
        transcript, value, values = session(number), 0.0, {}
        for turn_id in reversed(transcript.turns):
            value = rewards(number, turn_id) + discount * value
            values[turn_id] = value
        rows += trajectories(transcript, cut=cut, reward=reward, session=number, turn_rewards=values)
    return group_of_payload(1, encode_episode(1, TrajectoryGroup(trajectories=rows)).payload)


def rewards_of(number: int, turn_id: str) -> float:
    return 0.5 * number + int(turn_id[1:])


def facts(group: TrajectoryGroup):
    """Every trained token with the tokens before it, its reward and that of its session."""
    return sorted(
        (
            row.session,
            tuple(row.token_ids[: place + 1]),
            row.columns[TURNS][place],
            row.columns[TURN_REWARDS][place],
            row.reward,
        )
        for row in group.trajectories
        for place, flag in enumerate(row.loss_mask)
        if flag
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("other", CUTS)
def test_sessions_with_another_discount_and_cut(cut, other):
    before, after = config_of(cut=cut, turn_discount=0.5), config_of(cut=other, turn_discount=0.25)
    made = regrade._regraded(group_of(cut, 0.5, rewards_of), None, before, after)
    expected = group_of(other, 0.25, rewards_of)
    assert facts(made) == facts(expected)
    assert len(made.trajectories) == len(expected.trajectories)


def test_another_reward_of_a_session_belongs_to_its_last_answer():
    config = config_of(cut="tree", turn_discount=0.5)
    score = Score(reward=8.0, filter_reward=8.0, num_errors=0, parts={}, metrics={})
    made = regrade._regraded(group_of("tree", 0.5, rewards_of), [score] * 3, config, config)
    last = {number: f"t{len(session(number).turns) - 1}" for number in range(3)}
    expected = group_of("tree", 0.5, lambda number, turn_id: 8.0 * (turn_id == last[number]), reward=8.0)
    assert facts(made) == facts(expected)


@pytest.mark.parametrize("cut", CUTS)
def test_the_last_answer_of_a_session_is_found_in_every_cut(cut):
    for number in range(6):
        transcript = session(number)
        rows = trajectories(transcript, cut=cut, reward=0.0, session=0)
        node = list(transcript.turns.values())[-1].node
        context, _, answer = regrade.last_answer(rows)
        assert (len(context), answer) == (node.end - len(answer), answer)
        assert answer[-len(node.token_ids) :] == node.token_ids


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("other", CUTS)
async def test_sessions_with_images_are_cut_again_with_the_images_of_each_row(cut, other, tmp_path):
    tokenizer = character_tokenizer(TOKENS, end="<|end|>", context_length=500, chat_template=TEMPLATE)
    images = DialogueImages(RunImages(LAYOUT, ImageFiles(tmp_path)))
    live, _ = session_of(tokenizer, images)
    for colour in ("red", "blue"):  # the policy sees equal tokens for both
        asked = turn([image(colour), text("?")])
        (answer,) = await live.answer(asked)
        later = {"role": "user", "content": [image("green", 24)]}
        await live.answer(replace(asked, messages=(*asked.messages, answer_message(answer), later), fingerprint=colour))
    turns = dict(zip(live.transcript.turns, (1.0, 2.0, 3.0, 4.0), strict=True))
    groups = {}
    for name in (cut, other):
        rows = trajectories(live.transcript, cut=name, reward=5.0, session=0, turn_rewards=turns)
        groups[name] = group_of_payload(1, encode_episode(1, TrajectoryGroup(trajectories=rows)).payload)
    before, after = config_of(cut=cut), config_of(cut=other)
    made = regrade._regraded(groups[cut], None, before, after, RunImages(LAYOUT, ImageFiles(tmp_path)))
    assert facts(made) == facts(groups[other])
    expected = [([*row.token_ids], [*row.images]) for row in groups[other].trajectories]
    assert sorted(map(repr, expected)) == sorted(repr(([*r.token_ids], [*r.images])) for r in made.trajectories)
    context, actual, _ = regrade.last_answer(made.trajectories)
    written = tokenizer.decode(regrade._written(context, actual, LAYOUT))
    assert written.count("<|image_pad|>") == 2


@pytest.mark.parametrize("record", ["", '{"messages": [[], [], []]}', '{"sessions": [{}, {}, {}]}'])
def test_a_run_of_an_earlier_version_has_no_dialogues_for_reward_functions(record):
    group = replace(group_of("tree", 0.5, rewards_of), record=record)
    with raises_code("replay.old_record"):
        regrade.messages_of(group)


def test_a_workflow_with_its_own_reward_keeps_it(recorded, tmp_path):
    run = RecordedRun.read(recorded.folder)
    config = replace(recorded.config, workflow="multi_turn")
    with raises_code("replay.regrade"):
        regrade.regrade(run, config, range(1), tmp_path, new_rewards=True)
