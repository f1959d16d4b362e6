"""A real pretrained model on two CPU cores: fetch it, warm it up, train it by asynchronous GRPO, measure it.

    python examples/smollm2/quickstart.py [--seed 0] [--fileroot runs] [key=value ...]

Every stage is a command that a user can also type; each is printed before it runs. `key=value` is passed to the GRPO
stage. Progress is written to standard error, one line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import task

from areal.system.process import run_to_its_end

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ANSWERS = 8
NUM_SHOWN = 3


class Stages:
    """Runs the stages from the repository's root and keeps their seconds. A stage that fails ends the quickstart."""

    def __init__(self, folder: Path, common: tuple[str, ...]) -> None:
        self.folder, self.common = folder, common
        self.held_out = folder / "data" / "held_out.jsonl"
        self.seconds: dict[str, float] = {}

    def run(self, name: str, *words: str) -> None:
        print("$ python " + " ".join(words), file=sys.stderr, flush=True)
        began = time.monotonic()
        if code := run_to_its_end([sys.executable, *words], cwd=REPOSITORY):
            sys.exit(code)
        self.seconds[name] = time.monotonic() - began

    def areal(self, name: str, command: str, config: str, *words: str) -> None:
        self.run(name, "-m", "areal", command, "--config", f"examples/smollm2/{config}", *self.common, *words)

    def evaluate(self, name: str, model: Path) -> list[dict[str, Any]]:
        """Eight sampled answers to each held-out row; returns the lines of the answers."""
        earlier = set(self.folder.glob("eval-*"))
        words = ("--model", str(model), "--data", f"held_out={self.held_out}", "-n", str(NUM_ANSWERS))
        self.areal(f"eval_{name}", "eval", "grpo.yaml", *words)
        (made,) = set(self.folder.glob("eval-*")) - earlier
        return read_lines(made / "answers.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def accuracy(answers: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean and standard error over rows: the answers to one row are not independent."""
    rows: dict[int, list[float]] = {}
    for answer in answers:
        rows.setdefault(answer["row"], []).append(answer["reward"])
    means = [fmean(rewards) for rewards in rows.values()]
    center = fmean(means)
    error = math.sqrt(sum((mean - center) ** 2 for mean in means) / (len(means) - 1) / len(means))
    return round(center, 4), round(error, 4)


def by_factor(answers: list[dict[str, Any]]) -> dict[str, float]:
    sources = sorted({answer["source"] for answer in answers})
    return {source: accuracy([answer for answer in answers if answer["source"] == source])[0] for source in sources}


def show(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """The first answers to a row of each number of keys from 2 on."""
    for row in range(1, 1 + NUM_SHOWN):
        first, last = (next(answer for answer in answers if answer["row"] == row) for answers in (before, after))
        print(f"\nprompt: {first['data']['messages'][-1]['content']}", file=sys.stderr)
        print(f"  before: {first['output']!r}\n  after:  {last['output']!r}", file=sys.stderr)


def plot(rows: list[dict[str, Any]], points: list[tuple[int, tuple[float, float]]], path: Path) -> None:
    """The reward of the training batches, and the held-out accuracy with its standard error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    produced = [(row["step"], row["rollout/ended/reward"]) for row in rows if "rollout/ended/reward" in row]
    axes.plot(*zip(*produced, strict=True), label="answers during training")
    steps, values = zip(*points, strict=True)
    means, errors = zip(*values, strict=True)
    axes.errorbar(steps, means, errors, marker="o", capsize=4, label="held out")
    axes.set(xlabel="train step", ylabel="exact answers", ylim=(0, 1), title="SmolLM2-135M: keys of a sentence as JSON")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(stages: Stages, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the run, from its files."""
    grpo = stages.folder / "grpo"
    rows = read_lines(grpo / "metrics.jsonl")
    trained = [row for row in rows if "seconds/step" in row]
    (start, start_error), (end, end_error) = accuracy(before), accuracy(after)
    plot(rows, [(0, (start, start_error)), (int(rows[-1]["step"]), (end, end_error))], grpo / "reward.png")
    runs = [json.loads(path.read_text()) for path in stages.folder.glob("*/summary.json")]
    return {
        "accuracy_before": start,
        "accuracy_after": end,
        "stderr_before": start_error,
        "stderr_after": end_error,
        "best_constant": round(task.best_constant(read_lines(stages.held_out)), 4),
        "by_keys_before": by_factor(before),
        "by_keys_after": by_factor(after),
        "steps": len(trained),
        "seconds": round(sum(stages.seconds.values()), 1),
        "seconds_of": {name: round(value, 1) for name, value in stages.seconds.items()},
        "seconds_per_step": round(fmean(row["seconds/step"] for row in trained), 2),
        "staleness_max": max(row["rollout/staleness_max"] for row in trained),
        "generated_tokens": int(sum(row["rollout/generated_tokens"] for row in trained)),
        "trained_tokens": int(sum(row["batch/num_tokens"] for row in trained)),
        "peak_memory_gib": round(max(run["peak_rss_gib"] for run in runs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of data, sampling and training")
    parser.add_argument("--fileroot", default="runs", help="root of the run folders (removed before: smollm2/)")
    parser.add_argument("overrides", nargs="*", help="key=value for the GRPO stage")
    args = parser.parse_args()
    folder = (REPOSITORY / args.fileroot / "smollm2").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    stages = Stages(folder, (f"seed={args.seed}", f"cluster.fileroot={args.fileroot}"))
    stages.run("fetch", "-m", "areal", "fetch", "smollm2")
    stages.run("prepare", "examples/smollm2/prepare.py", str(folder / "data"), "--seed", str(args.seed))
    stages.areal("warm_up", "run", "warm_up.yaml")
    (start,) = (folder / "warm_up" / "checkpoints" / "model").glob("step-*")
    before = stages.evaluate("before", start)
    stages.areal("grpo", "run", "grpo.yaml", *args.overrides)
    end = max((folder / "grpo" / "checkpoints" / "actor").glob("step-*"))
    after = stages.evaluate("after", end)
    show(before, after)
    print(json.dumps(report(stages, before, after)))


if __name__ == "__main__":
    main()
