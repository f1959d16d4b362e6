"""What a user gets wrong ends in one line that says what to change: no traceback, no process left, nothing started."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.api.functions import parse_function_path
from areal.api.workflow import RolloutWorkflow
from areal.launcher.preflight import disk_problem
from areal.system.run_paths import RunPaths

ROOT = Path(__file__).parents[1]
CONFIG = """
experiment_name: bad
trial_name: input
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: FOLDER/runs}
train_dataset: {path: FOLDER/rows.jsonl, batch_size: 4}
reward_fn: FOLDER/mine.py:score
gconfig: {n_samples: 4, max_new_tokens: 8}
actor: {path: FOLDER/model, dtype: float32, optimizer: {lr: 1.0e-3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A configuration in which nothing is wrong, as far as can be seen before anything starts."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "cut").mkdir()
    (folder / "cut" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    header = b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
    (folder / "cut" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"half of it")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (folder / "two.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    (folder / "mine.py").write_text("def score(prompt, completion, prompt_ids, completion_ids, answer): return 1.0\n")
    (folder / "broken.py").write_text("import os\ndef main(:\n")
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    scripts = [word for word in words if word.endswith(".py")]
    rest = [word for word in words if word not in scripts]
    argv = [sys.executable, "-m", "areal.launcher.local", *scripts, "--config", str(folder / "c.yaml"), *rest]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout.max_head_offpolicynes=2"], "did you mean rollout.max_head_offpolicyness?"),
        (["train_dataset.batch_size=four"], "train_dataset.batch_size: 'four' was given where integer is expected"),
        (["allocation_mode=native:d1+fsdp:q1"], "column 16 of 'native:d1+fsdp:q1': 'q' is no size of fsdp"),
        (["allocation_mode=native:d1+fsdp:d8"], "train_dataset.batch_size: 4 is below the 8 data-parallel ranks"),
        (["actor.path=/no/model"], "actor.path: /no/model is no folder"),
        (["actor.path=FOLDER/cut"], "cut/model.safetensors is cut short"),
        (["train_dataset.path=/no/rows.jsonl"], "train_dataset.path: /no/rows.jsonl does not exist"),
        (["train_dataset.path=FOLDER/two.jsonl"], "train_dataset.batch_size=4 is more than the 2 rows of"),
        (["reward_fn=FOLDER/mine.py:scored"], "mine.py defines no scored; did you mean score?"),
        (["reward.by_source={a: {FOLDER/mine.py:scored: 1}}"], "defines no scored; did you mean score?"),
        (["workflow=FOLDER/none.py:Mine"], "there is no file"),
        (["FOLDER/broken.py"], "broken.py:2 is not valid Python"),
    ],
    ids=lambda value: value[0].rpartition("/")[2] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line_before_anything_starts(folder, words, expected):
    done = launch(folder, *[word.replace("FOLDER", str(folder)) for word in words])
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("areal: error: ")
    assert expected in lines[0]
    assert done.stdout == ""
    assert not (folder / "runs").exists()


def test_a_used_run_folder_is_not_written_over_nor_shared(folder, tmp_path):
    run = tmp_path / "bad" / "input"
    (run / "ledger").mkdir(parents=True)
    (run / "ledger" / "events-000001.jsonl").write_text("{}\n")
    used = launch(folder, f"cluster.fileroot={tmp_path}")
    assert used.returncode == 2
    assert "holds an earlier run (ledger)" in used.stderr
    assert "change trial_name" in used.stderr
    assert (run / "ledger" / "events-000001.jsonl").read_text() == "{}\n"
    lock = RunPaths(run).lock
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shared = launch(folder, f"cluster.fileroot={tmp_path}")
    assert shared.returncode == 2
    assert "is in use by" in shared.stderr
    assert len((used.stderr + shared.stderr).strip().splitlines()) == 2


def test_a_function_file_is_read_and_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('run at import')\ntry:\n    from x import score\nexcept ImportError:\n    pass\n")
    assert parse_function_path(f"{file}:score", key="reward_fn").name == "score"
    with pytest.raises(ConfigError, match=r"reward_fn='.*': .*mine.py defines no reward"):
        parse_function_path(f"{file}:reward", key="reward_fn")
    file.write_text("from somewhere import *\n")  # may define anything
    assert parse_function_path(f"{file}:score", key="reward_fn").file == str(file)


def test_a_workflow_without_evaluation_says_what_to_do():
    class Mine(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return None

    with pytest.raises(ConfigError, match=r"Mine does not support evaluation: .* or remove valid_dataset"):
        Mine().for_evaluation(None)


def test_a_disk_that_is_full_at_the_end_is_named(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    assert disk_problem(paths) == ""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    assert "is full (cluster.fileroot): make room" in disk_problem(paths)
