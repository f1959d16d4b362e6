"""Datasets with images by their names: prompts, places of images, answers, and a reward that scores the answer 1."""

import pytest

from areal.api.config import DatasetConfig, VisionConfig
from areal.api.registry import load_function, registered
from areal.data.chat import encode_prompt
from areal.data.dataset import load_rows
from areal.data.image_files import ImageFiles
from areal.data.images import ImageWriter, PromptImages
from areal.data.row_files import READERS
from areal.data.supervised_rows import encode_sft_row
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer
from tests.api.test_images import LAYOUT
from tests.data.test_images import END, PAD, START, TEMPLATE, png
from tests.expect import raises_code

LETTERS = sorted({*map(chr, range(32, 127)), "\n"})
ROWS = {
    "clevr_count_70k": {"images": [{"bytes": png(), "path": None}], "problem": "<image>How many?", "answer": "3"},
    "geometry3k": {"images": [png(28, 28)], "problem": "<image>Find x.", "answer": "\\frac{1}{2}"},
    "virl39k": {"image": ["a.png", "b.png"], "question": "<image><image> Which?", "answer": "\\boxed{B}", "qid": "7"},
}
TOKENS = {"clevr_count_70k": [4], "geometry3k": [1], "virl39k": [4, 1]}
ANSWERS = {"clevr_count_70k": "[3]", "geometry3k": "\\boxed{\\frac{1}{2}}", "virl39k": "\\boxed{B}"}


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<pad>", "<eos>", "<unk>", "_", "~", "`", "?", *IMAGE_TOKENS[:3], " ", *IMAGE_TOKENS[3:]]
    return character_tokenizer(special + [item for item in LETTERS if item not in special], chat_template=TEMPLATE)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """rows(name) -> the mapped rows of a file with the row of that dataset."""
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(28, 28))

    def load(name, row=None):
        monkeypatch.setitem(READERS, ".rows", lambda path: iter([dict(row or ROWS[name])]))
        (tmp_path / "made.rows").touch()
        return load_rows(DatasetConfig(path=str(tmp_path / "made.rows"), map_fn=name), default_split="train")

    return load


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_chat_with_its_images(rows, tokenizer, tmp_path, name):
    (row,) = rows(name)
    assert row["answer"] == ANSWERS[name]
    assert not {"problem", "question"} & set(row)
    assert row.get("qid") == ROWS[name].get("qid")
    writer = ImageWriter(LAYOUT, ImageFiles(tmp_path / "images"), 56 * 56)
    images = PromptImages(writer, VisionConfig(root=str(tmp_path)), tokenizer)
    prompt = encode_prompt(row, tokenizer, images=images)
    expected = [part for count in TOKENS[name] for part in [START, *[PAD] * count, END]]
    assert list(prompt.token_ids)[: len(expected)] == expected
    trained = encode_sft_row(row, tokenizer, images=images)
    answer = [token for token, flag in zip(trained.token_ids, trained.loss_mask, strict=True) if flag]
    assert tokenizer.decode(answer[:-1]) == ANSWERS[name]
    reward = load_function(registered("rewards", name).target)
    assert reward("", f"So it is {row['answer']}.", [], [], answer=row["answer"]) == 1.0
    assert reward("", "I do not know.", [], [], answer=row["answer"]) == 0.0


def test_a_row_of_another_dataset_is_refused(rows):
    with raises_code("data.map_fn_failed", "'problem'"):
        rows("geometry3k", ROWS["virl39k"])
