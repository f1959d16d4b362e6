"""Rows of every kind of file, and what is wrong with a file."""

import sys

import pytest

from areal.api.config import DatasetConfig, TrainDatasetConfig
from areal.data.dataset import load_rows
from areal.data.row_check import file_problem
from tests.expect import raises_code


def load(path):
    return load_rows(DatasetConfig(path=path), default_split="train")


def test_separated_values_are_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a, ""b""\nc",007\n', encoding="utf-8")
    assert load(str(path)) == [{"prompt": 'a, "b"\nc', "answer": "007"}]
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\na,b\t1\n")
    assert load(str(tmp_path / "rows.tsv")) == [{"prompt": "a,b", "answer": "1"}]
    for line in ("a", "a,1,2", '"a'):
        path.write_text(f"prompt,answer\n{line}\n")
        with raises_code("data.invalid_file", "rows.csv:"):
            load(str(path))


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "rows.feather"])
def test_rows_of_columns(tmp_path, name):
    pa = pytest.importorskip("pyarrow")
    feather, parquet = pytest.importorskip("pyarrow.feather"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": str(n)}], "answer": n} for n in range(5)]
    table, path = pa.Table.from_pylist(rows), tmp_path / name
    if name == "stream.arrow":  # the form that `datasets` writes
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif name == "rows.feather":
        feather.write_feather(table, path, compression="uncompressed", chunksize=2)
    else:
        parquet.write_table(table, path, row_group_size=2)
    assert load(str(path)) == rows
    assert load_rows(TrainDatasetConfig(path=str(path)), default_split="train", first=1) == rows
    path.write_bytes(b"no such format")
    with raises_code("data.invalid_file", name):
        load(str(path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_byte_order_mark_belongs_to_no_row(tmp_path, name):
    text = {"rows.jsonl": '{"a": "1"}\n', "rows.json": '[{"a": "1"}]', "rows.csv": "a\n1\n"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load(str(tmp_path / name)) == [{"a": "1"}]
    assert file_problem(TrainDatasetConfig(path=str(tmp_path / name)), kind="") == ""


def test_a_separated_value_may_be_long(tmp_path):
    (tmp_path / "rows.csv").write_text("a\n" + "x" * 200_000 + "\n")
    (row,) = load(str(tmp_path / "rows.csv"))
    assert len(row["a"]) == 200_000


def test_a_repeated_column_name_is_refused(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    (tmp_path / "rows.csv").write_text("a,b,a\n1,2,3\n")
    table = pa.table([pa.array(["1"])] * 3, names=["a", "b", "a"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    feather.write_feather(table, tmp_path / "rows.feather", compression="uncompressed")
    for name in ("rows.csv", "rows.parquet", "rows.feather"):
        with raises_code("data.invalid_file", name, "'a'"):
            load(str(tmp_path / name))


@pytest.mark.parametrize(("encoding", "line"), [("latin-1", 3), ("utf-16", 1)])
def test_the_first_line_in_another_encoding_is_named(tmp_path, encoding, line):
    (tmp_path / "rows.csv").write_bytes("prompt\na\n\xe9\n".encode(encoding))
    with raises_code("data.invalid_file", f"rows.csv:{line} "):
        load(str(tmp_path / "rows.csv"))


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with raises_code("data.no_pyarrow", ".[parquet]"):
        load(str(tmp_path / "rows.parquet"))
