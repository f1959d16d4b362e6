"""Trains an agent on a laptop: build a model, warm it up, and let the agent learn to use its calculator.

    python examples/agents/quickstart.py [--task calculator|search] [--seed 0] [--fileroot runs] [key=value ...]

Every stage is a command that a user can also type; each is printed before it runs. `key=value` is passed to the last
stage. Progress is written to standard error, one line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from areal.system.process import run_to_its_end

REPOSITORY = Path(__file__).resolve().parents[2]
CHANGES = {
    "calculator": (),
    "search": ("trial_name=search", "workflow_args.agent=examples/agents/search.py:Search", "agent.max_turns=6"),
}
"""By task, what differs from calculator.yaml."""


def run(*argv: str) -> None:
    """Run one stage from the repository's root. A stage that fails ends the quickstart."""
    print("$ " + " ".join(("python", *argv)).replace("python -m areal ", "areal "), file=sys.stderr, flush=True)
    if code := run_to_its_end([sys.executable, *argv], cwd=REPOSITORY):
        sys.exit(code)


def report(folder: Path) -> dict[str, Any]:
    """The figures of the run, from its metrics: held-out rows before and after, turns of the training batches."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/sampled/reward" in row]
    trained = [row for row in rows if "rollout/episode/num_turns" in row]
    first, last = evaluated[0], evaluated[-1]
    calls = "eval/sampled/episode/tool_calls"

    def mean(name: str) -> float:
        return round(sum(row[f"rollout/episode/{name}"] for row in trained) / max(len(trained), 1), 3)

    return {
        "reward_before": round(first["eval/sampled/reward"], 3),
        "reward_after": round(last["eval/sampled/reward"], 3),
        "tool_calls_per_episode_before": round(first[calls], 3),
        "tool_calls_per_episode_after": round(last[calls], 3),
        "turns_mean": mean("num_turns"),
        "forks": mean("forks"),
        "drift": mean("drifts"),
        "steps": int(rows[-1]["step"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data, sampling and training")
    parser.add_argument(
        "--fileroot", default="runs", help="root of the run folders (removed before: agents/, or agents_search/)"
    )
    parser.add_argument("--task", choices=CHANGES, default="calculator", help="the tools of the agent")
    parser.add_argument("overrides", nargs="*", help="key=value for the training of the agent")
    args = parser.parse_args()
    experiment = "agents" if args.task == "calculator" else f"agents_{args.task}"
    folder = (REPOSITORY / args.fileroot / experiment).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    common = (f"seed={args.seed}", f"cluster.fileroot={args.fileroot}", f"experiment_name={experiment}")
    launch = ("-m", "areal", "run", "--config")
    run("examples/agents/prepare.py", str(folder / "data"), "--task", args.task, "--seed", str(args.seed))
    run(*launch, "examples/agents/warm_up.yaml", *common)
    run(*launch, "examples/agents/calculator.yaml", *common, *CHANGES[args.task], *args.overrides)
    print(json.dumps(report(folder / args.task) | {"seconds_total": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
