import datetime
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal.api.config import (
    DatasetConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
    ValidDatasetConfig,
    check_config,
)
from areal.api.errors import ConfigError
from areal.data import dataset
from areal.data.dataset import load_rows, load_sft_rows
from areal.data.row_check import count_rows, file_problem
from areal.data.supervised_rows import encode_sft_row
from tests.expect import raises_code


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return str(path)

    return write


def load(path, **fields):
    tokenizer = fields.pop("tokenizer", None)
    return load_rows(DatasetConfig(path=path, **fields), default_split="train", tokenizer=tokenizer)


def refuse(path):
    raise PermissionError(13, "Permission denied", str(path))


def load_sft(path, tokenizer, *, train_on="last", **fields):
    config = DatasetConfig(path=path, type="sft", **fields)
    return load_sft_rows(config, tokenizer, default_split="train", train_on=train_on)


def test_lines_and_lists(jsonl):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    assert load(jsonl(*rows)) == rows
    assert load(jsonl(rows[0], "", rows[1])) == rows
    assert load(jsonl(json.dumps(rows), name="rows.json")) == rows


@pytest.mark.parametrize("name", ["rows.JSONL", "rows.jsonl.gz", "rows"])
def test_a_local_file_of_another_name_is_no_hub_dataset(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with raises_code("data.invalid_file", name, ".jsonl"):
        load(str(tmp_path / name))


def test_a_pattern_names_several_files_in_their_order(tmp_path):
    for number in (2, 1):
        (tmp_path / f"part-{number}.jsonl").write_text(f'{{"prompt": "{number}"}}\n')
    (tmp_path / "part-3.csv").write_text("prompt\n3\n")
    (tmp_path / "part-4.md").write_text("notes")
    pattern = f"{tmp_path}/part-*"
    assert [row["prompt"] for row in load(pattern)] == ["1", "2", "3"]
    train = TrainDatasetConfig(path=f"{tmp_path}/part-[12].jsonl")
    assert count_rows(SFTConfig(train_dataset=train, model=TrainEngineConfig(path="m"))) == 2
    (tmp_path / "part-2.jsonl").write_text("{}\n")
    assert "part-2.jsonl" in file_problem(train, kind="rl")
    with raises_code("data.not_found", "none-*"):
        load(f"{tmp_path}/none-*.jsonl")


def test_a_function_may_make_the_rows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def sums():\n    for n in range(3):\n        yield {'prompt': f'{n}+1='}\n"
        "def wrong():\n    return [1]\ndef breaks():\n    raise ValueError('no')\n"
    )
    rows = load(f"{tmp_path}/mine.py:sums")
    assert [row["prompt"] for row in rows] == ["0+1=", "1+1=", "2+1="]
    with raises_code("data.invalid_file", "row 0"):
        load(f"{tmp_path}/mine.py:wrong")
    with raises_code("data.rows_failed", "ValueError: no"):
        load(f"{tmp_path}/mine.py:breaks")


def test_columns_get_other_names_before_map_fn(jsonl, tmp_path):
    path = jsonl({"question": "q", "solution": "4", "level": 1})
    assert load(path, columns={"question": "prompt", "solution": "answer"}) == [
        {"prompt": "q", "answer": "4", "level": 1}
    ]
    (tmp_path / "mine.py").write_text("def add(row):\n    return row | {'prompt': row['text'] + '!'}\n")
    (row,) = load(path, columns={"question": "text"}, map_fn=f"{tmp_path}/mine.py:add")
    assert row["prompt"] == "q!"
    with raises_code("data.missing_column", "row 0", "'ask'"):
        load(path, columns={"ask": "prompt"})


def test_gsm8k_rows_become_chats(jsonl):
    path = jsonl({"question": "How many?", "answer": "Two and two.\n#### 4"})
    (row,) = load(path, map_fn="gsm8k")
    assert row["messages"][0]["role"] == "user"
    assert row["messages"][0]["content"].startswith("How many?")
    assert "####" in row["messages"][0]["content"]
    assert row["answer"].endswith("#### 4")


