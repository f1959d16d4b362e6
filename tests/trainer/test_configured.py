"""A run without a script: which rows, encoded how, reach the trainer that the configuration names."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import areal.trainer.reward_model
import areal.trainer.supervised
from areal.trainer.__main__ import run_configured

TRAINERS = {
    "sft": (areal.trainer.supervised, "SFTTrainer"),
    "rw": (areal.trainer.reward_model, "RewardModelTrainer"),
    "dpo": (areal.trainer.supervised, "DPOTrainer"),
}
ROWS = {
    "sft": [{"prompt": "ab", "answer": "c"}, {"prompt": "abc", "answer": "de"}],
    "rw": [
        {"prompt": "a", "chosen": "b", "rejected": "cd", "margin": 2},
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1},
    ],
}
ROWS["dpo"] = ROWS["rw"]
MODELS = {"sft": ["model"], "rw": ["model"], "dpo": ["actor", "ref"]}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """One token a letter; end = 1."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<eos>", *"abcde"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path, tokenizer_folder, monkeypatch):
    """Run a configuration; what the trainer was made with and whether it trained."""

    def start(kind: str, *overrides: str) -> dict:
        for name in ("train", "valid"):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
        config = {
            "experiment_name": "e",
            "trial_name": "t",
            "allocation_mode": "fsdp:d1",
            "train_dataset": {"path": str(tmp_path / "train.jsonl"), "type": "sft" if kind == "sft" else "rw"},
        }
        config |= {name: {"path": str(tokenizer_folder)} for name in MODELS[kind]}
        config[MODELS[kind][0]]["optimizer"] = {"lr": 1e-3}
        (tmp_path / "x.yaml").write_text(json.dumps(config))
        seen: dict = {}

        class Recorder:
            def __init__(self, config, *, train_dataset, valid_dataset):
                seen.update(config=config, train=train_dataset, valid=valid_dataset)

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                seen["ended"] = True

            def train(self):
                seen["trained"] = True

        module, name = TRAINERS[kind]
        monkeypatch.setattr(module, name, Recorder)
        run_configured(["--config", str(tmp_path / "x.yaml"), *overrides])
        assert seen["trained"]
        assert seen["ended"]
        return seen

    return start


def test_supervised_rows_are_encoded_as_asked(run, tmp_path):
    plain = run("sft")
    assert [row.token_ids for row in plain["train"]] == [[2, 3, 4, 1], [2, 3, 4, 5, 6, 1]]
    assert [row.loss_mask for row in plain["train"]] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert plain["valid"] is None
    valid = f"valid_dataset={{path: {tmp_path}/valid.jsonl, type: sft, max_rows: 1}}"
    whole = run("sft", "sft.train_on=all", "train_dataset.max_length=5", "train_dataset.truncation=left", valid)
    assert [row.token_ids for row in whole["train"]] == [[2, 3, 4, 1], [3, 4, 5, 6, 1]]
    assert {flag for row in [*whole["train"], *whole["valid"]] for flag in row.loss_mask} == {1}
    assert len(whole["valid"]) == 1


def test_pairs_are_encoded_as_asked(run, tmp_path):
    (first, second) = run("rw")["train"]
    assert (first.chosen.token_ids, first.rejected.token_ids) == ([2, 3, 1], [2, 4, 5, 1])
    assert (first.margin, second.margin) == (0.0, 0.0)
    valid = f"valid_dataset={{path: {tmp_path}/valid.jsonl, type: rw}}"
    seen = run("rw", "rw.use_margin=true", valid)
    assert [pair.margin for pair in seen["train"]] == [pair.margin for pair in seen["valid"]] == [2.0, -1.0]


def test_dpo_reads_the_same_pairs(run):
    seen = run("dpo", "train_dataset.max_length=3")
    assert [pair.rejected.token_ids for pair in seen["train"]] == [[2, 4, 1]]
    assert seen["config"].ref is not None
