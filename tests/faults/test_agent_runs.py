"""Real runs of agents in worker processes.

The controller with its session server, the agents or the connections of their clients are struck at every stage of a
turn: each turn is trained on once or never, and no turn is lost. A run is trained again with other rewards, another
discount and another cut.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from areal.api.data import TURN_REWARDS
from areal.api.data import TURNS as TURN_NUMBERS
from areal.ledger.event_files import PayloadReader
from areal.ledger.payload import group_of_payload, read_table, record_of, recorded_sessions
from areal.replay.recorded import RecordedRun, read_metrics
from areal.replay.regrade import RegradedPayloads
from tests.faults.driver import ROOT, Run
from tests.faults.ledger_proof import check_episodes, check_steps, check_versions, raw_events
from tests.faults.struck_agent import STAGES, TURNS

pytestmark = pytest.mark.slow

SAMPLES = 2
CONFIG = """
experiment_name: agents
trial_name: TARGET
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: RUNS, n_gpus_per_node: 0}
total_train_epochs: 1
total_train_steps: 24
train_dataset: {path: DATA/train.jsonl, batch_size: 4}
workflow: WORKFLOW:StruckAgent
workflow_args: {PROGRAM, target: TARGET, folder: RUNS/strikes}
agent: {workers: 1}
gconfig: {n_samples: 2, max_new_tokens: 40, max_tokens: 128, min_new_tokens: 20}
rollout: {max_head_offpolicyness: 2, weight_update: RUNNING}
native: {dtype: float32, max_running_requests: 64, context_length: 128}
actor:
  path: DATA/model
  dtype: float32
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  weight_update_mode: MODE
  optimizer: {lr: 1.0e-3, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}
recover: {mode: auto, freq_steps: 3, retries: 9}
"""
MODES = {"controller": ("xccl", "interrupt"), "agent": ("disk", "keep"), "connection": ("http", "interrupt")}
"""How the weights travel, and what happens to running requests at an update."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The random model and the data of the agent examples."""
    folder = tmp_path_factory.mktemp("agents") / "data"
    subprocess.run([sys.executable, "examples/agents/prepare.py", str(folder)], cwd=ROOT, check=True)
    return folder


