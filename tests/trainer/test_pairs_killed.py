"""The preference examples by the launcher: they learn, survive kill -9 of a trainer, and export for transformers."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal.data.supervised_rows import encode_pair
from areal.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "preference"
ROLES = {"reward_model": "model", "dpo": "actor"}
LOGGED = {
    "reward_model": ["loss", "accuracy", "margin", "score/chosen", "score/rejected"],
    "dpo": ["loss", "accuracy", "rewards/chosen", "rewards/rejected", "rewards/margin", "logps/chosen"],
}


@pytest.fixture(scope="module")
def fileroot(tmp_path_factory) -> Path:
    fileroot = tmp_path_factory.mktemp("preference")
    command = [sys.executable, EXAMPLES / "prepare.py", fileroot / "preference" / "data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return fileroot


class Run:
    """One example under a trial name of its own."""

    def __init__(self, fileroot: Path, kind: str, trial: str) -> None:
        self.root = fileroot / "preference" / trial
        self._out = fileroot / f"{trial}.out"
        self._command = [sys.executable, "-m", "areal.launcher.local", "--config", str(EXAMPLES / f"{kind}.yaml")]
        self._command += [f"cluster.fileroot={fileroot}", f"trial_name={trial}"]

    def start(self) -> subprocess.Popen[bytes]:
        with open(self._out, "ab") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(self._command, cwd=ROOT, env=environment, stdout=out, stderr=out)

    def lines(self) -> list[dict]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line] if path.exists() else []

    def told(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in [self._out, *sorted(self.root.glob("logs/*.log"))])


def kill_trainer(launcher: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the trainer alone."""
    trainers = [p for p in psutil.Process(launcher.pid).children(recursive=True) if "areal.trainer" in p.cmdline()]
    assert trainers
    for trainer in trainers:
        trainer.kill()


def wait_for_step(run: Run, launcher: subprocess.Popen[bytes], step: int) -> None:
    deadline = time.monotonic() + 400
    while not run.lines() or run.lines()[-1]["step"] < step:
        assert launcher.poll() is None, run.told()
        assert time.monotonic() < deadline, run.told()
        time.sleep(0.005)


def scores_of_export(folder: Path, fileroot: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' scores of some held-out pairs, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (model.config.num_labels, model.dtype) == (1, torch.float32)
    rows = (fileroot / "preference" / "data" / "held_out_pairs.jsonl").read_text().splitlines()[:50]
    pairs = [encode_pair(json.loads(row), load_tokenizer(folder)) for row in rows]
    with torch.no_grad():
        sides = [[model(torch.tensor([side.token_ids])).logits[0, 0] for side in (p.chosen, p.rejected)] for p in pairs]
    scores = torch.tensor(sides)
    return scores[:, 0], scores[:, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROLES)
def test_an_example_learns_and_a_killed_trainer_changes_nothing(fileroot, kind):
    undisturbed, killed = Run(fileroot, kind, f"{kind}-undisturbed"), Run(fileroot, kind, f"{kind}-killed")
    first = undisturbed.start()
    assert first.wait(timeout=600) == 0, undisturbed.told()
    second = killed.start()
    try:
        wait_for_step(killed, second, 25)
        kill_trainer(second)
        assert second.wait(timeout=600) == 0, killed.told()
    finally:
        if second.poll() is None:
            second.terminate()
            second.wait(timeout=60)
    assert "recovered from" in killed.told()
    expected, actual = undisturbed.lines(), killed.lines()
    assert [line["step"] for line in actual] == list(range(61))  # before the first step there is an evaluation
    for name in [*LOGGED[kind], "grad_norm", "lr", "eval/loss", "eval/accuracy"]:
        assert [line.get(name) for line in actual] == [line.get(name) for line in expected], name
    # the random weights decide in which order a pair is, but its scores are almost equal
    assert expected[0]["eval/loss"] == pytest.approx(math.log(2), abs=0.01)
    assert expected[0]["eval/accuracy"] < 0.8
    assert expected[-1]["eval/accuracy"] > 0.95
    export = killed.root / "checkpoints" / ROLES[kind] / "step-000060"
    if kind == "dpo":
        AutoModelForCausalLM.from_pretrained(export)
        return
    chosen, rejected = scores_of_export(export, fileroot)
    assert float((chosen > rejected).float().mean()) > 0.9
