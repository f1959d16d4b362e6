"""Compares the seconds per train step of a replay with those of the run that it replays.

    python benchmark/replay_speed.py --run RUN [--until STEP]

Replays RUN with `python -m areal.replay` and compares the seconds that the trainers measured for each step except the
first, which includes the warm-up: the whole step, the wait for its batch, the update, and the weights (a run sends
them to its servers, a replay computes their checksum). Steps of a run are counted without evaluation and checkpoints.
Nothing else should run on the machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from pathlib import Path
from statistics import fmean

from areal.replay.recorded import read_metrics

PARTS = {
    "step": "seconds/step",
    "batch": "seconds/rollout",
    "update": "seconds/update",
    "weights": "seconds/publish_weights",
}


def means(metrics: dict[int, dict[str, float]], steps: list[int]) -> dict[str, float]:
    return {part: fmean(metrics[step][name] for step in steps) for part, name in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run that trained on rollouts")
    parser.add_argument("--until", type=int, help="number of steps to replay (default: all)")
    args = parser.parse_args()
    name = f"speed-{uuid.uuid4().hex[:8]}"
    limit = [] if args.until is None else ["--until", str(args.until)]
    command = [sys.executable, "-m", "areal.replay", "--run", str(args.run), "--name", name, *limit]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status == 2:
        sys.exit(2)
    live, replayed = (
        read_metrics(args.run / "metrics.jsonl"),
        read_metrics(args.run / "replays" / name / "metrics.jsonl"),
    )
    steps = sorted(set(live) & set(replayed))[1:]
    if not steps:
        sys.exit("areal: error: at least two steps are needed")
    by_live, by_replay = means(live, steps), means(replayed, steps)
    print(f"{'seconds per':>12} {'live':>10} {'replay':>10} {'ratio':>8}")
    for part in PARTS:
        ratio = by_replay[part] / max(by_live[part], 1e-9)
        print(f"{part:>12} {by_live[part]:>10.4f} {by_replay[part]:>10.4f} {ratio:>8.2f}")
    result = {
        "steps": len(steps),
        "equal": status == 0,
        "live_s": {part: round(value, 4) for part, value in by_live.items()},
        "replay_s": {part: round(value, 4) for part, value in by_replay.items()},
        "ratio": round(by_replay["step"] / by_live["step"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
