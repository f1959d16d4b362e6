"""`areal check-reward` on a small dataset."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.cli.check_reward import check_reward, shares_of
from areal.trainer import reward_check
from tests.expect import raises_code
from tests.workflow.conftest import CharTokenizer

CONFIG = Path(__file__).parents[2] / "examples" / "gsm8k" / "gsm8k_grpo.yaml"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reward_check, "tokenizer_of", lambda config, path: CharTokenizer())
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(30, 42)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "paid.py").write_text(
        "def always(prompt, completion, prompt_ids, completion_ids, **row):\n    return 1.0\n"
    )

    def call(*words):
        overrides = [f"train_dataset.path={tmp_path}/rows.jsonl", "train_dataset.name=", "train_dataset.map_fn=",
            "valid_dataset=null", "reward.workers=1"]  # fmt: skip
        status = check_reward(["--config", str(CONFIG), *overrides, *words])
        return status, capsys.readouterr()

    return call


def test_a_sound_reward_has_no_fault_and_progress_is_said(run):
    status, printed = run("--strict", "--json", "--rows", "5")
    (source,) = json.loads(printed.out)["sources"]
    assert (status, source["rows"], source["right_below"], source["faults"]) == (0, 5, 0, [])
    assert "1 of 1 sources: all rows, 5 rows" in printed.err


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--strict"], 1)])
def test_a_fault_ends_with_1_only_with_strict(run, tmp_path, words, status):
    ended, printed = run(f"reward_fn={tmp_path}/paid.py:always", *words)
    assert ended == status
    assert "a wrong answer scores like a right one" in printed.out


def test_a_reward_of_equal_texts_has_a_notice_and_no_fault(run, tmp_path):
    (tmp_path / "equal.py").write_text(
        "def equal(prompt, completion, prompt_ids, completion_ids, answer, **row):\n"
        "    return float(completion == answer)\n"
    )
    status, printed = run(f"reward_fn={tmp_path}/equal.py:equal", "--strict")
    assert status == 0
    assert "no fault was found\nnotice: all rows: a harmless change of a right answer scores below it" in printed.out


def test_an_environment_that_scores_episodes_has_no_answers_to_check(run):
    with raises_code("reward.none_given", "workflow=textarena scores episodes"):
        run("workflow=textarena", "workflow_args={env: Nim-v0}")


HALF_PAID = """
def half_paid(prompt, completion, prompt_ids, completion_ids, answer, is_paid, **row):
    return 1.0 if is_paid or completion == answer else 0.5 * ("1" in completion)
"""


@pytest.mark.slow
def test_the_answers_of_a_model_show_how_many_groups_have_no_gradient(tmp_path):
    root = Path(__file__).parents[2]
    prepare = [sys.executable, "examples/quickstart/prepare.py", str(tmp_path / "data")]
    subprocess.run(prepare, cwd=root, check=True, capture_output=True)
    (tmp_path / "half.py").write_text(HALF_PAID)
    rows = [json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()[:16]]
    marked = [
        {"question": row["prompt"], "answer": row["answer"], "is_paid": number % 2} for number, row in enumerate(rows)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    model, config = tmp_path / "data/model", "examples/quickstart/grpo.yaml"
    paths = {"cluster.fileroot": "runs", "actor.path": "data/model", "train_dataset.path": "rows.jsonl"}
    overrides = [f"{key}={tmp_path}/{path}" for key, path in paths.items()]
    overrides.append("train_dataset.columns={question: prompt}")
    words = [*overrides, f"reward_fn={tmp_path}/half.py:half_paid", "--rows", "16", "--model", str(model), "--json"]
    command = [sys.executable, "-m", "areal", "check-reward", "--config", config, *words]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    (source,) = json.loads(done.stdout)["sources"]
    assert 0.5 <= source["equal_groups"] < 0.8  # of the others, a few by chance
    assert source["gradient_share"] == 1.0
    assert (source["faults"], source["notices"]) == (["wrong_as_right"], ["changed_below"])


def test_wrong_options_are_refused(run):
    with raises_code("config.conflict", "--rows 0"):
        run("--rows", "0")


def test_the_gradient_share_leaves_out_groups_with_equal_rewards():
    shares = shares_of({"easy": [[1.0, 1.0], [1.0, 1.0]], "hard": [[0.0, 1.0], [0.0, 0.0]]})
    assert shares == {
        "easy": {"equal_groups": 1.0, "gradient_share": 0.0},
        "hard": {"equal_groups": 0.5, "gradient_share": 1.0},
    }
