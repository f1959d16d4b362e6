"""All rows are checked for columns, types and sizes before any of them is tokenised."""

import json

import pytest

from areal.api.config import DatasetConfig, SFTConfig, TrainDatasetConfig, TrainEngineConfig
from areal.data import row_check
from areal.data.dataset import load_rows
from areal.data.row_check import column_problem, count_rows, file_problem, require_prompts, require_usable
from tests.expect import raises_code

GOOD = {"prompt": "1+1", "answer": "2"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft_config(train):
    return SFTConfig(train_dataset=train, model=TrainEngineConfig(path="m"))


@pytest.mark.parametrize(
    ("kind", "row", "code", "column"),
    [
        ("rl", GOOD, None, ""),
        ("rl", {"prompt": 7}, "data.invalid_column", "prompt"),
        ("rl", {"question": "x"}, "data.missing_column", "question"),
        ("rl", {"messages": []}, "data.invalid_column", "messages"),
        ("rl", {"messages": "hi"}, "data.invalid_column", "messages"),
        ("rl", {"messages": [{"role": "user"}]}, "data.invalid_column", "messages"),
        ("sft", GOOD, None, ""),
        ("sft", {"prompt": "x", "answer": 2}, "data.invalid_column", "answer"),
        ("sft", {"messages": [{"role": "assistant", "content": "x"}]}, None, ""),
        ("sft", {"messages": [{"role": "user", "content": "x"}]}, "data.invalid_column", "answer"),
        ("rw", {"chosen": "a", "rejected": "b"}, None, ""),
        ("rw", {"chosen": "a"}, "data.invalid_column", "rejected"),
        ("rw", {"chosen": ["a"], "rejected": 3}, "data.invalid_column", "rejected"),
    ],
)
def test_the_first_wrong_column_is_named(kind, row, code, column):
    result = column_problem(row, kind)
    assert (result.code if result else None) == code
    assert column in (result.text if result else "")


def test_a_bad_row_after_many_good_ones_is_found_with_counts_and_type():
    rows = [GOOD] * 500 + [{"prompt": 7}] + [GOOD] * 20 + [{"prompt": None}]
    with raises_code("data.invalid_column", "2 of 522", "row 500", "'prompt'", "int", "row 521"):
        require_prompts(rows)


def test_only_the_first_rows_are_named_and_the_others_counted():
    result = [column_problem({"prompt": index}, "rl") for index in range(9)]
    with raises_code("data.invalid_column", "9 of 9", "row 2 ", "6 more") as error:
        require_usable(result, "x")
    assert "row 3 " not in str(error.value)


def test_a_file_is_checked_before_the_start(tmp_path):
    path = write(tmp_path / "train.jsonl", [GOOD, {"prompt": 7}])
    assert "row 1" in file_problem(DatasetConfig(path=path), kind="rl")
    assert file_problem(DatasetConfig(path=path), kind="") == ""
    assert file_problem(DatasetConfig(path=path, map_fn="gsm8k"), kind="rl") == ""
    assert file_problem(DatasetConfig(path=str(tmp_path / "absent.jsonl")), kind="rl") == ""


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.feather"])
def test_rows_of_every_kind_of_file_are_checked_and_counted(tmp_path, name):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    feather, path = pytest.importorskip("pyarrow.feather"), tmp_path / name
    rows = [GOOD, {"prompt": None, "answer": "1"}, GOOD]
    if name == "rows.jsonl":
        write(path, rows)
    elif name == "rows.json":
        path.write_text(json.dumps(rows))
    elif name == "rows.parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        feather.write_feather(pa.Table.from_pylist(rows), path, compression="uncompressed", chunksize=2)
    train = TrainDatasetConfig(path=str(path))
    assert "row 1 " in file_problem(train, kind="rl")
    assert file_problem(train, kind="") == ""
    assert count_rows(sft_config(train)) == 3


def test_rows_of_separated_values_are_checked_and_counted(tmp_path):
    train = TrainDatasetConfig(path=str(tmp_path / "rows.csv"))
    (tmp_path / "rows.csv").write_text("question,answer\n1+1,2\n2+1,3\n")
    assert "2 of 2" in file_problem(train, kind="rl")
    assert count_rows(sft_config(train)) == 2


def test_the_rows_of_a_damaged_file_are_not_counted(tmp_path):
    pytest.importorskip("pyarrow")
    train = TrainDatasetConfig(path=str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert count_rows(sft_config(train)) is None
    assert "rows.parquet" in file_problem(train, kind="rl")


def test_a_line_that_is_no_object_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n\n[1]\n{"prompt"\n')
    result = file_problem(DatasetConfig(path=str(path), map_fn="gsm8k"), kind="rl")
    assert "2 of 3" in result
    assert "row 1" in result
    assert "row 2" in result


def test_a_large_file_is_read_in_part_or_not_at_all(tmp_path, monkeypatch):
    lines = write(tmp_path / "train.jsonl", [GOOD] * 10 + [{"prompt": 7}])
    (tmp_path / "train.json").write_text(json.dumps([{"prompt": 7}] * 10))
    monkeypatch.setattr(row_check, "MAX_FILE_BYTES", 60)
    assert file_problem(DatasetConfig(path=lines), kind="rl") == ""
    assert file_problem(DatasetConfig(path=str(tmp_path / "train.json")), kind="rl") == ""


@pytest.mark.parametrize("row", [{"prompt": "x" * 2001}, {"messages": [{"role": "user", "content": "x" * 2001}]}])
def test_a_text_above_max_characters_is_refused_before_it_is_tokenised(tmp_path, row):
    path = write(tmp_path / "train.jsonl", [GOOD, row])
    with raises_code("data.too_long", "row 1", 2001, "max_characters=2000"):
        load_rows(DatasetConfig(path=path, max_characters=2000), default_split="train")
    assert len(load_rows(DatasetConfig(path=path, max_characters=None), default_split="train")) == 2


def test_a_text_above_max_characters_is_dropped_where_long_rows_are_dropped(tmp_path):
    class Tokenizer:
        def encode(self, text, *, add_special_tokens=True):
            assert len(text) <= 2000
            return [1] * len(text)

    path = write(tmp_path / "train.jsonl", [GOOD, {"prompt": "x" * 2001}])
    config = DatasetConfig(path=path, max_characters=2000, max_length=50)
    assert load_rows(config, default_split="train", tokenizer=Tokenizer()) == [GOOD]
