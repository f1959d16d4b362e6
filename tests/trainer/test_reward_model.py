"""Scores of whole sequences, and the trap of texts that end with padding."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal.data.pack import take
from areal.data.supervised_rows import EncodedPair, EncodedRow
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.trainer.reward_model import padding_trap, sequence_scores
from tests.expect import raises_code
from tests.trainer import row_cases as cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    cases.write_models(folder)
    return folder


def engine_of(folder: Path, role: str = "reward"):
    name = "reward" if role == "reward" else "policy"
    config = cases.TrainEngineConfig(path=str(folder / name), dtype="float32")
    return build_fsdp_engine(config, role=role, total_steps=0, mesh=TrainerMesh.open(None), seed=0)


def test_every_sequence_of_a_packed_batch_has_its_score(folder):
    """In the order of the batch, whatever their number and order."""
    rows = [side for pair in cases.make_pairs() for side in (pair.chosen, pair.rejected)]
    batch = cases.SFTTask(engine_of(folder, "actor"), cases.SFTOptions()).batch_of(rows)
    engine = engine_of(folder)
    actual = sequence_scores(engine, batch)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([row.token_ids])).logits[0, 0] for row in rows])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(sequence_scores(engine, take(batch, [5, 0])), expected[[5, 0]], rtol=0, atol=1e-5)
    assert sequence_scores(engine, take(batch, [])).shape == (0,)


def test_a_language_model_has_no_scores(folder):
    batch = cases.SFTTask(engine_of(folder, "actor"), cases.SFTOptions()).batch_of([cases.make_pairs()[0].chosen])
    with raises_code("training.stage_missing", "scores"):
        sequence_scores(engine_of(folder, "actor"), batch)


@pytest.mark.parametrize(("padding", "warns"), [(None, False), (5, False), (9, True), (7, True)])
def test_texts_that_end_with_padding_give_a_warning(tmp_path, padding, warns):
    """transformers scores at the last token that is not padding."""
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": padding}))
    sides = [EncodedRow(token_ids=[5, end], loss_mask=[0, 1]) for end in (7, 9)]
    trap = padding_trap(tmp_path, [EncodedPair(chosen=sides[0], rejected=sides[1])])
    assert bool(trap) is warns
    if warns:
        assert f"token {padding}, which is pad_token_id in config.json" in trap
