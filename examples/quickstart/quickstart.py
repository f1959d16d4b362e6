"""The whole loop on a laptop: build a model, warm it up, train it by asynchronous GRPO until the task is solved.

    python examples/quickstart/quickstart.py [--seed 0] [--family qwen2] [--fileroot runs] [key=value ...]

Every stage is a command that a user can also type; each is printed before it runs. `key=value` is passed to the GRPO
stage. Progress is written to standard error, one line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from areal.system.process import run_to_its_end

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def run(*argv: str) -> float:
    """Run one stage from the repository's root; returns its seconds. A stage that fails ends the quickstart."""
    print("$ python " + " ".join(argv), file=sys.stderr, flush=True)
    began = time.monotonic()
    if code := run_to_its_end([sys.executable, *argv], cwd=REPOSITORY):
        sys.exit(code)
    return time.monotonic() - began


def launch(config: str, *overrides: str) -> float:
    return run("-m", "areal", "run", "--config", f"examples/quickstart/{config}", *overrides)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The reward of the training batches and of the held-out set over train steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    trained = [row for row in rows if "batch/reward" in row]
    axes.plot([row["step"] for row in trained], [row["batch/reward"] for row in trained], label="training batches")
    for mode in ("sampled", "greedy"):
        evaluated = [row for row in rows if f"eval/{mode}/reward" in row]
        points = [row[f"eval/{mode}/reward"] for row in evaluated]
        axes.plot([row["step"] for row in evaluated], points, marker="o", label=f"held out, {mode}")
    axes.set(xlabel="train step", ylabel="reward", title="Sort five digits: asynchronous GRPO")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(folder: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """The figures of the run, from its files."""
    grpo = folder / "grpo"
    rows = read_metrics(grpo / "metrics.jsonl")
    evaluated = [row for row in rows if "eval/greedy/reward" in row]
    trained = [row for row in rows if "rollout/staleness_mean" in row]
    first, last = evaluated[0], evaluated[-1]
    plot(rows, grpo / "reward.png")
    summaries = [json.loads((folder / stage / "summary.json").read_text()) for stage in ("sft", "grpo")]
    steps, elapsed = int(rows[-1]["step"]), rows[-1]["seconds/elapsed"]
    return {
        "seconds_total": round(sum(seconds.values()), 1),
        "seconds_sft": round(seconds["sft"], 1),
        "seconds_rl": round(seconds["rl"], 1),
        "steps": steps,
        "greedy_before": first["eval/greedy/reward"],
        "greedy_after": last["eval/greedy/reward"],
        "sampled_before": first["eval/sampled/reward"],
        "sampled_after": last["eval/sampled/reward"],
        "staleness_mean": round(fmean(row["rollout/staleness_mean"] for row in trained), 3),
        "staleness_max": max(row["rollout/staleness_max"] for row in trained),
        "generated_tokens_per_s": round(sum(row["rollout/generated_tokens"] for row in trained) / elapsed, 1),
        "trained_tokens_per_s": round(sum(row["batch/num_tokens"] for row in trained) / elapsed, 1),
        "peak_rss_gib": round(max(summary["peak_rss_gib"] for summary in summaries), 3),
        "checkpoint": str(grpo / "checkpoints" / "actor" / f"step-{steps:06d}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data, sampling and training")
    parser.add_argument("--family", default="qwen2", help="of the model: qwen2, qwen3_5 or nemotron_h")
    parser.add_argument("--fileroot", default="runs", help="root of the run folders (removed before: quickstart/)")
    parser.add_argument("overrides", nargs="*", help="key=value for the GRPO stage")
    args = parser.parse_args()
    folder = (REPOSITORY / args.fileroot / "quickstart").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    common = (f"seed={args.seed}", f"cluster.fileroot={args.fileroot}")
    seconds: dict[str, float] = {}
    of_model = ("--seed", str(args.seed), "--family", args.family)
    seconds["prepare"] = run("examples/quickstart/prepare.py", str(folder / "data"), *of_model)
    seconds["sft"] = launch("sft.yaml", *common)
    seconds["rl"] = launch("grpo.yaml", *common, *args.overrides)
    print(json.dumps(report(folder, seconds)))


if __name__ == "__main__":
    main()