def test_own_map_fn_may_leave_rows_out(jsonl, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def odd(row):\n    return {'prompt': str(row['n'])} if row['n'] % 2 else None\n"
        "def breaks(row):\n    raise ValueError('no')\n"
        "def number(row):\n    return 1\n"
    )
    path = jsonl({"n": 1}, {"n": 2}, {"n": 3})
    assert load(path, map_fn=f"{tmp_path}/mine.py:odd") == [{"prompt": "1"}, {"prompt": "3"}]
    with raises_code("data.map_fn_failed", "row 0", "breaks", "ValueError: no"):
        load(path, map_fn=f"{tmp_path}/mine.py:breaks")
    with raises_code("data.invalid_file", "row 0", "int"):
        load(path, map_fn=f"{tmp_path}/mine.py:number")


def test_long_rows_are_left_out(jsonl, tokenizer):
    path = jsonl(
        {"prompt": "a", "answer": "1"}, {"prompt": "a" * 50, "answer": "1"}, {"prompt": "a", "answer": "9" * 50}
    )
    assert len(load(path, max_length=10, tokenizer=tokenizer)) == 2
    assert len(load_sft(path, tokenizer, max_length=10)) == 1
    with raises_code("data.no_rows", "max_length=1"):
        load_sft(path, tokenizer, max_length=1)
    with pytest.raises(ValueError, match="type=sft"):
        load(path, max_length=10, type="sft", tokenizer=tokenizer)
    with raises_code("data.too_long", "row 1", "50", "max_length=10"):
        load(path, max_length=10, truncation="error", tokenizer=tokenizer)
    with raises_code("data.no_tokenizer"):
        load(path, max_length=10)


def test_numbers_of_tokens_may_be_kept_for_the_next_run(jsonl, tmp_path, tokenizer, monkeypatch):
    path, cache = jsonl({"prompt": "a"}, {"prompt": "a" * 50}), tmp_path / "cache"
    how = {"max_length": 10, "tokenizer": tokenizer, "cache_dir": str(cache)}
    assert load(path, **how) == [{"prompt": "a"}]
    (kept,) = cache.iterdir()
    monkeypatch.setattr(dataset, "encode_prompt", None)
    assert load(path, **how) == [{"prompt": "a"}]
    assert len(load(path, **how | {"max_length": 50})) == 2
    monkeypatch.undo()
    for damage in (b"[1,", b'["a",1]', b"\xff"):
        kept.write_bytes(damage)
        assert len(load(path, **how)) == 1
    with monkeypatch.context() as others_file:
        others_file.setattr(Path, "read_bytes", refuse)
        assert len(load(path, **how)) == 1
    monkeypatch.setattr(tokenizer, "chat_template", "another")
    load(path, **how)
    load(jsonl({"prompt": "b"}), **how)
    assert len(list(cache.iterdir())) == 3
    with raises_code("data.cache_dir"):
        load(path, **how | {"cache_dir": path})


def test_rows_that_json_cannot_hold_are_counted_once_too(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "rows.py").write_text(
        "def rows():\n    return [{'prompt': 'a', 'id': 2**70}, {'prompt': 'b', 'raw': chr(0xD800)}]\n"
    )
    how = {"max_length": 10, "tokenizer": tokenizer, "cache_dir": str(tmp_path / "cache")}
    assert len(load(f"{tmp_path}/rows.py:rows", **how)) == 2
    monkeypatch.setattr(dataset, "encode_prompt", None)
    assert len(load(f"{tmp_path}/rows.py:rows", **how)) == 2


def test_validation_rows_may_be_limited(jsonl):
    path = jsonl({"a": 1}, {"a": 2})
    assert load_rows(ValidDatasetConfig(path=path, max_rows=1), default_split="test") == [{"a": 1}]
    assert len(load_rows(TrainDatasetConfig(path=path), default_split="train")) == 2
    assert load_rows(TrainDatasetConfig(path=path, max_rows=1), default_split="train") == [{"a": 1}]


