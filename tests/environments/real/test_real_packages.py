"""The adapters against the real packages: equal rewards, exact token spans, and kills in the middle of a run."""

import asyncio
import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from areal.data.dataset import environment_rows
from areal.environments.reasoning_gym import ReasoningGymWorkflow
from areal.environments.textarena import TextArenaWorkflow
from areal.environments.workflow import NemoGymWorkflow, OpenEnvWorkflow, VerifiersWorkflow
from tests.agent.policies import ScriptedEngine
from tests.environments.environment_kit import build, kill_worker_then_controller, policy, run_of, trained_text
from tests.faults.driver import ROOT

PYTHON = ROOT / ".venv-environments/bin/python"
VERIFIERS = ROOT / ".venv-verifiers/bin/python"
NEMO_GYM = ROOT / ".venv-nemo-gym/bin/python"
OWN = Path(__file__).parent / "own_rewards.py"
EPISODES = 256


def by_package(kind, asked, python=PYTHON):
    """What the package itself says, in another process."""
    inputs = json.dumps(asked)
    done = subprocess.run([python, OWN, kind], input=inputs, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)


async def played(workflow, asked):
    """The rewards of the sessions of each episode, whose policy gives the answers of `asked` one after another."""
    result = []
    try:
        for row, answers in asked:
            left = list(answers)
            group = await workflow.arun_episode(policy(lambda _, left=left: left.pop(0)), row)
            texts = [trained_text(trajectory).split("<|im_end|>")[:-1] for trajectory in group.trajectories]
            used = answers[: len(answers) - len(left)]
            assert sorted(text for item in texts for text in item) == sorted(used)
            assert len(texts) > 1 or texts[0] == used
            result.append([trajectory.reward for trajectory in group.trajectories])
    finally:
        await workflow.aclose()
    return result


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "countdown"])
async def test_rewards_of_reasoning_gym_are_those_of_the_package(name) -> None:
    rows = environment_rows(f"env:{name}?size={EPISODES}&seed=5")
    references = by_package("reference", [(row, []) for row in rows])
    answers = [text if k % 3 else references[(k + 1) % EPISODES] for k, text in enumerate(references)]
    expected = by_package("reasoning_gym", [(row, [text]) for row, text in zip(rows, answers, strict=True)])
    workflow = build(ReasoningGymWorkflow, python=str(PYTHON))
    asked = [(row, [f"<answer>{text}</answer>"]) for row, text in zip(rows, answers, strict=True)]
    assert await played(workflow, asked) == [[value] for value in expected]
    assert 0.5 < sum(value == 1 for value in expected) / EPISODES < 0.8


MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Nim-v0": [f"[{pile} {count}]" for pile in range(3) for count in (1, 2, 3)],
    "TicTacToe-v0": [f"[{cell}]" for cell in range(9)],
}


@pytest.mark.parametrize("name", MOVES)
async def test_rewards_of_games_are_those_of_the_package(name) -> None:
    rows = environment_rows(f"env:{name}?size={EPISODES}&seed=5")
    asked = [(row, random.Random(row["index"]).choices(MOVES[name], k=64)) for row in rows]
    workflow = build(TextArenaWorkflow, python=str(PYTHON))
    assert await played(workflow, asked) == by_package("textarena", asked)


async def test_rewards_of_an_openenv_server_are_those_of_its_class() -> None:
    rows = environment_rows(f"env:guessing?size={EPISODES}&seed=5")
    asked = [(row, random.Random(row["index"]).choices("0123456789", k=4)) for row in rows]
    workflow = build(OpenEnvWorkflow, python=str(PYTHON), env=str(ROOT / "examples/environments/guess_server.py:app"))
    assert await played(workflow, asked) == [[value] for value in by_package("openenv", asked)]


SUMS, PRODUCTS = ROOT / "tests/environments/real/sums_taskset.py", ROOT / "examples/environments/products.py"


async def at_once(play, asked, *, number=16):
    """The results of `play` for all of `asked`, of which this number run at the same time."""
    result = []
    for first in range(0, len(asked), number):
        result += await asyncio.gather(*map(play, asked[first : first + number]))
    return result


async def test_rewards_of_a_taskset_of_verifiers_are_those_of_the_package() -> None:
    rows = environment_rows(f"env:{SUMS}?size={EPISODES}&seed=5&terms=3")
    right = by_package("verifiers_answer", [(row, []) for row in rows], VERIFIERS)
    answers = [text if k % 3 else f"about {text}" for k, text in enumerate(right)]
    asked = [(row, [text]) for row, text in zip(rows, answers, strict=True)]
    workflow = build(VerifiersWorkflow, python=str(VERIFIERS))

    async def play(item):
        row, (text,) = item
        group = await workflow.arun_episode(policy(lambda _: text), row)
        assert trained_text(group.trajectories[0]) == f"{text}<|im_end|>"
        return [group.trajectories[0].reward, {"letters": group.stats["reward/letters"]}]

    try:
        result = await at_once(play, asked)
    finally:
        await workflow.aclose()
    assert result == by_package("verifiers", asked, VERIFIERS)
    assert len({reward for reward, _ in result}) > 3


