"""The task of the real model cannot be solved by one answer, nor by values of the training rows."""

import importlib.util
import json
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("smollm2_task", Path(__file__).parents[1] / "examples/smollm2/task.py")
task = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(task)


def score(completion, answer='{"age": 31, "city": "Oslo"}'):
    return task.json_reward("", completion, [], [], answer)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"age": 31, "city": "Oslo"}', 1.0),
        ('{\n "city": "Oslo",\n "age": 31}', 1.0),
        ('{"age": "31", "city": "Oslo"}', 0.0),
        ('{"age": 31, "city": " Oslo"}', 0.0),
        ('{"age": 31}', 0.0),
        ('{"age": 31, "city": "Oslo", "pet": "dog"}', 0.0),
        ('```json\n{"age": 31, "city": "Oslo"}\n```', 0.0),
        ('[{"age": 31, "city": "Oslo"}]', 0.0),
        ("31", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_asked_keys_with_their_values_are_rewarded(completion, reward):
    assert score(completion) == reward


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_constant_answer_scores_a_tenth(seed):
    rows = task.make_rows(96, seed=10_000 + seed, held_out=True)
    assert task.best_constant(rows) <= 0.1
    assert [sum(row["data_source"].startswith(str(count)) for row in rows) for count in range(1, 5)] == [24] * 4
    trained = {value for texts in task.VALUES.values() for value in texts.split()}
    for row in rows:
        assert not trained.intersection(map(str, json.loads(row["answer"]).values()))
        sentence = row["messages"][-1]["content"].split(" Keys: ")[0]
        assert all(str(value) in sentence for value in json.loads(row["answer"]).values())