def journal_of(run: Run) -> list[dict]:
    lines = [line for path in sorted((run.folder / "turns").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def check_turns(run: Run) -> None:
    """From the raw lines of journal and ledger, and the payloads: shares no rule with the audit."""
    ledger, journal = run.folder / "ledger", journal_of(run)
    generated = {line["turn"]: line["tokens"] for line in journal if line["event"] == "generated"}
    accepted = [event for event in raw_events(ledger) if event["event"] == "accepted"]
    adopted = Counter(turn for event in accepted for turn in event["turns"])
    assert set(adopted.values()) == {1}, "a turn is trained on twice"
    assert set(adopted) <= set(generated), "a turn is trained on that was never generated"
    with PayloadReader(ledger) as payloads:
        for event in accepted:
            sessions = Counter(turn.partition(".")[0] for turn in event["turns"])
            assert list(sessions.values()) == [TURNS] * SAMPLES, "a turn of an accepted episode is lost"
            columns = read_table(payloads, event)
            assert int(np.sum(columns.loss_mask)) == sum(generated[turn] for turn in event["turns"])


def adopted_sessions(run: Run) -> list[Mapping[str, Any]]:
    """What the accepted episodes recorded of their sessions."""
    result: list[Mapping[str, Any]] = []
    with PayloadReader(run.folder / "ledger") as payloads:
        for event in raw_events(run.folder / "ledger"):
            if event["event"] == "accepted":
                result += recorded_sessions(record_of(read_table(payloads, event)))
    return result


def check_reports(run: Run, log: Path) -> None:
    """Each session that a program from outside reported is trained once, unless a controller died after its turns."""
    reported = {load["session"]: load["turns"] for load in map(json.loads, log.read_text().splitlines())}
    adopted = [session["session"] for session in adopted_sessions(run)]
    assert len(adopted) == len(set(adopted)), "a session is trained on twice"
    events = [event for event in raw_events(run.folder / "ledger") if event["event"] == "accepted"]
    of_adopted = {turn for event in events for turn in event["turns"]}
    assert all(set(reported[item]) <= of_adopted for item in adopted if item in reported)
    journals = sorted((run.folder / "turns").glob("*.jsonl"))
    killed = "".join(path.read_text() for path in journals[:-1])
    assert len(journals) == len(STAGES) + 1
    assert [item for item in reported if item not in adopted and f'"{item}.' not in killed] == []


def versions_in_answers(run: Run) -> set[int]:
    """How many policy versions generated one answer, over all adopted answers."""
    result: set[int] = set()
    with PayloadReader(run.folder / "ledger") as payloads:
        for event in raw_events(run.folder / "ledger"):
            if event["event"] == "accepted":
                columns = read_table(payloads, event)
                mask = np.concatenate(([0], columns.loss_mask, [0]))
                edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2).tolist()
                result |= {len(set(columns.output_versions[low:high].tolist())) for low, high in edges}
    return result


def config_of(data: Path, folder: Path, target: str) -> str:
    mode, running = MODES.get(target, ("xccl", "interrupt"))
    config = CONFIG.replace("MODE", mode).replace("RUNNING", running).replace("TARGET", target)
    config = config.replace("PROGRAM", "online: true" if target == "online" else 'agent: "WORKFLOW:run"')
    config = config.replace("WORKFLOW", str(ROOT / "tests/faults/struck_agent.py"))
    return config.replace("DATA", str(data)).replace("RUNS", str(folder))


def run_to_the_end(folder: Path, config: str, target: str) -> Run:
    (folder / "config.yaml").write_text(config)
    run = Run(
        arguments=["--config", str(folder / "config.yaml")],
        folder=folder / "agents" / target,
        log_path=folder / "launcher.log",
    )
    run.start()
    program = [str(Path(__file__).parent / "outside_program.py"), str(run.folder), str(folder / "reported")]
    outside = subprocess.Popen([sys.executable, *program]) if target == "online" else None
    try:
        assert run.wait_for_the_end(280) == 0, run.log_path.read_text()[-3000:]
    finally:
        if outside is not None:
            outside.kill()
            outside.wait()
        run.abandon()
    return run


@pytest.mark.parametrize("target", [*MODES, "online"])
def test_struck_at_every_stage_of_a_turn(target, data, tmp_path):
    """online: the controller dies while a program from outside has sessions."""
    run = run_to_the_end(tmp_path, config_of(data, tmp_path, target), target)
    struck = sorted(path.name for path in (tmp_path / "strikes").iterdir())
    assert struck == [f"{number}-{stage}" for number, stage in enumerate(STAGES)]
    audited = subprocess.run(
        [sys.executable, "-m", "areal.ledger", "audit", str(run.folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert audited.returncode == 0, audited.stdout
    events = raw_events(run.folder / "ledger")
    counts = check_episodes(events)
    assert [*counts.problems, *check_steps(events), *check_versions(events)] == []
    assert (counts.lost, counts.twice, counts.failed) == (0, 0, 0)
    rejected = [event["reason"] for event in events if event["event"] == "rejected"]
    # A worker that dies while the code of an agent runs was ended by that agent, as far as anyone can tell.
    assert rejected == ["agent_error: ProcessEnded"] * len(rejected)
    assert len(rejected) <= (len(STAGES) if target == "agent" else 0)
    check_turns(run)
    assert run.left_behind() == []

    sessions = adopted_sessions(run)
    assert {session["status"] for session in sessions} == {"ok"}
    assert not any(session["refused"] for session in sessions), "a weight update or a strike reached the agent"
    assert max(versions_in_answers(run)) > 1, "no weight update was made in the middle of an answer"
    if target == "connection":
        retried = [session for session in sessions if session["retries"]]
        assert len(retried) >= 2
        assert {len(item["turns"]) for item in retried} == {TURNS}, "a retry was sampled again"
    starts = sum(event["event"] == "started" for event in events)
    assert starts == (len(STAGES) + 1 if target in ("controller", "online") else 1)
    if target == "online":
        check_reports(run, tmp_path / "reported")


GRADE = """
def of_first_answer(prompt, completion, prompt_ids, completion_ids, messages, **row):
    \"\"\"That of the agent.\"\"\"
    return float(len(messages[1].get("content") or "") % 3)


def of_last_answer(prompt, completion, prompt_ids, completion_ids, **row):
    return float(len(completion_ids))
"""


def replayed(run: Run, name: str, *overrides: str) -> dict[int, dict]:
    """The metrics of a replay, by step."""
    words = ["--run", str(run.folder), "--name", name, *overrides]
    done = subprocess.run([sys.executable, "-m", "areal.replay", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(run.folder / "replays" / name / "metrics.jsonl")


def regraded(run: Run, name: str) -> list:
    """The trajectories that a replay trained on."""
    result = RegradedPayloads.read(run.folder / "replays" / name)
    assert result is not None
    return [row for place in result.places for row in group_of_payload(place, result._payload(place)).trajectories]


def test_a_run_of_agents_is_trained_again_with_other_rewards_discounts_and_cuts(data, tmp_path):
    tree = yaml.safe_load(config_of(data, tmp_path, "agent"))
    tree |= {"workflow": "agent", "total_train_steps": 3, "recover": {"mode": "disabled"}}
    tree["workflow_args"] = {"agent": tree["workflow_args"]["agent"]}
    run = run_to_the_end(tmp_path, yaml.safe_dump(tree), "agent")
    (tmp_path / "grade.py").write_text(GRADE)
    live = {step + 1: weights for step, weights in RecordedRun.read(run.folder).weights.items()}

    def weights(metrics: dict[int, dict]) -> dict[int, str]:
        return {step: row["weights"] for step, row in metrics.items()}

    ours = replayed(run, "as-recorded")
    assert weights(ours) == live
    for name, override in (
        ("same-reward", f"reward_fn={tmp_path}/grade.py:of_first_answer"),
        ("same-cut", "agent.cut=tree"),
        ("same-discount", "agent.turn_discount=1.0"),
    ):
        assert weights(replayed(run, name, override)) == live, "bit by bit"

    other = replayed(run, "other-reward", f"reward_fn={tmp_path}/grade.py:of_last_answer")
    assert weights(other)[3] != live[3]
    rows = regraded(run, "other-reward")
    assert all(row.reward == row.columns[TURN_NUMBERS].count(TURNS - 1) for row in rows)

    replayed(run, "other-discount", "agent.turn_discount=0.5")
    rows = regraded(run, "other-discount")
    assert any(row.reward for row in rows)
    for row in rows:
        inputs = row.columns.get(TURN_REWARDS, [row.reward] * len(row.token_ids))
        values = dict(zip(row.columns[TURN_NUMBERS], inputs, strict=True))
        assert (values[0], values[1]) == (0.5 * row.reward, row.reward)

    cut = replayed(run, "other-cut", "agent.cut=per_turn")
    assert len(regraded(run, "other-cut")) == TURNS * len(rows)
    for name in ("actor/loss", "actor/grad_norm", "batch/reward"):
        assert cut[1][name] == pytest.approx(ours[1][name], rel=1e-3, abs=1e-6), "no update depends on the cut"
