"""Each user error ends in one line with a code: no traceback, no process, nothing started."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.errors import ConfigError
from areal.api.registry import parse_function_path
from areal.api.workflow import RolloutWorkflow
from areal.launcher import local, preflight
from areal.launcher.preflight import disk_problem
from areal.launcher.preloaded import PRELOAD
from areal.system.process import run_main
from areal.system.run_paths import RunPaths
from tests.expect import raises_code

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
native: {dtype: float32}
"""

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
"""With them no process is needed to know that the model can be trained."""
WRONG = """
LIMIT = 5
def short(prompt, completion):
    def inner(prompt, completion, prompt_ids, completion_ids): ...
async def later(prompt, completion, prompt_ids, completion_ids): ...
def only(tokens): ...
class Kind:
    def __init__(self, gconfig, depth): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A configuration in which nothing is wrong, as far as can be seen before anything starts."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES}))
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "cut").mkdir()
    (folder / "cut" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    header = b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'
    (folder / "cut" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"half of it")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (folder / "two.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    (folder / "mine.py").write_text("def score(prompt, completion, prompt_ids, completion_ids, answer): return 1.0\n")
    (folder / "wrong.py").write_text(WRONG)
    (folder / "broken.py").write_text("import os\ndef main(:\n")
    (folder / "deep.yaml").write_text("a: " + "[" * 200 + "]" * 200)
    (folder / "digits.yaml").write_text("seed: " + "1" * 5000)
    (folder / "latin.yaml").write_bytes("trial_name: \u00e4".encode("latin-1"))
    (folder / "list.yaml").write_text("- seed: 1")
    (folder / "empty.yaml").write_text("# nothing")
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    scripts = [word for word in words if word.endswith(".py")]
    rest = [word for word in words if word not in scripts]
    argv = [sys.executable, "-m", "areal.launcher.local", *scripts, "--config", str(folder / "c.yaml"), *rest]
    env = os.environ | {"OMP_NUM_THREADS": "1", PRELOAD: "0"}  # no process is started that could be forked
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (["rollout.max_head_offpolicynes=2"], "config.unknown_key", ["rollout.max_head_offpolicyness?"]),
        (["train_dataset.batch_size=four"], "config.wrong_type", ["train_dataset.batch_size: 'four'"]),
        (["allocation_mode=native:d1+fsdp:q1"], "allocation.invalid", ["column 16 of 'native:d1+fsdp:q1'"]),
        (["allocation_mode=native:d1+fsdp:d8"], "config.conflict", ["train_dataset.batch_size: 4", "8"]),
        (["actor.path=/no/model"], "launch.missing_inputs", ["actor.path: /no/model"]),
        (["actor.path=FOLDER/cut"], "launch.missing_inputs", ["cut/model.safetensors"]),
        (["train_dataset.path=/no/rows.jsonl"], "launch.missing_inputs", ["train_dataset.path: /no/rows.jsonl"]),
        (["train_dataset.path=FOLDER/two.jsonl"], "launch.missing_inputs", ["train_dataset.batch_size=4", "2 rows"]),
        (["stats_logger.tensorboard.path=/proc/x"], "launch.missing_inputs", ["tensorboard.path", "/proc/x"]),
        (["reward_fn=nope"], "config.bad_reference", ["reward_fn: 'nope'", "gsm8k"]),
        (["reward_fn=gms8k"], "config.bad_reference", ["reward_fn: 'gms8k'", "did you mean 'gsm8k'?"]),
        (["reward_fn=nowhere.at.all:f"], "config.bad_reference", ["nowhere.at.all"]),
        (["reward_fn=areal.reward.text:exact_rewards"], "config.bad_reference", ["did you mean 'exact_reward'?"]),
        (["reward_fn=areal.reward.texts:f"], "config.bad_reference", ["areal.reward.texts"]),
        (["workflow=nope"], "config.bad_reference", ["workflow: 'nope'", "nemo_gym, openenv, reasoning_gym, rlvr"]),
        (["workflow=FOLDER/none.py:Mine"], "config.bad_reference", ["none.py"]),
        (["rollout.should_accept_fn=nope"], "config.bad_reference", ["rollout.should_accept_fn: 'nope'"]),
        (["train_dataset.map_fn=nope"], "config.bad_reference", ["train_dataset.map_fn: 'nope'"]),
        (["reward_fn=FOLDER/mine.py:scored"], "config.bad_reference", ["mine.py", "did you mean 'score'?"]),
        (["reward.by_source={a: {FOLDER/mine.py:scored: 1}}"], "config.bad_reference", ["did you mean 'score'?"]),
        (["reward_fn=5"], "config.bad_reference", ["reward_fn: '5'"]),
        (["reward_fn=FOLDER/rows.jsonl:score"], "config.bad_reference", ["reward_fn", "rows.jsonl"]),
        (["reward_fn=FOLDER/broken.py:main"], "config.bad_reference", ["reward_fn", "broken.py:2"]),
        (["reward_fn=FOLDER/wrong.py:LIMIT"], "config.wrong_function", ["reward_fn", "the value 5"]),
        (["reward_fn=FOLDER/wrong.py:short"], "config.wrong_function", ["reward_fn", "(prompt, completion)"]),
        (["reward_fn=FOLDER/wrong.py:later"], "config.wrong_function", ["reward_fn", "async"]),
        (["reward_fn=FOLDER/wrong.py:inner"], "config.bad_reference", ["reward_fn", "inner"]),
        (["reward.fns={FOLDER/wrong.py:Kind: 1}", "reward_fn="], "config.wrong_function", ["reward.fns", "class"]),
        (["workflow=FOLDER/wrong.py:LIMIT"], "config.wrong_function", ["workflow", "the value 5"]),
        (["workflow=FOLDER/wrong.py:Kind"], "workflow.invalid_args", ["workflow_args.depth"]),
        (["workflow_args={enable_thinkin: true}"], "workflow.invalid_args", ["enable_thinking"]),
        (["rollout.should_accept_fn=FOLDER/wrong.py:short"], "config.wrong_function", ["rollout.should_accept_fn"]),
        (["train_dataset.map_fn=FOLDER/wrong.py:short"], "config.wrong_function", ["train_dataset.map_fn"]),
        (
            ["actor.policy_loss=custom", "actor.policy_loss.path=FOLDER/wrong.py:only"],
            "config.wrong_function",
            ["actor.policy_loss.path", "f(tokens, options)"],
        ),
        (["FOLDER/mine.py", "rollout.should_accept_fn=FOLDER/wrong.py:short"], "config.wrong_function", ["short"]),
        (["FOLDER/mine.py", "rollout.should_accept_fn=nope"], "config.bad_reference", ["rollout.should_accept_fn"]),
        (["FOLDER/mine.py", "rollouts.on_stale=drop"], "config.unknown_key", ["rollouts", "did you mean rollout?"]),
        (["FOLDER/mine.py", "++rollout.on_stale=nope"], "config.not_a_choice", ["rollout.on_stale: 'nope'"]),
        (["FOLDER/broken.py"], "launch.missing_inputs", ["broken.py:2"]),
        (["trial_name=\udcff"], "config.wrong_type", ["trial_name", "UTF-8"]),
        (["tokenizer_path=${actor.path"], "config.bad_override", ["tokenizer_path: '${actor.path'"]),
        (["~trial"], "config.bad_override", ["trial", "~trial"]),
        (["--config=FOLDER"], "config.unreadable_file", ["directory"]),
        (["--config=FOLDER/deep.yaml"], "config.unreadable_file", ["deep.yaml"]),
        (["--config=FOLDER/digits.yaml"], "config.unreadable_file", ["digits.yaml"]),
        (["--config=FOLDER/latin.yaml"], "config.unreadable_file", ["latin.yaml", "UTF-8"]),
        (["--config=FOLDER/list.yaml"], "config.unreadable_file", ["list.yaml", "list"]),
        (["--config=FOLDER/empty.yaml"], "config.unreadable_file", ["empty.yaml", "empty"]),
    ],
    ids=lambda value: value[-1].rpartition("/")[2] if isinstance(value, list) else "",
)
def test_a_wrong_configuration_is_one_line_before_any_process_starts(folder, capsys, words, code, values):
    words = [word.replace("FOLDER", str(folder)) for word in words]
    error = dry_run(folder, capsys, *words)
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("areal: error: ")
    assert lines[0].endswith(f"[{code}]")
    assert [value for value in values if value not in lines[0]] == []
    assert not (folder / "runs").exists()


def dry_run(folder: Path, capsys, *words: str) -> str:
    """Runs the command in this process, where exit status 2 is expected, and returns what it printed as error."""
    scripts = [word for word in words if word.endswith(".py")]
    rest = [word for word in words if word not in scripts]
    argv = [*scripts, "--config", str(folder / "c.yaml"), *rest, "--dry-run"]
    with pytest.raises(SystemExit) as end:
        run_main(
            lambda: sys.exit(local.launch(local.read_command_line(argv), local.LocalCluster(local.this_machine())))
        )
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_command_prints_the_same_line_and_exits_with_2(folder):
    done = launch(folder, "reward_fn=nope", os.fsdecode(b"trial_name=t"), "--dry-run")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.strip().endswith("[config.bad_reference]")
    assert done.stdout == ""
    done = launch(folder, os.fsdecode(b"trial_name=\xff"), "--dry-run")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("[config.wrong_type]")


def test_a_dry_run_says_what_the_automatic_type_is(folder, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "has_bfloat16_products", lambda: False)
    words = ["actor.dtype=auto", "native.dtype=auto"]
    argv = [str(folder / "mine.py"), "--config", str(folder / "c.yaml"), *words, "--dry-run"]
    assert local.launch(local.read_command_line(argv), local.LocalCluster(local.this_machine())) == 0
    assert "areal: dtype=auto is float32: " in capsys.readouterr().err


def test_a_dry_run_lists_the_keys_that_only_the_script_reads(folder, capsys):
    argv = [str(folder / "mine.py"), "--config", str(folder / "c.yaml"), "game.rounds=3", "~gconfig", "--dry-run"]
    assert local.launch(local.read_command_line(argv), local.LocalCluster(local.this_machine())) == 0
    assert "keys that only the script reads: game\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["reward_fn=mine:score"], ["reward_fn=nope", "workflow=nope"]])
def test_a_script_may_use_the_names_of_functions_in_its_own_way(folder, words):
    argv = [str(folder / "mine.py"), "--config", str(folder / "c.yaml"), *words]
    assert local.read_command_line(argv).config.reward_fn == words[0].partition("=")[2]


def test_a_used_run_folder_is_not_written_over_nor_shared(folder, tmp_path):
    run = tmp_path / "bad" / "input"
    (run / "ledger").mkdir(parents=True)
    (run / "ledger" / "events-000001.jsonl").write_text("{}\n")
    script = str(folder / "mine.py")  # so that row 0 is not tried, for which the model has no tokenizer
    used = launch(folder, script, f"cluster.fileroot={tmp_path}", "recover.mode=disabled")
    assert used.returncode == 2
    assert "(ledger)" in used.stderr
    assert "[launch.earlier_run]" in used.stderr
    assert "trial_name=NAME" in used.stderr
    assert (run / "ledger" / "events-000001.jsonl").read_text() == "{}\n"
    lock = RunPaths(run).lock
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shared = launch(folder, script, f"cluster.fileroot={tmp_path}")
    assert shared.returncode == 2
    assert "is in use by" in shared.stderr
    assert len((used.stderr + shared.stderr).strip().splitlines()) == 2


def test_a_function_file_is_read_and_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('run at import')\ntry:\n    from x import score\nexcept ImportError:\n    pass\n")
    assert parse_function_path(f"{file}:score", key="reward_fn").name == "score"
    with pytest.raises(ConfigError) as caught:
        parse_function_path(f"{file}:reward", key="reward_fn")
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [
        ("reward_fn", "config.bad_reference")
    ]
    file.write_text("from somewhere import *\n")  # may define anything
    assert parse_function_path(f"{file}:score", key="reward_fn").file == str(file)


def test_a_workflow_without_evaluation_says_what_to_do():
    class Mine(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return None

    with raises_code("workflow.no_evaluation", "Mine"):
        Mine().for_evaluation(None)


def test_a_disk_that_is_full_at_the_end_is_named(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    assert disk_problem(paths) == ""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
    assert "is full (cluster.fileroot)" in disk_problem(paths)
