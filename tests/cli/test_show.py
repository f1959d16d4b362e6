"""`areal show`: the answers of a run as a reader finds them, in text and JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from areal.api.columns import ColumnSpec
from areal.api.data import TURN_REWARDS, TURNS, Trajectory, TrajectoryGroup, reward_columns, reward_part
from areal.api.images import ImageRef
from areal.cli.main import run_command
from areal.cli.show import sample_lines
from areal.data.image_files import ImageFiles
from areal.ledger.event_files import payload_path
from tests.expect import raises_code
from tests.ledger.forge import Forge

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "grpo.yaml"
PROMPT = "2+3="


class Characters:
    """One token per character; 0 is a special token."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(token) if token else "" if skip_special_tokens else "<eos>" for token in token_ids)


def wrong_reward(completion, answer):
    """Finds the answer anywhere in the completion, and rewards its form: the defect that the command must show."""
    return (1.0 if answer in completion else 0.0) + (0.1 if completion[-1:].isdigit() else 0.0)


def answered(completion, *, version=0, reward=None, logprob=-0.5, **parts):
    tokens = [ord(letter) for letter in PROMPT + completion] + [0]
    size = len(completion) + 1
    return Trajectory(
        token_ids=tokens,
        loss_mask=[0] * len(PROMPT) + [1] * size,
        rollout_logprobs=[0.0] * len(PROMPT) + [logprob] * size,
        output_versions=[-1] * len(PROMPT) + [version] * size,
        reward=wrong_reward(completion, "5") if reward is None else reward,
        columns=reward_columns(parts),
        finished=version == 0,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Six episodes: 0 to 3 trained, 4 rejected, 5 failed."""
    monkeypatch.setattr("areal.cli.show.tokenizer_of", lambda config, path: Characters())
    forge = Forge(tmp_path / "ledger")
    answers = {
        0: [answered("5"), answered("7")],
        1: [answered("15"), answered("x\x1b[2J", reward=-1.0)],
        2: [answered("6", version=1, exact=0.0, form=0.1)],
        3: [answered("no", reward=0.5)],
    }
    forge.answers = {number: TrajectoryGroup(trajectories=item) for number, item in answers.items()}
    forge.started()
    forge.attached(0, 0)
    forge.admitted(*range(6))
    forge.accepted(0, 1)
    forge.batched(0, 0, 1)
    forge.trained(0)
    forge.accepted(2, version=1)
    forge.accepted(3)
    forge.rejected(4, "filter")
    forge.failed(5, "RewardError: the reward raised")
    forge.batched(1, 2, 3)
    forge.trained(1)
    forge.write()
    (tmp_path / "config.yaml").write_text(QUICKSTART.read_text())
    return forge


@pytest.fixture
def image(run, tmp_path):
    """The image of both answers of an episode 6, which is the newest."""
    ref = ImageRef(ImageFiles(tmp_path / "images").put(b"png"), (1, 4, 2))
    run.answers[6] = TrajectoryGroup(trajectories=[replace(answered("8"), images=(ref,)), answered("9")])
    run.admitted(6)
    run.accepted(6)
    run.write()
    return ref


@pytest.fixture
def shown(run, json_of, tmp_path):
    return lambda *words: json_of("show", tmp_path, *words)


@pytest.fixture
def printed(run, text_of, tmp_path):
    return lambda *words: text_of("show", tmp_path, *words)


def test_a_wrong_reward_is_seen_in_one_command(shown, run, tmp_path):
    rows = [{"prompt": PROMPT, "answer": "5", "images": []}] * 8
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = QUICKSTART.read_text().replace("${cluster.fileroot}/${experiment_name}/data", str(tmp_path))
    (tmp_path / "config.yaml").write_text(config)
    best = shown("--best", "2", "--row")["samples"]
    assert [sample["reward"] for sample in best] == pytest.approx([1.1, 1.1])
    assert best[0] == best[0] | {"prompt": PROMPT, "answer": "15", "columns": {"answer": "5"}, "episode": 1}


def test_an_answer_has_its_prompt_reward_parts_versions_and_end(shown):
    (sample,) = shown("--episode", "2")["samples"]
    assert sample["reward_parts"] == pytest.approx({"exact": 0.0, "form": 0.1})
    expected = {"state": "trained", "step": 1, "versions": [1, 1], "stop_reason": "length", "num_generated": 2}
    assert sample == sample | expected | {"prompt": PROMPT, "answer": "6", "epoch": 0}
    assert sample["spans"] == [{"generated": False, "text": PROMPT}, {"generated": True, "text": "6<eos>"}]
    assert "tokens" not in sample
    (sample,) = shown("--episode", "2", "--tokens")["samples"]
    assert [token["text"] for token in sample["tokens"]] == [*PROMPT, "6", "<eos>"]
    assert sample["tokens"][4] == {"id": 54, "text": "6", "in_loss": True, "logprob": -0.5, "version": 1}


@pytest.mark.parametrize(
    ("words", "actual"),
    [
        ([], [(3, 0), (2, 0), (1, 0), (1, 1), (0, 0), (0, 1)]), (["--limit", "2"], [(3, 0), (2, 0)]),
        (["--step", "0"], [(0, 0), (0, 1), (1, 0), (1, 1)]), (["--best", "3"], [(1, 0), (0, 0), (3, 0)]),
        (["--worst", "1"], [(1, 1)]), (["--best", "5"], [(1, 0), (0, 0), (3, 0), (2, 0)]),
        (["--worst", "2", "--limit", "1"], [(1, 1)]), (["--grep", "=15"], [(1, 0)]),
        (["--best", "5", "--grep", "no"], [(3, 0)]), (["--rejected"], [(5, None), (4, None)]),
        (["--reason", "filter"], [(4, None)]), (["--reason", "rewarderror"], [(5, None)]),
        (["--reason", "other"], []),
    ],
)  # fmt: skip
def test_the_words_choose_the_answers(shown, words, actual):
    result = shown(*words)
    assert [(sample["episode"], sample.get("trajectory")) for sample in result["samples"]] == actual
    assert result["more"] == ("--limit" in words or "--worst" in words or ("--best" in words and len(actual) == 3))


def test_an_answer_names_its_images_and_writes_them_on_demand(shown, printed, image, tmp_path):
    first, second = shown("--episode", "6")["samples"]
    assert (first["images"], second["images"]) == ([{"sha256": image.sha256, "grid": [1, 4, 2]}], [])
    (result,) = shown("--episode", "6", "--images", str(tmp_path / "out"))["samples"][0]["images"]
    assert Path(result["file"]).read_bytes() == b"png"
    assert list((tmp_path / "out").iterdir()) == [Path(result["file"])]
    facts = shown("--episode", "6")["samples"][0]
    facts["spans"][0]["text"] = "a<|image_pad|><|image_pad|><|image_pad|>b<b>"
    assert "a<|image_pad|> x 3b<b>" in list(sample_lines(facts))
    assert f"image {image.sha256} (1 x 4 x 2 patches)" in printed("--episode", "6")


def test_images_that_cannot_be_written_are_one_error(image, tmp_path):
    with raises_code("command.not_written"):
        run_command(["show", str(tmp_path), "--episode", "6", "--images", str(tmp_path / "config.yaml")])
    ImageFiles(tmp_path / "images").path(image.sha256).unlink()
    with raises_code("data.image_missing"):
        run_command(["show", str(tmp_path), "--episode", "6", "--images", str(tmp_path / "out")])


def test_the_text_has_no_control_characters_and_no_colour(printed):
    out = printed("--worst", "1", "--tokens")
    assert "\x1b" not in out
    assert "reward -1;" in out
    assert "2+3=<v0>x{-0.50}\\x1b{-0.50}" in out


def test_tokens_are_coloured_on_a_terminal_unless_no_color_is_set(printed, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m6\x1b[0m" in printed("--episode", "2", "--tokens")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed("--episode", "2", "--tokens")


def test_episode_and_step_also_show_their_history(shown, printed):
    assert shown("--episode", "0")["history"][0] == "episode 0: consumed"
    assert shown("--step", "1")["history"][0] == "batch of step 1"
    out = printed("--episode", "5")
    assert "RewardError: the reward raised" in out
    assert "rollout.keep_rejected" in out


def test_without_a_tokenizer_or_a_payload_the_rest_is_shown(run, shown, capsys, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)  # where the tokenizer of the configuration does not exist, also after a quickstart
    assert run_command(["show", str(tmp_path), "--episode", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["samples"][0]["answer"] == "53 0"
    assert captured.err.count("\n") == 1
    payload_path(run.folder, 1).unlink()
    assert {sample.get("answer") for sample in shown()["samples"]} == {None}


def test_wrong_questions_have_codes(run, tmp_path):
    for words in (["--episode", "6"], ["--step", "2"]):
        with raises_code("ledger.not_found"):
            run_command(["show", str(tmp_path), *words])
    for words in (["--best", "0"], ["--best", "1", "--worst", "1"], ["--reason", "x", "--step", "1"]):
        with pytest.raises(SystemExit) as ended:
            run_command(["show", str(tmp_path), *words])
        assert ended.value.code == 2


def recorded(**changes):
    """What a workflow records of a session without a turn."""
    session = {"session": "s0", "status": "ok", "message": "", "reward": 1.0, "turns": [], "messages": []}
    return session | {"malformed_calls": 0, "retries": 0, "forks": 0, "drifts": 0, "refused": {}} | changes


@pytest.fixture
def agent_run(run):
    """Episode 3 with one session: a tool call, its result, the answer; and one session that failed."""
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns = [{"reward": 0.25, "calls": [call]}, {"reward": None, "calls": []}]
    messages = [{"role": "tool", "tool_call_id": "c0", "content": "5"}]
    facts = {"retries": 1, "forks": 2, "drifts": 3, "refused": {"agent.turn_budget": 4}, "malformed_calls": 5}
    trajectory = Trajectory(
        token_ids=[ord(letter) for letter in "Q<a>R5"],
        loss_mask=[0, 1, 1, 1, 0, 1],
        rollout_logprobs=[-0.5] * 6,
        output_versions=[-1, 0, 0, 0, -1, 0],
        reward=1.25,
        finished=True,
        session=0,
        columns={
            reward_part("form"): 0.5,
            TURNS: [-1, 0, 0, 0, -1, 1],
            TURN_REWARDS: [0.0, 1.25, 1.25, 1.25, 0.0, 1.0],
            ColumnSpec("hint"): [9.0, 1.0, 2.0, 3.0, 9.0, 4.0],
        },
    )
    failed = recorded(session="s1", status="error", message="LookupError: no page (agent.py:3)", reward=None)
    sessions = [recorded(turns=turns, messages=messages, **facts), failed]
    run.answers[6] = TrajectoryGroup(trajectories=[trajectory], record=json.dumps({"sessions": sessions}))
    run.admitted(6)
    run.accepted(6)
    run.write()


def test_the_session_of_an_agent_has_its_turns_calls_results_and_what_happened(agent_run, shown):
    (sample,) = shown("--episode", "6")["samples"]
    assert [(span["text"], span.get("turn")) for span in sample["spans"]] == [
        ("Q", None),
        ("<a>", 0),
        ("R", None),
        ("5", 1),
    ]
    first, second = sample["session"]["turns"]
    assert first == {"reward": 0.25, "calls": [{"name": "add", "arguments": '{"a": 2}', "result": "5"}]}
    assert second == {"reward": None, "calls": []}
    names = ("malformed_calls", "retries", "forks", "drifts", "refused")
    assert [sample["session"][name] for name in names] == [5, 1, 2, 3, {"agent.turn_budget": 4}]
    assert [item["session"] for item in sample["without_reward"]] == ["s1"]
    assert sample["reward_parts"] == {"form": 0.5}
    assert sample["values"] == {"hint": 2.5}


def test_the_text_of_a_session_names_turns_calls_budget_stops_and_failed_sessions(agent_run, printed):
    text = printed("--episode", "6")
    for part in ('turn 0, reward 0.25: add({"a": 2}) = 5', "-- turn 1", "agent.turn_budget 4", "s1", "agent.py:3"):
        assert part in text