def test_validation_rows_may_be_chosen_at_random_and_in_whole_batches(jsonl):
    path = jsonl(*({"a": number} for number in range(10)))

    def rows(**options):
        chosen = load_rows(ValidDatasetConfig(path=path, **options), default_split="test")
        return [row["a"] for row in chosen]

    assert rows(batch_size=4, drop_last=True) == list(range(8))
    assert rows(batch_size=4) == list(range(10))
    assert rows(shuffle=True, max_rows=4) == rows(shuffle=True)[:4] != list(range(4))
    assert sorted(rows(shuffle=True)) == list(range(10))
    with raises_code("data.too_few_rows"):
        rows(batch_size=11, drop_last=True)
    with raises_code("config.missing_requirement"):
        check_config(ValidDatasetConfig(path=path, drop_last=True))


def test_bad_files_are_named_with_their_line(jsonl):
    with raises_code("data.invalid_file", "rows.jsonl:2"):
        load(jsonl({"a": 1}, "{'a': 2}"))
    with raises_code("data.invalid_file", "rows.jsonl:1", "list"):
        load(jsonl("[1]"))
    with raises_code("data.invalid_file", "rows.json", "dict"):
        load(jsonl('{"a": 1}', name="rows.json"))
    with raises_code("data.not_found", "nowhere.jsonl"):
        load("nowhere.jsonl")
    with raises_code("data.no_rows"):
        load(jsonl(""))


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_rows_that_are_nested_too_deep_are_refused(jsonl, depth):
    row = '{"id": 1234567890123456789, "answer": ' + "[" * depth + "]" * depth + "}"
    with raises_code("data.invalid_file", "rows.jsonl:1"):
        load(jsonl(row))


