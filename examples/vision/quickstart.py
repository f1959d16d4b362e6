"""A vision-language model on a laptop: supervised fine-tuning on images, then asynchronous GRPO.

    python examples/vision/quickstart.py [--seed 0] [--fileroot runs] [key=value ...]

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

from areal.system.process import run_to_its_end

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*argv: str) -> float:
    """Run one stage from the repository's root; returns its seconds. A stage that fails ends the quickstart."""
    print("$ " + " ".join(("python", *argv)).replace("python -m areal ", "areal "), file=sys.stderr, flush=True)
    began = time.monotonic()
    if code := run_to_its_end([sys.executable, *argv], cwd=REPOSITORY):
        sys.exit(code)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data, sampling and training")
    parser.add_argument("--fileroot", default="runs", help="root of the run folders (removed before: vision/)")
    parser.add_argument("overrides", nargs="*", help="key=value for the GRPO stage")
    args = parser.parse_args()
    folder = (REPOSITORY / args.fileroot / "vision").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    common = (f"seed={args.seed}", f"cluster.fileroot={args.fileroot}")
    launch = ("-m", "areal", "run", "--config")
    seconds = {
        "prepare": run("examples/vision/prepare.py", str(folder / "data"), "--seed", str(args.seed)),
        "sft": run(*launch, "examples/vision/sft.yaml", *common),
        "rl": run(*launch, "examples/vision/grpo.yaml", *common, *args.overrides),
    }
    rows = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["eval/greedy/reward"] for row in rows if "eval/greedy/reward" in row]
    result = {
        "accuracy_before": evaluated[0],
        "accuracy_after": evaluated[-1],
        "seconds_total": round(sum(seconds.values()), 1),
        **{f"seconds_{stage}": round(value, 1) for stage, value in seconds.items() if stage != "prepare"},
        "steps": int(rows[-1]["step"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
