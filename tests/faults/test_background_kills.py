"""Real runs that evaluate in the background, whose processes are killed in the middle of an evaluation.

Rewards of held-out rows wait while a file lies there, so each evaluation is under way for as long as the test wants.
"""

import json
from collections import Counter

import pytest

from tests.faults.driver import Run
from tests.faults.ledger_proof import Event, raw_events
from tests.faults.schedule import EVERYTHING, TRAINERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BACK_S = 300.0
GOAL = 0.001
OPTIONS = (
    "evaluator.mode=background",
    "evaluator.freq_steps=4",
    "saver={freq_steps: 4, keep_last: 1, keep_best: eval/greedy/reward}",
    "recover.freq_steps=2",
    "reward.workers=4",  # two of them may wait for held-out rows
)
REWARD = """
import json
import pathlib
import time

HERE = pathlib.Path(__file__).parent
HELD_OUT = {json.loads(line)["prompt"] for line in (HERE / "held_out.jsonl").read_text().splitlines()}


def share_of_ones(prompt, completion, prompt_ids, completion_ids, **row):
    while prompt in HELD_OUT and (HERE / "hold").exists():
        time.sleep(0.02)
    return 0.01 + completion.count("1") / 8
"""


@pytest.fixture
def start(make_run, data, hold, tmp_path):
    """Starts a run with two held-out rows, whose rewards alone wait for `hold`, and trains six steps."""

    def make(*options: str) -> Run:
        rows = dict.fromkeys((data / "train.jsonl").read_text().splitlines())
        prompts = {json.loads(row)["prompt"] for row in rows}
        held_out = (data / "held_out.jsonl").read_text().splitlines()
        chosen = [row for row in held_out if json.loads(row)["prompt"] not in prompts][:2]
        assert len(chosen) == 2
        (tmp_path / "held_out.jsonl").write_text("\n".join(chosen) + "\n")
        (tmp_path / "held.py").write_text(REWARD)
        paths = (f"valid_dataset.path={tmp_path}/held_out.jsonl", f"reward_fn={tmp_path}/held.py:share_of_ones")
        run = make_run(*OPTIONS, *paths, *options)
        assert run.wait_for(lambda: bool(evaluated(run)), BACK_S), run.log_path.read_text()[-3000:]
        hold.touch()  # after the evaluation before training
        run.train_up_to(6)
        assert [event["step"] for event in evaluated(run)] == [0], "that after 4 steps waits, training does not"
        return run

    return make


def evaluated(run: Run) -> list[Event]:
    ledger = run.folder / "ledger"
    events = raw_events(ledger) if ledger.is_dir() else []
    return [event for event in events if event["event"] == "evaluated"]


def results_of(run: Run) -> dict[int, float]:
    """Version -> reward in the ledger. Each is there once."""
    events = evaluated(run)
    assert max(Counter(event["step"] for event in events).values()) == 1
    return {event["step"]: event["result"]["reward"] for event in events}


def reported(run: Run) -> dict[int, tuple[float, int]]:
    """Version -> reward in the metrics, and the train step after which it arrived. Each arrives once."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    arrived = [row for row in rows if "eval/version" in row]
    assert max(Counter(row["eval/version"] for row in arrived).values()) == 1
    return {int(row["eval/version"]): (row["eval/greedy/reward"], row["step"]) for row in arrived}


def check(run: Run) -> dict[int, tuple[float, int]]:
    result = reported(run)
    known = results_of(run)
    assert {version: reward for version, (reward, _) in result.items()} == {
        version: known[version] for version in result
    }
    assert all(step >= version for version, (_, step) in result.items())
    return result


@pytest.mark.parametrize("struck", ["server-0", "server-1", "controller", "trainer-1", "all"])
def test_a_result_arrives_once_with_its_version(start, hold, prove_all, struck):
    run = start("total_train_steps=14")
    before = run.pids(fresh=True)
    run.kill(EVERYTHING if struck == "all" else [struck])
    if struck == "all":
        run.start()
    children = EVERYTHING[1:]  # of the launcher
    back = children if struck == "all" else TRAINERS if struck in TRAINERS else (struck,)

    def is_back() -> bool:
        now = run.pids(fresh=True)
        return all(name in now and now[name] != before[name] and run.is_ready(name, now[name]) for name in back)

    assert run.wait_for(is_back, BACK_S), run.log_path.read_text()[-3000:]
    hold.unlink()
    run.wait_for_the_end()
    prove_all(run)
    result = check(run)
    assert max(result) == 14
    assert len(result) >= 3
    if struck == "trainer-1":
        assert 4 in result, "its server and the controller lived"
    scores = json.loads((run.folder / "checkpoints" / "scores.json").read_text())
    kept = {int(path.name[5:]) for path in (run.folder / "checkpoints" / "actor").glob("step-*")}
    known = {version: reward for version, (reward, _) in result.items()}
    exported = {step: reward for step, reward in known.items() if step in (4, 8, 12, 14)}
    assert {int(step): value for step, value in scores.items()} == exported
    assert {14, max(exported, key=lambda step: (exported[step], step))} <= kept


def test_the_goal_ends_a_run_whose_evaluation_was_lost(start, hold, prove_all):
    """The newest version is evaluated in its place. A rank that dies too may reach the goal after fewer steps."""
    run = start("total_train_steps=200", f"evaluator.stop_at={{greedy: {GOAL}}}")
    before = run.pids(fresh=True)["controller"]
    run.kill(["controller"])
    assert run.wait_for(lambda: run.pids(fresh=True).get("controller", before) != before, BACK_S)
    hold.unlink()
    run.wait_for_the_end()
    prove_all(run)
    first, *more = [step for version, (_, step) in check(run).items() if version]
    assert more == []
    consumed = [event["step"] for event in raw_events(run.folder / "ledger") if event["event"] == "consumed"]
    assert first == max(consumed) + 1 < 200, "the first result ends the run"
