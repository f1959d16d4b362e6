"""`areal test-workflow` with scripted answers, on the calculator of examples/workflows."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from areal.api.errors import ConfigError, LaunchError
from areal.cli import try_workflow as command
from areal.cli.try_workflow import try_workflow
from areal.trainer import first_row
from tests.expect import raises_code
from tests.workflow.conftest import CharTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "workflows"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_row, "tokenizer_of", lambda config, path: CharTokenizer())
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "20+3=", "answer": "23"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*words):
        overrides = [
            f"train_dataset.path={tmp_path}/rows.jsonl",
            f"workflow={EXAMPLE}/calculator.py:CalculatorWorkflow",
            "reward.workers=1",
        ]
        status = try_workflow(["--config", str(EXAMPLE / "calculator.yaml"), *overrides, *words])
        return status, capsys.readouterr().out

    return call


def test_an_episode_is_shown_as_json(run):
    status, out = run("--row", "1", "--answer", "20+3?", "--answer", "23", "--json")
    facts = json.loads(out)
    assert (status, facts["error"], facts["row"]["answer"]) == (0, "", "23")
    (first,) = facts["trajectories"]
    assert (first["reward"], first["warnings"]) == (1.0, [])
    assert "".join(span["text"] for span in first["spans"]) == "20+3=20+3?<e>23=23<e>"
    assert [span["trained"] for span in first["spans"]] == [False, True, False, True]
    assert (facts["stats"]["calculator_calls"], facts["stats"]["num_turns"]) == (1.0, 2.0)


def test_no_optimiser_is_needed(run):
    status, out = run("--answer", "1+2?", "--answer", "3", "--json", "actor.optimizer=null")
    assert (status, json.loads(out)["error"]) == (0, "")
    with pytest.raises(ConfigError) as error:
        run("--answer", "3", "actor.optimizer=null", "gconfig.n_samples=0")
    assert [problem.path for problem in error.value.problems] == ["gconfig.n_samples"]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def separated(path, rows):
    mark = "\t" if path.suffix == ".tsv" else ","
    path.write_text("\n".join(mark.join(row) for row in [["prompt", "answer"], *map(dict.values, rows)]) + "\n")


def parquet(path, rows):
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)


def feather(path, rows):
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.feather").write_feather(table, path)


WRITERS = {
    "a.jsonl": jsonl, "a.json": lambda path, rows: path.write_text(json.dumps(rows)), "a.csv": separated,
    "a.tsv": separated, "a.parquet": parquet, "a.arrow": feather, "a.feather": feather,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_every_format_reach_the_workflow(run, tmp_path, name):
    WRITERS[name](tmp_path / name, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "30+2=", "answer": "32"}])
    for path in (f"{tmp_path}/{name}", *([f"{tmp_path}/a.*"] if name == "a.jsonl" else [])):
        status, out = run("--row", "1", "--answer", "32", f"train_dataset.path={path}", "--json")
        facts = json.loads(out)
        assert (status, facts["error"], facts["trajectories"][0]["reward"]) == (0, "", 1.0)


def test_text_marks_what_is_trained(run, monkeypatch):
    _, plain = run("--answer", "3")
    assert "1+2=[[3<e>]]" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, colored = run("--answer", "3")
    assert "1+2=\x1b[32m3<e>\x1b[0m" in colored


def test_answers_of_a_file_and_a_warning(run, tmp_path):
    (tmp_path / "answers.txt").write_text("1+2?\n" + "9" * 40)
    status, out = run("--answers", str(tmp_path / "answers.txt"), "--json")
    (first,) = json.loads(out)["trajectories"]
    assert (status, [warning["code"] for warning in first["warnings"]]) == (1, ["no_end_token"])


def test_an_error_of_the_episode_is_part_of_the_report(run, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def broken(prompt, completion, prompt_ids, completion_ids, **row):\n    return None\n")
    status, out = run("--answer", "3", f"reward_fn={reward}:broken", "--json")
    facts = json.loads(out)
    assert (status, facts["trajectories"]) == (1, [])
    assert "[workflow.reward_failed]" in facts["error"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--row", "9", "--answer", "3"), "data.no_rows"),
        (("actor.init_from_scratch=true",), "config.missing_requirement"),
        (("--answers", "missing.txt"), "config.unreadable_file"),
    ],
)
def test_wrong_usage_has_a_code(run, words, code):
    with raises_code(code):
        run(*words)


def test_a_server_that_does_not_start_is_named(run, monkeypatch):
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    with raises_code("launch.cannot_start"):
        run()


def test_the_server_gets_the_samples_of_the_configuration(run, monkeypatch):
    """With one sample it would refuse a reward_norm of groups."""
    seen = []

    @contextlib.asynccontextmanager
    async def server(config):
        seen.append(config.gconfig.n_samples)
        raise LaunchError("no server", code="launch.cannot_start")
        yield

    monkeypatch.setattr(command, "native_server", server)
    with pytest.raises(LaunchError):
        run("gconfig.n_samples=4")
    assert seen == [4]
