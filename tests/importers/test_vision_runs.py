"""AReaL's files for clevr_count_70k and geometry3k, with the choices of their scripts, train a small model."""

import base64
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from areal.cli.main import run_command
from areal.data.image_files import ImageFiles
from areal.ledger.audit import audit
from tests.faults.driver import ROOT
from tests.faults.test_kill_in_images import write_model

EXAMPLE = Path(__file__).parent / "examples" / "areal_v05_grpo.yaml"
DATASETS = {
    "clevr_count_70k": ("BUAADreams/clevr_count_70k", "<image>How many items are there in the image?", 112896),
    "geometry3k": ("hiyouga/geometry3k", "<image>Find x.", 200704),
}
"""Of a dataset: its name on the hub, a question, and the limit of pixels of AReaL's script."""


def write_areal_file(folder: Path, name: str) -> Path:
    """In the form of the example of AReaL: the script, not the file, names workflow and reward."""
    text = EXAMPLE.read_text().replace("reward_fn: exact\n", "").replace("gsm8k-grpo", f"{name}-grpo")
    text = text.replace("path: DATA", f"path: {DATASETS[name][0]}").replace("skip_tokenizer_init", "enable_multimodal")
    for word, value in {"MODEL": "Qwen/Qwen2.5-VL-3B-Instruct", "ROOT": str(folder / "runs")}.items():
        text = text.replace(word, value)
    (folder / "areal.yaml").write_text(text)
    return folder / "areal.yaml"


@pytest.mark.parametrize("name", DATASETS)
def test_the_import_makes_the_choices_of_the_script(tmp_path, capsys, name):
    assert run_command(["config", "import", "areal", str(write_areal_file(tmp_path, name)), "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    result = {key: options[key]["value"] for key in ("workflow", "reward_fn", "train_dataset.map_fn")}
    assert result == {"workflow": "vision_rlvr", "reward_fn": name, "train_dataset.map_fn": name}
    assert options["valid_dataset.map_fn"]["value"] == name
    assert options["vision.max_pixels"]["value"] == DATASETS[name][2]


def write_rows(path: Path, question: str) -> None:
    """Synthetic rows with the columns of both datasets."""
    dice = random.Random(0)
    with open(path, "w") as file:
        for number in range(16):
            target = io.BytesIO()
            colour = tuple(dice.randrange(256) for _ in range(3))
            Image.new("RGB", (dice.randrange(40, 90), dice.randrange(40, 90)), colour).save(target, "JPEG")
            source = "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode()
            file.write(json.dumps({"images": [source], "problem": question, "answer": str(number % 7)}) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_a_run_of_the_imported_file(tmp_path, capsys, name):
    source, output = write_areal_file(tmp_path, name), tmp_path / "ours.yaml"
    assert run_command(["config", "import", "areal", str(source), "-o", str(output)]) == 0
    write_model(tmp_path / "model", context_length=512, max_pixels=112 * 112)
    write_rows(tmp_path / "rows.jsonl", DATASETS[name][1])
    changes = {
        "actor.path": tmp_path / "model", "tokenizer_path": tmp_path / "model",
        "train_dataset.path": tmp_path / "rows.jsonl",
        "valid_dataset.path": tmp_path / "rows.jsonl", "allocation_mode": "native:d1+fsdp:d1",
        "cluster.n_gpus_per_node": 0, "cluster.fileroot": tmp_path / "runs", "total_train_steps": 3,
        "train_dataset.batch_size": 4, "gconfig.n_samples": 2, "gconfig.max_new_tokens": 6, "actor.dtype": "float32",
        "rollout.consumer_batch_size": 4, "actor.group_size": 2, "actor.reward_norm.group_size": 2,
        "native.context_length": 512, "native.dtype": "float32", "actor.gradient_checkpointing": "false",
        "ref.path": tmp_path / "model", "ref.dtype": "float32", "actor.kl_ctl": 0.1,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in changes.items()]
    done = subprocess.run(
        [sys.executable, "-m", "areal.launcher.local", "--config", str(output), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    folder = tmp_path / "runs" / f"{name}-grpo" / "trial0"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 3
    distances = [step["batch/ref_kl"] for step in steps if "batch/ref_kl" in step]
    assert len(distances) == 3
    assert distances[0] < 1e-9 < max(distances)  # the reference sees the images too
    report = audit(folder / "ledger")
    assert report.is_clean
    assert ImageFiles(folder / "images").unreachable(())
