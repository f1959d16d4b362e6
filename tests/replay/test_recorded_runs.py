"""Replays of real runs, by the command lines of both: one rank and two, killed and recovered, interrupted."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal.data.tiny_model import tiny_model
from areal.ledger.event_files import LedgerReader

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
CONFIG = """
experiment_name: replay
trial_name: run
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: FOLDER/runs, n_gpus_per_node: 0}
total_train_epochs: 9
total_train_steps: 6
train_dataset: {path: FOLDER/train.jsonl, batch_size: 4}
reward_fn: FOLDER/reward.py:share_of_ones
gconfig: {n_samples: 4, max_new_tokens: 8}
native: {dtype: float32, max_running_requests: 64, context_length: 32}
recover: {mode: auto, freq_steps: 5}
actor:
  path: FOLDER/model
  dtype: float32
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  kl_ctl: 0.0
  reward_norm: {mean_level: group, std_level: null}
  optimizer: {lr: 3.0e-3, lr_scheduler_type: linear, warmup_steps_proportion: 0.0}
"""
REWARD = """def share_of_ones(prompt, completion, prompt_ids, completion_ids, **row):
    return completion.count("1") / 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, rows, a reward and a configuration."""
    sys.path.insert(0, str(QUICKSTART))
    try:
        spec = importlib.util.spec_from_file_location("quickstart_prepare_for_replay", QUICKSTART / "prepare.py")
        prepare = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(prepare)
    finally:
        sys.path.remove(str(QUICKSTART))
    folder = tmp_path_factory.mktemp("recorded_runs")
    tokenizer = prepare.build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model(tokenizer, 1, vocab_size=16).save_pretrained(folder / "model")
    prepare.write_rows(folder / "train.jsonl", prepare.task.make_rows(256, seed=1))
    (folder / "reward.py").write_text(REWARD)
    (folder / "c.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def start(*argv: str) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=reset_sigint,
    )


def reset_sigint() -> None:
    """Ctrl-C ends the child also where these tests run as a background job, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def launched(folder: Path, name: str, *words: str) -> subprocess.Popen:
    return start("areal.launcher.local", "--config", str(folder / "c.yaml"), f"trial_name={name}", *words)


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Its exit status and what it said."""
    told, _ = process.communicate(timeout=280)
    return process.returncode, told


def run_of(folder: Path, name: str) -> Path:
    return folder / "runs" / "replay" / name


def replay(run: Path, *words: str) -> tuple[int, str]:
    return ended(start("areal.replay", "--run", str(run), *words))


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until the run has written the metrics of `step`."""
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline:
        lines = (run / "metrics.jsonl").read_bytes().splitlines() if (run / "metrics.jsonl").exists() else []
        if lines and lines[-1].endswith(b"}") and json.loads(lines[-1])["step"] >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    pytest.fail(f"step {step} was not reached")


def role_of(process: psutil.Process) -> str:
    return json.loads(process.environ().get("AREAL_PROCESS", '{"role": ""}'))["role"]


def models(folder: Path) -> list[str]:
    model = f"{{path: {folder}/model, dtype: float32"
    return [f"critic={model}, optimizer: {{lr: 1.0e-3}}}}", f"ref={model}}}", "actor.kl_ctl=0.1"]


def notices_a_change(folder: Path, name: str) -> None:
    """A replay with another setting differs from the run, one with a falsified configuration fails."""
    run = run_of(folder, name)
    status, told = replay(run, "--until", "2", "actor.optimizer.lr=1e-3")
    assert status == 0, told
    assert told.splitlines()[-1] == "weights: different from step 1 on"

    text = (run / "config.yaml").read_text()
    changed = run_of(folder, f"{name}_changed")
    shutil.copytree(run, changed)
    (changed / "config.yaml").write_text(text.replace("eps_clip: 0.2", "eps_clip: 0.0001"))
    assert text != (changed / "config.yaml").read_text()
    status, told = replay(changed, "--until", "2")
    assert status == 1, told
    assert "weights DIFFER" in told


@pytest.mark.parametrize(("ranks", "with_all"), [(1, False), (2, True)])
def test_a_replay_equals_its_run(folder, ranks, with_all):
    name = f"ranks{ranks}"
    words = [f"allocation_mode=native:d1+fsdp:d{ranks}", *(models(folder) if with_all else [])]
    status, told = ended(launched(folder, name, *words))
    assert status == 0, told
    run = run_of(folder, name)
    status, told = replay(run)
    assert status == 0, told
    assert told.splitlines()[-1] == "equal: 6 steps, 6 with checksums, 6 with metrics"
    assert ("critic/loss" in told) == with_all
    if with_all:
        notices_a_change(folder, name)


def test_a_run_that_was_killed_and_recovered_is_replayed_as_if_it_had_not_been(folder):
    name = "killed"
    run = run_of(folder, name)
    first = launched(folder, name, "total_train_steps=24")
    wait_for_step(run, 7, first)
    children = psutil.Process(first.pid).children()
    trainer = next(child for child in children if "trainer" in role_of(child))
    trainer.kill()  # the launcher starts it again, from the checkpoint after step 5
    wait_for_step(run, 13, first)
    first.kill()  # and with it all its children
    first.communicate()
    status, told = ended(launched(folder, name, "total_train_steps=24"))
    assert status == 0, told
    events = list(LedgerReader(run / "ledger").events())
    again = [event["step"] for event in events if event["event"] == "trained_again"]
    assert again, "nothing was trained again: the kills came at checkpoints"
    status, told = replay(run)
    assert status == 0, told
    assert told.splitlines()[-1] == "equal: 24 steps, 24 with checksums, 24 with metrics"


def test_ctrl_c_ends_a_replay_with_all_its_processes(folder):
    run = run_of(folder, "ranks1")
    if not run.is_dir():
        status, told = ended(launched(folder, "ranks1"))
        assert status == 0, told
    process = start("areal.replay", "--run", str(run), "--name", "interrupted")
    deadline = time.monotonic() + 100
    while not (children := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    status, told = ended(process)
    assert status == 130, told
    assert "Traceback" not in told
    _, alive = psutil.wait_procs(children, timeout=30)  # one that was just being started dies with its parent
    assert children
    assert not alive
