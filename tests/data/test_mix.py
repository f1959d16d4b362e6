"""Lists of datasets and their weights."""

import json

import pytest

from areal.api.config import SFTConfig, TrainDatasetConfig, TrainEngineConfig, ValidDatasetConfig
from areal.data.dataset import load_rows
from areal.data.row_check import count_rows, mixed_counts
from tests.expect import raises_code


@pytest.fixture
def files(tmp_path):
    """Three files with 4, 2 and 1 rows."""
    made = []
    for name, size in (("a", 4), ("b", 2), ("c", 1)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(size)))
        made.append(str(path))
    return made


def prompts(config, split="train"):
    return [row["prompt"] for row in load_rows(config, default_split=split)]


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ([4, 2, 1], [], [4, 2, 1]),
        ([4, 2, 1], [1, 1, 1], [4, 4, 4]),
        ([4, 2, 1], [0.8, 0.1, 0.1], [16, 2, 2]),  # the second file is the scarcest: 2 / 0.1 = 20 rows
        ([1000, 10], [0.5, 0.5], [1000, 1000]),
        ([3, 7], [1, 3], [3, 9]),
        ([5], [2.0], [5]),
    ],
)
def test_a_mix_repeats_small_datasets_and_cuts_none(sizes, weights, expected):
    assert mixed_counts(sizes, weights) == expected


def test_the_rows_of_a_list_follow_one_another(files):
    assert prompts(TrainDatasetConfig(path=files)) == ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
    assert prompts(TrainDatasetConfig(path=files[1:2])) == ["b0", "b1"]
    assert prompts(ValidDatasetConfig(path=files[1:], max_rows=2), "test") == ["b0", "b1"]


def test_weights_repeat_rows(files):
    result = prompts(TrainDatasetConfig(path=files, weights=[2, 1, 1]))
    assert result == ["a0", "a1", "a2", "a3", "b0", "b1", "c0", "c0"]


def test_an_empty_dataset_of_a_list_is_named(files, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with raises_code("data.no_rows", str(empty)):
        load_rows(TrainDatasetConfig(path=[files[0], str(empty)]), default_split="train")


def test_the_launcher_counts_the_rows_of_the_mix(files):
    def count(**options):
        data = TrainDatasetConfig(type="sft", **options)
        return count_rows(SFTConfig(train_dataset=data, model=TrainEngineConfig(path="m")))

    assert (count(path=files), count(path=files, weights=[2, 1, 1])) == (7, 8)
    assert count(path=[*files, "hub/name"]) is None


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"path": ["a", "b"], "weights": [1.0]}, "weights"),
        ({"path": ["a", "b"], "weights": [1.0, 0.0]}, "weights"),
        ({"path": []}, "path"),
        ({"path": ["a", ""]}, "path"),
    ],
)
def test_what_is_no_mix_is_refused(options, path):
    assert [problem[0] for problem in TrainDatasetConfig(**options).problems()] == [path]


def test_a_curriculum_chooses_and_orders_the_rows_of_an_epoch(files, tmp_path):
    (tmp_path / "order.py").write_text(
        "def harder(rows): return sorted(rows, key=lambda row: row['prompt'], reverse=True) + rows[:1]\n"
        "def broken(rows): return len(rows)\n"
        "def failing(rows): return rows['x']\n"
    )
    chosen = {"path": files[1:], "shuffle": False}
    config = TrainDatasetConfig(**chosen, curriculum=f"{tmp_path}/order.py:harder")
    assert prompts(config) == ["c0", "b1", "b0", "b0"]
    assert [row["prompt"] for row in load_rows(config, default_split="train", first=1)] == prompts(config)
    for name in ("broken", "failing"):
        with raises_code("data.curriculum_failed"):
            prompts(TrainDatasetConfig(**chosen, curriculum=f"{tmp_path}/order.py:{name}"))
    assert [path for path, _ in TrainDatasetConfig(path="x", curriculum="order.py:harder").problems()] == ["curriculum"]
    sft = TrainDatasetConfig(path="x", type="sft", shuffle=False, curriculum="order.py:harder")
    assert [path for path, _ in sft.problems()] == ["curriculum"]
