"""Measures a step of the quickstart's GRPO run: seconds by phase, without evaluations.

    python benchmark/quickstart_step.py [--steps 80] [--staleness 2] [--versus f2b4580a] [--rounds 5]

Every run starts from the same model, which the quickstart's first two stages make once. With --versus the code of
another commit runs in turn. The figures are milliseconds per step from step 10 to the last: `step` is the time between
two steps, `trainer` the metric seconds/step, and the others are its phases. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from other_tree import ROOT, compared

_FIRST_STEP = 10
"""Steps before it include the start of threads and caches."""
_PHASES = ("rollout", "prox_logprobs", "update", "publish_weights")
_NO_EVALUATION = ("evaluator.eval_before_train=false", "evaluator.freq_steps=null", "evaluator.stop_at={}")


def areal(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "areal", *argv], check=True, stdout=sys.stderr)


def prepare(fileroot: Path) -> None:
    """The data, the tiny model and its supervised warm-up."""
    script = ROOT / "examples/quickstart/prepare.py"
    subprocess.run([sys.executable, script, fileroot / "quickstart/data"], check=True, cwd=ROOT, stdout=sys.stderr)
    areal("run", "--config", str(ROOT / "examples/quickstart/sft.yaml"), f"cluster.fileroot={fileroot}")


def measured(fileroot: Path, steps: int, staleness: int) -> dict[str, float]:
    """Milliseconds of a step and of its phases, by the code that the current folder holds."""
    with tempfile.TemporaryDirectory() as trial:
        areal(
            *("run", "--config", "examples/quickstart/grpo.yaml", f"cluster.fileroot={fileroot}"),
            *(f"trial_name={Path(trial).name}", f"total_train_steps={steps}", "total_train_epochs=20"),
            *(f"rollout.max_head_offpolicyness={staleness}", *_NO_EVALUATION),
        )
    run = fileroot / "quickstart" / Path(trial).name
    lines = (run / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run)
    rows = [row for row in map(json.loads, lines) if "seconds/step" in row and row["step"] >= _FIRST_STEP]
    first, last = rows[0], rows[-1]
    figures = {"step": (last["time"] - first["time"]) / (last["step"] - first["step"])}
    figures["trainer"] = fmean(row["seconds/step"] for row in rows[1:])
    figures |= {phase: fmean(row[f"seconds/{phase}"] for row in rows[1:]) for phase in _PHASES}
    return {name: round(seconds * 1e3, 2) for name, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--staleness", type=int, default=2, help="rollout.max_head_offpolicyness")
    parser.add_argument("--fileroot", type=Path, help="root of the run folders; default: a temporary folder")
    parser.add_argument("--versus", metavar="REV", help="a commit that runs in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", action="store_true", help="measure the code of the current folder (internal)")
    args = parser.parse_args()
    if args.steps < 2 * _FIRST_STEP:
        parser.error(f"--steps {args.steps}: give at least {2 * _FIRST_STEP}, of which {_FIRST_STEP} are not measured")
    if args.side:
        print(json.dumps(measured(args.fileroot, args.steps, args.staleness)))
        return
    with tempfile.TemporaryDirectory() as folder:
        fileroot = (args.fileroot or Path(folder)).resolve()
        if not (fileroot / "quickstart/sft/checkpoints/model").is_dir():
            prepare(fileroot)
        words = ["--side", "--fileroot", str(fileroot), "--steps", str(args.steps), "--staleness", str(args.staleness)]
        print(json.dumps(compared(Path(__file__).name, words, args.versus, args.rounds)))


if __name__ == "__main__":
    main()
