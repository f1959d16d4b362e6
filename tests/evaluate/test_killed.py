"""`areal eval` with a real native server: killed in the middle, continued, and equal to an uninterrupted evaluation."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, QUICKSTART / "prepare.py", folder], check=True, timeout=250, capture_output=True)
    return folder


def command(data, fileroot, name="eval", *words):
    config = ["--config", str(QUICKSTART / "grpo.yaml"), f"cluster.fileroot={fileroot}"]
    model = ["--model", str(data / "model"), "--data", str(data / "held_out.jsonl"), "--greedy"]
    limits = ["rollout.max_concurrent_rollouts=2", "evaluator.correct_reward=0.5"]  # slow enough to be killed
    return [sys.executable, "-m", "areal", name, *config, *model, *limits, *words]


def run(argv):
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done


def start_and_wait(argv, fileroot, num_lines):
    """Start the command and wait until its file has that many lines."""
    started = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 400
    while sum(path.read_bytes().count(b"\n") for path in fileroot.glob("quickstart/*/answers.jsonl")) < num_lines:
        assert started.poll() is None, started.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return started


def folder_of(fileroot):
    (folder,) = (fileroot / "quickstart").iterdir()
    return folder


def test_a_killed_evaluation_continues_and_gives_the_same_files(data, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    report = json.loads(run(command(data, whole, "eval", "--json")).stdout)
    assert [(result["set"], result["rows"], result["failed"]) for result in report["results"]] == [("held_out", 256, 0)]
    assert not [path for path in folder_of(whole).rglob("*") if path.name.startswith("checkpoints")]

    first = start_and_wait(command(data, killed), killed, 20)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    psutil.wait_procs(children, timeout=60)
    before = (folder_of(killed) / "answers.jsonl").read_bytes().splitlines()
    assert 20 <= len(before) < 256

    second = start_and_wait(command(data, killed), killed, len(before) + 20)
    (pid,) = [
        child.pid for child in psutil.Process(second.pid).children() if "areal.inference.server" in child.cmdline()
    ]
    os.kill(pid, signal.SIGKILL)  # the launcher starts it again
    output = second.communicate(timeout=400)[0].decode()
    assert second.returncode == 0, output
    assert json.loads((folder_of(killed) / "summary.json").read_text())["restarts"].keys() == {"server-0"}
    for name in ("answers.jsonl", "results.json"):
        assert (folder_of(killed) / name).read_bytes() == (folder_of(whole) / name).read_bytes()
    assert folder_of(killed).name == folder_of(whole).name

    out = tmp_path / "generated.jsonl"
    run(command(data, tmp_path / "generated", "generate", "-o", str(out)))
    scored = run(
        [
            *[sys.executable, "-m", "areal", "score", str(out), "--json", "evaluator.correct_reward=0.5"],
            f"reward_fn={QUICKSTART / 'task.py'}:sorted_digits_reward",
        ]
    )
    actual = json.loads(scored.stdout)["results"][0]
    assert actual["metrics"] == report["results"][0]["metrics"]
