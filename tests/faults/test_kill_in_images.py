"""The controller dies while it writes images, and between an image and its episode: nothing is lost."""

import base64
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from areal.api.table import images_of
from areal.data.image_files import ImageFiles
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer
from areal.ledger.audit import audit
from areal.ledger.event_files import LedgerReader, PayloadReader
from areal.ledger.payload import read_table
from examples.vision.tiny_vision import tiny_vision_model, write_image_processor
from tests.faults.driver import ROOT, Run
from tests.faults.kill_in_images.sitecustomize import STAGES
from tests.faults.ledger_proof import check_episodes, check_steps, check_versions, check_weights, raw_events

pytestmark = pytest.mark.slow
STEPS, ROWS = 8, 24
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
CONFIG = """
experiment_name: faults
trial_name: run
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: RUNS}
total_train_epochs: 9
total_train_steps: 8
train_dataset: {path: DATA/train.jsonl, batch_size: 4}
workflow: vision_rlvr
reward_fn: HERE/reward.py:share_of_a
gconfig: {n_samples: 2, max_new_tokens: 4}
rollout: {max_head_offpolicyness: 2, health_check_interval_s: 0.5, keep_payloads: "8"}
native: {dtype: float32, max_running_requests: 16, context_length: 64}
actor:
  path: DATA/model
  dtype: float32
  weight_update_mode: xccl
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
recover: {mode: auto, freq_steps: 3, retries: 9}
"""
REWARD = '''"""A reward that a random model gets some of."""


def share_of_a(prompt, completion, prompt_ids, completion_ids, **row):
    return completion.count("a") / 4
'''


def write_model(folder: Path, *, context_length: int = 64, max_pixels: int = 56 * 56) -> None:
    tokens = ["<pad>", "<eos>", "<unk>", *IMAGE_TOKENS, *"abcd"]
    tokenizer = character_tokenizer(tokens, context_length=context_length, chat_template=TEMPLATE)
    tiny_vision_model(tokenizer, 0, width=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_image_processor(folder, max_pixels=max_pixels)


def write_data(folder: Path) -> None:
    write_model(folder / "model")
    dice, lines = random.Random(0), list[str]()
    for _ in range(ROWS):
        target = io.BytesIO()
        Image.new("RGB", (56, 56), tuple(dice.randrange(256) for _ in range(3))).save(target, "PNG")
        source = "data:image/png;base64," + base64.b64encode(target.getvalue()).decode()
        row = {"messages": [{"role": "user", "content": "<image>ab"}], "images": [source], "answer": "a"}
        lines.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


def test_a_kill_at_each_stage_of_the_write_of_an_image_loses_nothing(tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    killed.mkdir()
    write_data(tmp_path / "data")
    texts = {"DATA": tmp_path / "data", "RUNS": tmp_path, "HERE": tmp_path}
    config = CONFIG
    for name, path in texts.items():
        config = config.replace(name, str(path))
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("kill_in_images")))
    monkeypatch.setenv("AREAL_PRELOAD", "0")  # each process imports sitecustomize at its start
    monkeypatch.setenv("KILLED_IN_IMAGES", str(killed))
    run = Run(
        arguments=["--config", str(tmp_path / "config.yaml")],
        folder=tmp_path / "faults" / "run",
        log_path=tmp_path / "launcher.log",
    )
    run.start()
    try:
        run.wait_for_the_end()
    finally:
        run.abandon()
    assert run.exit_code == 0, run.log_path.read_text()[-3000:]
    assert [path.name.partition("-")[2] for path in sorted(killed.iterdir())] == list(STAGES)
    ledger, files = run.folder / "ledger", ImageFiles(run.folder / "images")
    events = raw_events(ledger)
    # the ledger writes in the background: a controller that dies at once has not written that it started
    assert sum(event["event"] == "started" for event in events) <= 1 + len(STAGES)
    _, differences = check_weights(events)
    assert check_episodes(events).problems + check_steps(events) + differences + check_versions(events) == []
    assert sum(event["event"] == "consumed" for event in events) == STEPS
    assert audit(ledger).is_clean
    used = set[str]()
    with PayloadReader(ledger) as reader:
        for event in LedgerReader(ledger).events():
            if event["event"] == "accepted":
                used |= {image.sha256 for row in images_of(read_table(reader, event)) for image in row}
    assert used
    assert all(files.read(digest) for digest in used)
    assert not list((run.folder / "images").glob("*/.*")), "no incomplete file remains"
    done = subprocess.run(
        [sys.executable, "-m", "areal.replay", "--run", str(run.folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
