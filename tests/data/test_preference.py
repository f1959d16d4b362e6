"""Pairs of answers: every form the columns may have gives the tokens of supervised fine-tuning."""

import json

import pytest

from areal.api.config import DatasetConfig, TrainDatasetConfig, ValidDatasetConfig
from areal.data.dataset import load_pairs
from areal.data.supervised_rows import encode_pair, encode_sft_row
from tests.expect import raises_code

USER = {"role": "user", "content": "2+2?"}
PICTURE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "2+2="}]}
GOOD, BAD = {"role": "assistant", "content": "four"}, {"role": "assistant", "content": "five!"}


def texts(pair, tokenizer) -> list[str]:
    return [tokenizer.decode(side.token_ids) for side in (pair.chosen, pair.rejected)]


def answers(pair, tokenizer) -> list[str]:
    """What the masks mark."""
    return [
        tokenizer.decode([t for t, on in zip(side.token_ids, side.loss_mask, strict=True) if on])
        for side in (pair.chosen, pair.rejected)
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER], "chosen": "four", "rejected": "five!"},
        {"prompt": [USER], "chosen": "four", "rejected": "five!"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_conversations_in_every_form_are_the_same(tokenizer, row):
    pair = encode_pair(row, tokenizer)
    assert pair.chosen == encode_sft_row({"messages": [USER], "answer": "four"}, tokenizer)
    assert pair.rejected == encode_sft_row({"messages": [USER, BAD]}, tokenizer)
    assert answers(pair, tokenizer) == ["four<|im_end|>", "five!<|im_end|>"]
    assert pair.num_tokens == len(pair.chosen.token_ids) + len(pair.rejected.token_ids)


def test_plain_text_with_a_prompt(tokenizer):
    pair = encode_pair({"prompt": "2+2=", "chosen": "4", "rejected": "51"}, tokenizer)
    assert texts(pair, tokenizer) == ["2+2=4<|im_end|>", "2+2=51<|im_end|>"]
    assert answers(pair, tokenizer) == ["4<|im_end|>", "51<|im_end|>"]


def test_whole_texts_share_their_prompt(tokenizer):
    """As in hh-rlhf: what both begin with is not the answer; the tokens that differ first are."""
    pair = encode_pair({"chosen": "Q: 2? A: 4", "rejected": "Q: 2? A: 51"}, tokenizer)
    assert texts(pair, tokenizer) == ["Q: 2? A: 4<|im_end|>", "Q: 2? A: 51<|im_end|>"]
    assert answers(pair, tokenizer) == ["4<|im_end|>", "51<|im_end|>"]
    shorter = encode_pair({"chosen": "abc", "rejected": "abcd"}, tokenizer)
    assert answers(shorter, tokenizer) == ["<|im_end|>", "d<|im_end|>"]
    ended = encode_pair({"chosen": "a<|im_end|>", "rejected": "b"}, tokenizer)
    assert texts(ended, tokenizer) == ["a<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "code", "value"),
    [
        ({"prompt": "a", "chosen": "b"}, "data.missing_column", "'rejected'"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "data.missing_column", "'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "data.invalid_column", "chosen"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "data.invalid_column", "'chosen'"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "data.invalid_column", "'rejected'"),
        ({"chosen": [USER, GOOD], "rejected": []}, "data.invalid_column", "[]"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]}, "data.invalid_column", "'images'"),
        ({"chosen": [PICTURE, GOOD], "rejected": [PICTURE, BAD]}, "data.invalid_column", "images"),
    ],
)
def test_wrong_rows_are_named(tokenizer, tmp_path, row, code, value):
    with raises_code(code, value):
        encode_pair(row, tokenizer)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" + json.dumps(row) + "\n")
    with raises_code(code, "rows.jsonl, row 1", value):
        load_pairs(DatasetConfig(path=str(path), type="rw"), tokenizer, default_split="train")


def test_images_are_refused_in_the_column_that_the_run_names(tokenizer, tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"pictures": item}) + "\n" for item in ([], ["a.png"])))
    with raises_code("data.invalid_column", "rows.jsonl, row 1", "'pictures'"):
        load_pairs(DatasetConfig(path=str(path), type="rw"), tokenizer, default_split="train", image_key="pictures")


def test_margins_are_read_only_when_asked_for(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert encode_pair({**row, "margin": 2}, tokenizer).margin == 0.0
    assert encode_pair({**row, "margin": 2}, tokenizer, use_margin=True).margin == 2.0
    for wrong in (None, "2", float("inf"), True):
        with raises_code("data.invalid_column", "'margin'"):
            encode_pair({**row, "margin": wrong}, tokenizer, use_margin=True)
    with raises_code("data.invalid_column", "'margin'"):
        encode_pair(row, tokenizer, use_margin=True)


@pytest.fixture
def long_pairs(tmp_path) -> str:
    """Sides of 4 and 4, of 4 and 8, of 15 and 16 tokens with the end token."""
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
        {"prompt": "ab", "chosen": "c", "rejected": "ddddd"},
        {"prompt": "abcdefghijkl", "chosen": "mn", "rejected": "opq"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path, tokenizer, cls=TrainDatasetConfig, **fields):
    return load_pairs(cls(path=path, type="rw", **fields), tokenizer, default_split="train")


def test_long_sides_are_dropped_refused_or_cut(tokenizer, long_pairs):
    assert len(load(long_pairs, tokenizer)) == 3
    assert len(load(long_pairs, tokenizer, max_length=8)) == 2
    assert len(load(long_pairs, tokenizer, max_length=7)) == 1
    with raises_code("data.too_long", "row 2", 16, "max_length=15"):
        load(long_pairs, tokenizer, max_length=15, truncation="error")
    *_, left = load(long_pairs, tokenizer, max_length=7, truncation="left")
    assert texts(left, tokenizer) == ["ijklmn<|im_end|>", "jklopq<|im_end|>"]
    assert answers(left, tokenizer) == ["mn<|im_end|>", "opq<|im_end|>"]
    *_, right = load(long_pairs, tokenizer, max_length=14, truncation="right")
    assert texts(right, tokenizer) == ["abcdefghijklmn", "abcdefghijklop"]
    assert answers(right, tokenizer) == ["mn", "op"]


def test_pairs_that_a_cut_left_without_a_difference_are_left_out(tokenizer, long_pairs, tmp_path):
    late = tmp_path / "late.jsonl"
    rows = [{"prompt": "ab", "chosen": chosen, "rejected": rejected} for chosen, rejected in (("cd", "ce"), ("d", "c"))]
    late.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (kept,) = load(str(late), tokenizer, max_length=3, truncation="right")
    assert texts(kept, tokenizer) == ["abd", "abc"]
    assert len(load(long_pairs, tokenizer, max_length=12, truncation="right")) == 2
    with raises_code("data.no_rows", "max_length=2"):
        load(long_pairs, tokenizer, max_length=2, truncation="right")


def test_max_rows_counts_what_is_kept(tokenizer, long_pairs):
    kept = load(long_pairs, tokenizer, cls=ValidDatasetConfig, max_rows=1)
    assert texts(kept[0], tokenizer) == ["abc<|im_end|>", "abd<|im_end|>"]
    assert len(kept) == 1
