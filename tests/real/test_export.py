"""A trained run becomes a folder that transformers loads, with the files of the model that it began with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.texts import DIALOGUES
from tests.servers.real_server import ROOT

SAME = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def execute(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_export_loads_with_tied_embeddings_and_the_same_files(
    model_folder: Path, tmp_path: Path, method: str
) -> None:
    execute("examples/smollm2/prepare.py", str(tmp_path / "smollm2/data"))
    changes = [f"cluster.fileroot={tmp_path}", "total_train_steps=1"]
    changes += ["model.lora.rank=4", "model.optimizer.lr=1e-3"] if method == "lora" else []
    execute("-m", "areal", "run", "--config", "examples/smollm2/warm_up.yaml", *changes)
    printed = execute("-m", "areal", "export", str(tmp_path / "smollm2/warm_up"), "-o", str(tmp_path / "out"), "--json")
    folder = Path(json.loads(printed)["folder"])
    assert {name: (folder / name).read_bytes() for name in SAME} == {
        name: (model_folder / name).read_bytes() for name in SAME
    }
    assert json.loads((folder / "config.json").read_text()) == json.loads((model_folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    begin = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).state_dict()
    trained = {name for name, value in model.state_dict().items() if not torch.equal(value, begin[name])}
    assert ("model.embed_tokens.weight" in trained) == (method == "full")
    assert "model.layers.0.mlp.down_proj.weight" in trained
    before, after = (AutoTokenizer.from_pretrained(item) for item in (model_folder, folder))
    for messages in DIALOGUES:
        assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
