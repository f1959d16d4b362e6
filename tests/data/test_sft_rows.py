"""Which tokens of a row are learned, and what becomes of rows that are too long."""

import json

import pytest

from areal.api.config import DatasetConfig
from areal.data.dataset import load_sft_rows
from areal.data.supervised_rows import encode_sft_row
from areal.workflow.conversation import tokens_after_answer
from tests.expect import raises_code

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def learned(row, tokenizer) -> str:
    """The learned tokens; a bar stands for each run of others."""
    words, inside = "", False
    for token, on in zip(row.token_ids, row.loss_mask, strict=True):
        words += tokenizer.decode([token]) if on else ("|" if inside else "")
        inside = bool(on)
    return words


def test_the_last_answer_alone_by_default(tokenizer):
    row = encode_sft_row({"messages": TURNS}, tokenizer)
    assert learned(row, tokenizer) == "yes<|im_end|>"
    assert tokenizer.decode(row.token_ids).startswith(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>"
    )


def test_every_answer_of_a_conversation(tokenizer):
    row = encode_sft_row({"messages": TURNS}, tokenizer, train_on="assistant")
    assert learned(row, tokenizer) == "four<|im_end|>|yes<|im_end|>"
    last = encode_sft_row({"messages": TURNS}, tokenizer)
    assert row.token_ids == last.token_ids  # this template shows past answers as it asks for new ones
    open_end = encode_sft_row({"messages": TURNS[:-1], "answer": "yes"}, tokenizer, train_on="assistant")
    assert open_end == row


def test_everything(tokenizer):
    row = encode_sft_row({"prompt": "2+2=", "answer": "4"}, tokenizer, train_on="all")
    assert (tokenizer.decode(row.token_ids), set(row.loss_mask)) == ("2+2=4<|im_end|>", {1})


@pytest.mark.parametrize("row", [{"prompt": "2+2=", "answer": "4"}, {"messages": TURNS[1:3]}])
def test_one_answer_is_the_last_and_every_one(tokenizer, row):
    assert encode_sft_row(row, tokenizer, train_on="assistant") == encode_sft_row(row, tokenizer)


class RewritingTemplate:
    """A tokenizer whose template asks for an answer with an empty thought, which past answers are shown without."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id, self.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.chat_template, self.added_tokens_decoder = tokenizer.chat_template, tokenizer.added_tokens_decoder

    def encode(self, text, *, add_special_tokens=True):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids, *, skip_special_tokens=False):
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, enable_thinking):
        text = self._tokenizer.apply_chat_template(
            conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )
        return text + ("<none>" if add_generation_prompt else "")


def test_a_template_that_rewrites_the_past_trains_each_answer_as_it_is_asked_for(tokenizer):
    rewriting = RewritingTemplate(tokenizer)
    row = encode_sft_row({"messages": TURNS[1:]}, rewriting, train_on="assistant")
    assert tokenizer.decode(row.token_ids) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<none>four<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<none>yes<|im_end|>"
    )
    assert learned(row, tokenizer) == "four<|im_end|>|yes<|im_end|>"


def test_the_tokens_between_answers_are_those_of_a_rollout(tokenizer):
    """A multi-turn workflow goes on from an answer with the same tokens."""
    row = encode_sft_row({"messages": TURNS}, tokenizer, train_on="assistant")
    between = tokens_after_answer(tokenizer, [{"role": "user", "content": "sure?"}])
    first = row.loss_mask.index(1) + len(tokenizer.encode("four", add_special_tokens=False))
    assert row.token_ids[first : first + len(between)] == between


def test_answers_without_text_are_refused(tokenizer):
    calls = {"role": "assistant", "content": None}
    with raises_code("data.invalid_column"):
        encode_sft_row({"messages": [TURNS[1], calls, *TURNS[3:]]}, tokenizer, train_on="assistant")


@pytest.fixture
def rows(tmp_path) -> str:
    """4 tokens and 12 with the end token."""
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "ab", "answer": "c"}, {"prompt": "abcdefg", "answer": "hijk"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def load(path, tokenizer, **fields):
    return load_sft_rows(DatasetConfig(path=path, type="sft", **fields), tokenizer, default_split="train")


@pytest.mark.parametrize(
    ("limit", "truncation", "text", "answer"),
    [
        (12, "left", "abcdefghijk<|im_end|>", "hijk<|im_end|>"),
        (7, "left", "fghijk<|im_end|>", "hijk<|im_end|>"),
        (3, "left", "jk<|im_end|>", "jk<|im_end|>"),
        (9, "right", "abcdefghi", "hi"),
    ],
)
def test_long_rows_may_be_cut(tokenizer, rows, limit, truncation, text, answer):
    row = load(rows, tokenizer, max_length=limit, truncation=truncation)[-1]
    assert (tokenizer.decode(row.token_ids), learned(row, tokenizer)) == (text, answer)


def test_long_rows_may_be_dropped_or_refused(tokenizer, rows):
    assert [len(load(rows, tokenizer, max_length=limit)) for limit in (12, 11)] == [2, 1]
    with raises_code("data.too_long", "rows.jsonl, row 1", 12, "max_length=11"):
        load(rows, tokenizer, max_length=11, truncation="error")


def test_a_cut_that_leaves_nothing_to_learn_leaves_the_row_out(tokenizer, rows):
    """The first token of a row is never predicted, so a row of one token teaches nothing."""
    assert len(load(rows, tokenizer, max_length=7, truncation="right")) == 1
    with raises_code("data.no_rows"):
        load(rows, tokenizer, max_length=1, truncation="left")


def test_images_that_the_model_cannot_take_are_refused(tokenizer, tmp_path):
    row = {"prompt": "2+2=", "answer": "4"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"pictures": item}) + "\n" for item in ([], ["a.png"])))
    data = DatasetConfig(path=str(path), type="sft")
    with raises_code("model.image_processor", "rows.jsonl, row 1", "pictures"):
        load_sft_rows(data, tokenizer, default_split="train", image_key="pictures")
    asked = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "2+2="}]}
    with raises_code("model.image_processor"):
        encode_sft_row({"messages": [asked], "answer": "4"}, tokenizer)
