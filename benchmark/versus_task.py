"""What both systems of versus_trl.py use: the rewards, the goals and the rates of a run. Only the standard library."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def digit_share(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """The share of digits in a completion."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def reached(goals: Mapping[str, float], rewards: Mapping[str, float]) -> bool:
    """Whether the held-out reward of every mode is at least its goal. Without goals nothing ends a run early."""
    return bool(goals) and all(rewards.get(mode, 0.0) >= goal for mode, goal in goals.items())


def seconds_per_step(elapsed: Sequence[float], *, first: int, last: int) -> float:
    """The mean over steps `first` + 1 to `last`, counted from 1; `elapsed`: seconds at the end of each step."""
    if not 1 <= first < last <= len(elapsed):
        raise ValueError(f"steps {first} to {last} of {len(elapsed)} cannot be measured")
    return (elapsed[last - 1] - elapsed[first - 1]) / (last - first)


def areal_figures(
    rows: Sequence[Mapping[str, float]], *, ready_s: float, first: int, last: int | None = None
) -> dict[str, float]:
    """Steps, seconds, seconds per step and tokens per answer of a metrics.jsonl.

    `ready_s`: when all processes were ready. The seconds end after the last evaluation, as TRL's do. `last` None: the
    last step of the run.
    """
    trained = [row for row in rows if row["step"] > 0]
    elapsed = [row["seconds/elapsed"] for row in trained]
    evaluated = [row for row in rows if "eval/greedy/reward" in row]
    figures = {
        "steps": len(trained),
        "seconds": round(trained[-1]["time"] - ready_s, 2),
        "seconds_per_step": round(seconds_per_step(elapsed, first=first, last=last or len(elapsed)), 3),
        "tokens_per_answer": round(fmean(row["batch/answer_length"] for row in trained), 1),
        "staleness": round(fmean(row["rollout/staleness_mean"] for row in trained), 2),
    }
    if evaluated:
        figures |= {mode: evaluated[-1][f"eval/{mode}/reward"] for mode in ("greedy", "sampled")}
    return figures
