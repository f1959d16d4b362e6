"""A supervised run that is killed several times and continued by the same command equals an undisturbed run."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
NUM_STEPS = 24
CONFIG = """
experiment_name: killed
trial_name: TRIAL
seed: 5
allocation_mode: ALLOCATION
cluster: {fileroot: FOLDER/runs, n_gpus_per_node: 0}
total_train_epochs: 9
total_train_steps: STEPS
train_dataset: {path: FOLDER/data/sft.jsonl, type: sft, batch_size: 12, drop_last: false}
valid_dataset: {path: FOLDER/data/sft.jsonl, type: sft, batch_size: 24}
evaluator: {freq_steps: 9}
saver: {freq_steps: 5, keep_last: 2}
recover: {mode: auto, freq_steps: 2}
model:
  path: FOLDER/data/model
  dtype: float32
  disable_dropout: WITHOUT
  mb_spec: {max_tokens_per_mb: 90}
  optimizer:
    lr: 3.0e-3
    lr_scheduler_type: cosine
    warmup_steps_proportion: 0.3
    gradient_clipping: 0.3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The quickstart's model and tokenizer, with dropout and few rows."""
    folder = tmp_path_factory.mktemp("killed")
    quickstart = ROOT / "examples" / "quickstart"
    done = subprocess.run([sys.executable, quickstart / "prepare.py", folder / "data"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = (folder / "data" / "sft.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "sft.jsonl").write_text("".join(rows[:50]))
    model = folder / "data" / "model" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"attention_dropout": 0.1}))
    return folder


class Run:
    """One run folder and the command that fills it."""

    def __init__(self, folder: Path, trial: str, allocation: str) -> None:
        text = CONFIG.replace("FOLDER", str(folder)).replace("TRIAL", trial).replace("ALLOCATION", allocation)
        text = text.replace("WITHOUT", str("megatron" in allocation))  # whose layers have no dropout
        self._config = folder / f"{trial}.yaml"
        self._config.write_text(text.replace("STEPS", str(NUM_STEPS)))
        self.root = folder / "runs" / "killed" / trial

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "areal.launcher.local", "--config", str(self._config)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(self._config.with_suffix(".out"), "ab") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)

    def finish(self) -> None:
        process = self.start()
        try:
            assert process.wait(timeout=400) == 0, self.told()
        finally:
            kill_tree(process)

    def told(self) -> str:
        logs = [self._config.with_suffix(".out"), *sorted(self.root.glob("logs/*.log"))]
        return "\n".join(path.read_text()[-3000:] for path in logs)

    def kill_when(self, moment: Callable[[], bool], delay_s: float) -> bool:
        """Start, kill everything `delay_s` after `moment`; False when the run was over before."""
        process = self.start()
        try:
            deadline = time.monotonic() + 300
            while not moment():
                if process.poll() is not None:
                    assert process.returncode == 0, self.told()
                    return False
                assert time.monotonic() < deadline, self.told()
                time.sleep(0.001)
            time.sleep(delay_s)
            return True
        finally:
            kill_tree(process)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_bytes().splitlines()]

    def last_step(self) -> int:
        path = self.root / "metrics.jsonl"
        whole = [line for line in path.read_bytes().split(b"\n")[:-1] if line] if path.exists() else []
        return json.loads(whole[-1])["step"] if whole else 0

    def exports(self) -> dict[str, bytes]:
        checkpoints = self.root / "checkpoints"
        return {
            str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()
        }


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the launcher and all that it started, and nothing of them is left afterwards."""
    tree: list[psutil.Process] = []
    if process.poll() is None:
        root = psutil.Process(process.pid)
        root.suspend()  # it starts no process meanwhile
        tree = root.children(recursive=True)
        for item in [*tree, root]:
            item.kill()
    process.wait()
    psutil.wait_procs(tree, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocation", "kills"),
    [
        ("fsdp:d1", ("save", "step", "save", "export", "save")),
        ("fsdp:d2", ("export", "save")),
        ("fsdp:t2", ("step", "save")),
        ("fsdp:c2", ("save", "step")),
        pytest.param("megatron:p2", ("save", "step"), marks=pytest.mark.megatron),
    ],
)
def test_a_run_killed_again_and_again_equals_the_undisturbed_one(folder, allocation, kills):
    name = allocation[-2:]
    undisturbed, killed = Run(folder, f"undisturbed-{name}", allocation), Run(folder, f"killed-{name}", allocation)
    undisturbed.finish()
    chance = random.Random(allocation)
    recover, exports = killed.root / "recover", killed.root / "checkpoints" / "model"
    moments: list[tuple[str, Callable[[], bool]]] = []
    for kind in kills:
        after = min(2 + 4 * len(moments) + chance.randrange(4), NUM_STEPS - 3)
        in_time = lambda after=after: killed.last_step() >= after  # noqa: E731
        what = {
            "step": lambda: True,
            "save": lambda: (recover / "next").exists(),
            "export": lambda: any(exports.glob(".*.writing")),
        }[kind]
        moments.append((kind, lambda in_time=in_time, what=what: in_time() and what()))
    cuts = []
    for kind, moment in moments:
        if killed.kill_when(moment, chance.uniform(0.0, 0.02)):
            cuts.append((kind, killed.last_step(), (recover / "next").exists()))
    assert len(cuts) >= len(kills) - 1, cuts
    killed.finish()
    expected, actual = undisturbed.lines(), killed.lines()
    assert [line["step"] for line in actual] == list(range(1, NUM_STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "epoch", "eval/loss"):
        assert [line.get(name) for line in actual] == [line.get(name) for line in expected], (name, cuts)
    assert killed.exports() == undisturbed.exports()
    assert sorted(path.name for path in recover.iterdir()) == [f"step-{NUM_STEPS - 2:06d}", f"step-{NUM_STEPS:06d}"]
    AutoModelForCausalLM.from_pretrained(exports / f"step-{NUM_STEPS:06d}")

    logs = {path: path.read_bytes() for path in killed.root.glob("logs/*.log")}
    killed.finish()  # the same command on a finished run starts no trainer
    assert killed.lines() == actual
    assert {path: path.read_bytes() for path in killed.root.glob("logs/*.log")} == logs
    print(cuts)  # noqa: T201 - where the kills fell, for -s
