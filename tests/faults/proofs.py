"""Checks of what must hold after the end of a run, whatever happened to it. They read files and processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.faults.driver import ROOT, Run
from tests.faults.ledger_proof import (
    Event,
    check_episodes,
    check_metrics,
    check_rows,
    check_steps,
    check_versions,
    check_weights,
    raw_events,
)


def prove(run: Run, *, data: Path, is_to_solve: bool, replays: bool = True) -> tuple[list[str], list[str]]:
    """Facts worth telling, and everything that is wrong. A replay takes about as long as the steps of the run."""
    facts: list[str] = []
    problems: list[str] = []
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    events = raw_events(run.folder / "ledger")
    counts = check_episodes(events)
    compared, differences = check_weights(events)
    num_steps = sum(event["event"] == "consumed" for event in events)
    again = sum(event["event"] == "trained_again" for event in events)
    starts = sum(event["event"] == "started" for event in events)
    facts.append(f"raw ledger: {counts}")
    facts.append(f"{num_steps} steps; {again} repetitions, {compared} with equal weights; {starts} controllers")
    problems += counts.problems + check_steps(events) + differences + check_versions(events)
    problems += _row_problems(config, events, run.folder / "ledger", data)
    problems += check_metrics(run.folder / "metrics.jsonl", num_steps)
    problems += _goal_problems(config, run.folder / "metrics.jsonl", facts) if is_to_solve else []
    problems += _audit_problems(run.folder, facts)
    problems += [f"left behind: {name}" for name in run.left_behind()]
    problems += _checkpoint_problems(run.folder / "checkpoints" / "actor" / f"step-{num_steps:06d}")
    problems += _replay_problems(run.folder, facts) if replays else []
    return facts, problems


def _row_problems(config: dict[str, Any], events: list[Event], ledger: Path, data: Path) -> list[str]:
    from transformers import AutoTokenizer

    from areal.data.prompt_stream import PromptStream

    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    stream = PromptStream(rows, seed=config["seed"], batch_size=config["train_dataset"]["batch_size"])
    admitted = sum(event["event"] == "admitted" and event["attempt"] == 0 for event in events)
    used: dict[int, set[int]] = {}
    twice = [k for k in range(admitted) if _is_second_use(used, k // stream.rows_per_epoch, stream.index(k))]
    problems = [f"rows used twice in an epoch, by episodes {twice}"] if twice else []
    return problems + check_rows(events, ledger, tokenizer.decode, lambda k: stream.row(k)["prompt"])


def _is_second_use(used: dict[int, set[int]], epoch: int, row: int) -> bool:
    is_used = row in used.setdefault(epoch, set())
    used[epoch].add(row)
    return is_used


def _goal_problems(config: dict[str, Any], metrics: Path, facts: list[str]) -> list[str]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [row for row in rows if "eval/greedy/reward" in row][-1]
    result = {mode: last[f"eval/{mode}/reward"] for mode in config["evaluator"]["stop_at"]}
    facts.append(f"evaluated after {last['step']} steps: {result}")
    goals: dict[str, float] = config["evaluator"]["stop_at"]
    return [f"{mode} reached {result[mode]} of {goal}" for mode, goal in goals.items() if result[mode] < goal]


def _audit_problems(folder: Path, facts: list[str]) -> list[str]:
    done = _python("-m", "areal.ledger", "audit", str(folder))
    facts.append(f"audit: {' | '.join(done.stdout.splitlines()[:2])}")
    return [] if done.returncode == 0 else [f"the audit exits with {done.returncode}:\n{done.stdout}{done.stderr}"]


def _checkpoint_problems(path: Path) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path)
    except Exception as error:  # noqa: BLE001 - whatever transformers does not like about it
        return [f"transformers does not load {path}: {error}"]
    return [] if torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all() else [f"{path} has no finite logits"]


def _replay_problems(folder: Path, facts: list[str]) -> list[str]:
    if importlib.util.find_spec("areal.replay") is None:
        facts.append("no replay: python -m areal.replay does not exist")
        return []
    done = _python("-m", "areal.replay", "--run", str(folder))
    facts.append(f"replay: {done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]}")
    return (
        []
        if done.returncode == 0
        else [f"the replay exits with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"]
    )


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
