"""The task of the real model cannot be solved by one answer, nor by values of the training rows."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/smollm2"
NAMES = ("task", "agent", "agent_rows", "gsm8k")
with pytest.MonkeyPatch.context() as patch:  # scripts of other examples have the same names
    patch.syspath_prepend(str(EXAMPLE))
    task, agent, agent_rows, gsm8k = map(importlib.import_module, NAMES)
    for name in NAMES:
        del sys.modules[name]


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


class Policy:
    """An openai client whose answers are `texts`; keeps the last messages that it was asked with."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, model, messages):
        self.seen = [message["content"] for message in messages]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.texts.pop(0)))])


@pytest.mark.parametrize(
    ("call", "shown", "reward"),
    [
        ('{"lookup": "Leo"}', "Leo, 84, is a clerk.", 1.0),
        ('{"lookup": "Max"}', "no such person", 1.0),
        ("Leo", "no such person", 1.0),
        ('["lookup"]', "no such person", 1.0),
        ('{"lookup": []}', "no such person", 1.0),
    ],
)
async def test_the_agent_shows_what_the_policy_looks_up(call, shown, reward):
    row = {"messages": [{"role": "user", "content": "Person: Leo. Keys: age"}], "answer": '{"age": 84}'}
    policy = Policy(call, '{"age": 84}')
    assert await agent.run(row | {"people": {"Leo": "Leo, 84, is a clerk."}}, policy, None) == reward
    assert policy.seen[1:] == [call, shown]


@pytest.mark.parametrize("final", ["84", "", '{"age": "84"}', '{"age": 84, "job": "clerk"}', "["])
async def test_the_agent_gets_nothing_for_another_answer(final):
    row = {"messages": [], "answer": '{"age": 84}', "people": {}}
    assert await agent.run(row, Policy("{}", final), None) == 0.0


def test_rows_of_the_agent_hide_the_sentence_and_the_warm_up_looks_it_up():
    for row in agent_rows.agent_rows(20, seed=1, held_out=True):
        ((name, sentence),) = row["people"].items()
        assert sentence not in row["messages"][-1]["content"]
        assert name in row["messages"][-1]["content"]
        call, result, answer = agent_rows.dialogue(row)["messages"][2:]
        assert agent.lookup(row["people"], call["content"]) == sentence == result["content"]
        assert (call["role"], answer) == ("assistant", {"role": "assistant", "content": row["answer"]})


def test_a_row_of_gsm8k_becomes_a_dialogue():
    result = gsm8k.dialogue({"question": "1+1?", "answer": "#### 2"})
    assert [(message["role"], message["content"]) for message in result["messages"]] == [
        ("user", "1+1?"),
        ("assistant", "#### 2"),
    ]
