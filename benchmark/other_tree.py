"""Runs a benchmark of this folder with the code of this tree and with that of another commit, in turn."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def compared(script: str, words: list[str], rev: str | None, rounds: int) -> dict[str, object]:
    """`head`, `versus` and `ratio` (versus / head) of the figures that `script` prints as JSON in its last line.

    Each round runs the script in a new process, first with this tree and then with that of the commit `rev`, if any;
    the median of the rounds counts. `ratio_within`: 90% of the ratios of rounds that are drawn again at random.
    """
    figures_of: dict[str, list[dict[str, float]]] = {"head": []}
    with tempfile.TemporaryDirectory() as folder:
        trees = {"head": ROOT}
        try:
            if rev is not None:
                trees[rev] = Path(folder) / "tree"
                figures_of[rev] = []
                subprocess.run(["git", "worktree", "add", "-q", "--detach", trees[rev], rev], cwd=ROOT, check=True)
            for number in range(rounds):
                for name, tree in trees.items():
                    figures_of[name].append(figures := _figures(script, words, tree))
                    print(f"round {number + 1} {name:<10} {json.dumps(figures)}", flush=True)
        finally:
            if rev is not None:
                subprocess.run(["git", "worktree", "remove", "-f", trees[rev]], cwd=ROOT, check=True)
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 3) for key in each[0]}
        for name, each in figures_of.items()
    }
    if rev is None:
        return {"head": medians["head"]}
    pairs = {
        key: [(head[key], other[key]) for head, other in zip(figures_of[rev], figures_of["head"], strict=True)]
        for key in medians[rev]
    }
    return {
        "head": medians["head"],
        "versus": medians[rev],
        "ratio": {key: round(median_ratio(each), 3) for key, each in pairs.items()},
        "ratio_within": {key: [round(bound, 3) for bound in interval(each)] for key, each in pairs.items()},
    }


def median_ratio(rounds: Sequence[tuple[float, float]]) -> float:
    first, second = zip(*rounds, strict=True)
    return statistics.median(first) / statistics.median(second)


def interval(rounds: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """What contains 90% of the ratios of the medians of as many rounds, drawn again with replacement."""
    dice = random.Random(0)
    ratios = sorted(median_ratio(dice.choices(rounds, k=len(rounds))) for _ in range(draws))
    return ratios[round(0.05 * (draws - 1))], ratios[round(0.95 * (draws - 1))]


def _figures(script: str, words: list[str], tree: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    argv = [sys.executable, str(ROOT / "benchmark" / script), *words]
    done = subprocess.run(argv, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])