def test_a_column_may_be_inside_another_one(jsonl):
    path = jsonl({"prompt": "p", "reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": 1})
    (row,) = load(path, columns={"reward_model.ground_truth": "answer", "a.b": "c"})
    assert row == {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": "4"}, "c": 1, "answer": "4"}
    for absent in ("reward_model.truth", "prompt.x", "reward_model.style.x"):
        with raises_code("data.missing_column", absent):
            load(path, columns={absent: "answer"})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_integer_that_would_become_a_float_is_refused(tmp_path, name):
    path, largest = tmp_path / name, 2**64 - 1
    text = '[{"answer": %d}]' if name == "rows.json" else '{"answer": %d}'
    for value in (largest, -(2**63)):
        path.write_text(text % value)
        assert load(str(path)) == [{"answer": value}]
    for value in (largest + 1, -(2**63) - 1):
        path.write_text(text % value)
        with raises_code("data.invalid_file", path, value):
            load(str(path))
    path.write_text(text.replace("%d", '"12345678901234567890123", "pi": 3.14159265358979323846'))
    assert load(str(path)) == [{"answer": "12345678901234567890123", "pi": 3.141592653589793}]


def test_a_new_name_replaces_a_column_wherever_it_is(jsonl):
    path = jsonl({"prompt": "old", "question": "new"}, {"question": "new", "prompt": "old"})
    assert load(path, columns={"question": "prompt"}) == [{"prompt": "new"}] * 2
    assert load(path, columns={"question": "prompt", "prompt": "question"})[0] == {"prompt": "new", "question": "old"}


def test_missing_columns_are_named_with_the_row(jsonl, tokenizer):
    path = jsonl({"question": "?", "answer": "1"}, {"text": "?"})
    with raises_code("data.map_fn_failed", "row 1", "gsm8k", "'question'", "['text']"):
        load(path, map_fn="gsm8k")
    with raises_code("data.missing_column", "row 0"):
        load(path, max_length=5, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        load(path, map_fn="gsm8")


def test_hub_names_need_the_optional_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_code("data.no_datasets_library"):
        load("openai/gsm8k")


def test_hub_names_and_saved_folders_go_to_the_library(monkeypatch, tmp_path):
    class FakeDatasets:
        class DatasetDict(dict):
            pass

        def __init__(self):
            self.calls = []

        def load_dataset(self, path, name, split, revision):
            self.calls.append((path, name, split, revision))
            if name == "wrong":
                raise ValueError("BuilderConfig 'wrong' not found.\nmore")
            return [{"a": 1}]

        def load_from_disk(self, path):
            has_splits = (Path(path) / "dataset_dict.json").is_file()
            return self.DatasetDict(train=[{"a": 2}]) if has_splits else [{"a": 3}]

    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load("openai/gsm8k", name="main", revision="v1") == [{"a": 1}]
    assert fake.calls == [("openai/gsm8k", "main", "train", "v1")]
    with raises_code("data.not_found", "BuilderConfig 'wrong' not found."):
        load("openai/gsm8k", name="wrong")
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert load(str(tmp_path)) == [{"a": 2}]
    with raises_code("data.not_found", "'dev'", "['train']"):
        load(str(tmp_path), split="dev")
    (tmp_path / "dataset_dict.json").rename(tmp_path / "dataset_info.json")
    assert load(str(tmp_path)) == [{"a": 3}]
    with raises_code("data.not_found", "'test'"):
        load(str(tmp_path), split="test")


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (datetime.datetime(2024, 1, 5), "the datetime 2024-01-05 00:00:00"), (datetime.date(2024, 1, 5), "2024-01-05"),
        (1e19, "the float 1e+19"), ({"ground_truth": [datetime.time(1, 2)]}, "the time 01:02:00"),
        (2.5, ""), (3.0, ""), ("2024-01-05", ""), (10**20, ""), (None, ""),
    ],
)  # fmt: skip
def test_an_answer_that_the_datasets_library_converted_is_refused(monkeypatch, answer, what):
    rows = [{"gold": "1", "created": datetime.datetime(2024, 1, 5)}, {"gold": answer, "created": None}]
    fake = SimpleNamespace(load_dataset=lambda path, name, split, revision: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    if what:
        with raises_code("data.converted_answer", what, "row 1", "gold"):
            load("user/set", columns={"gold": "answer"})
    else:
        assert load("user/set", columns={"gold": "answer"})[1]["answer"] == answer


def test_sft_rows_of_plain_text(tokenizer):
    encoded = encode_sft_row({"prompt": "12=", "answer": "21"}, tokenizer)
    assert tokenizer.decode(encoded.token_ids) == "12=21<|im_end|>"
    trained = [t for t, m in zip(encoded.token_ids, encoded.loss_mask, strict=True) if m]
    assert tokenizer.decode(trained) == "21<|im_end|>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
        {"messages": [{"role": "user", "content": "Hi"}], "answer": "Yes"},
    ],
)
def test_sft_rows_of_chats_end_with_the_end_token(tokenizer, row):
    encoded = encode_sft_row(row, tokenizer)
    assert tokenizer.decode(encoded.token_ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>"
    )
    trained = [t for t, m in zip(encoded.token_ids, encoded.loss_mask, strict=True) if m]
    assert tokenizer.decode(trained) == "Yes<|im_end|>"


def test_sft_rows_without_an_answer_are_named(tokenizer):
    with raises_code("data.missing_column", "['prompt']"):
        encode_sft_row({"prompt": "a"}, tokenizer)


def test_data_and_workflows_import_no_torch(tokenizer_folder):
    code = (
        "import sys\n"
        "from areal.data.dataset import load_rows\n"
        "from areal.data.tokenizer import load_tokenizer\n"
        "from areal.workflow.rlvr import RLVRWorkflow\n"
        "from areal.data.chat import encode_prompt\n"
        f"tokenizer = load_tokenizer({str(tokenizer_folder)!r})\n"
        "encode_prompt({'messages': [{'role': 'user', 'content': 'hello'}]}, tokenizer)\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