def calculate(prompt: str) -> str:
    """Calls the calculator, then repeats what it says; every third product is guessed."""
    first, other = map(int, re.findall(r"What is (\d+)\*(\d+)", prompt)[-1])
    if (first + other) % 3 == 0:
        return str(first + other)
    if results := re.findall(r"<\|im_start\|>tool\n(\d+)<\|im_end\|>", prompt):
        return results[-1]
    arguments = json.dumps({"expression": f"{first}*{other}"})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


async def test_a_tool_of_verifiers_answers_the_calls_of_the_policy() -> None:
    rows = environment_rows(f"env:{PRODUCTS}?size={EPISODES}&seed=5")
    workflow = build(VerifiersWorkflow, python=str(VERIFIERS))

    async def play(row):
        engine = ScriptedEngine(calculate)
        group = await workflow.arun_episode(engine, row)
        texts = trained_text(group.trajectories[0]).split("<|im_end|>")[:-1]
        assert len(texts) == len(engine.requests) == group.stats["num_turns"]
        return (row, texts), [group.trajectories[0].reward, {"turns": group.stats["reward/turns"]}]

    try:
        played = await at_once(play, rows)
    finally:
        await workflow.aclose()
    asked, result = map(list, zip(*played, strict=True))
    assert result == by_package("verifiers", asked, VERIFIERS)
    assert all(sum(reward == item for item, _ in result) > 64 for reward in (0.0, 1.0))


def text_answers(task, right):
    """Forms of an answer, that of the task or another one."""
    value = task.get("expected_answer", "") if right else "Z"
    return [f"It is \\boxed{{{value}}}.\nFinal answer: {value}\n{value}"]


def listed(task, right):
    return ['1. "a": b\n2. "c": d\n3. "e": f' if right else "none"]


def weather(task, right):
    return [["get_weather", {"city": "sf"}], "cold"] if right else ["cold"]


def counted(task, right):
    first, second = map(int, re.findall(r"\d+", task["responses_create_params"]["input"][0]["content"]))
    calls = [["increment_counter", {"count": count}] for count in (first, second if right else second + 1)]
    return [*calls, ["get_counter_value", {}], "done"]


def followed(task, right):
    return ["yes"] * len(task["follow_ups"]) + [task["expected_answer"] if right else "no"]


def written(answer):
    """An answer as the policy writes it."""
    if isinstance(answer, str):
        return answer
    return f'<tool_call>\n{{"name": "{answer[0]}", "arguments": {json.dumps(answer[1])}}}\n</tool_call>'


SERVERS = {
    "string_match": text_answers,
    "mcqa": text_answers,
    "format_verification": listed,
    "example_single_tool_call": weather,
    "example_session_state_mgmt": counted,
    "example_multi_turn_gymnasium": followed,
}


@pytest.mark.parametrize("server", SERVERS)
async def test_rewards_of_a_resources_server_are_those_of_its_application(server) -> None:
    (examples,) = by_package("nemo_gym_examples", [({"server": server}, [])], NEMO_GYM)
    short = [task for task in examples if len(json.dumps(task)) < 6000]
    tasks = [short[k % len(short)] for k in range(EPISODES)]
    answers = [SERVERS[server](task, k % 3 != 0) for k, task in enumerate(tasks)]
    named = [(task | {"server": server}, item) for task, item in zip(tasks, answers, strict=True)]
    expected = by_package("nemo_gym", named, NEMO_GYM)
    asked = [(task, [written(each) for each in some]) for task, some in zip(tasks, answers, strict=True)]
    workflow = build(NemoGymWorkflow, python=str(NEMO_GYM), env=server)
    assert await played(workflow, asked) == [[reward] for reward in expected]
    assert {*expected} >= {0.0, 1.0}


RUNS = {
    "reasoning_gym": ("env:chain_sum?size=200&seed=1", {"args": {"extract": False}, "curriculum": {"target": 0.5}}),
    "openenv": ("env:guessing?size=200&seed=1", {"env": str(ROOT / "examples/environments/guess_server.py:app")}),
    "verifiers": (f"env:{SUMS}?size=200&seed=1", {"python": str(VERIFIERS)}),
    "nemo_gym": ("ROWS_FILE", {"python": str(NEMO_GYM), "env": "string_match"}),
}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_environment_and_a_killed_controller_lose_and_repeat_nothing(kind, tmp_path) -> None:
    rows, args = RUNS[kind]
    if rows == "ROWS_FILE":
        row = {"responses_create_params": {"input": "2 + 2 ="}, "expected_answer": "4", "extraction_mode": "last_line"}
        rows = tmp_path / "rows.jsonl"
        rows.write_text(200 * (json.dumps(row) + "\n"))
    run = run_of(tmp_path, kind, str(rows), {"python": str(PYTHON), **args})
    kill_worker_then_controller(run)
    if kind == "reasoning_gym":
        lines = [json.loads(line) for line in (run.folder / "environments/levels.jsonl").read_text().splitlines()]
        begun = [line["episode"] for line in lines if line["event"] == "begin"]
        assert len(begun) == len(set(begun)), "an episode has two levels"
