"""Measures a step of the quickstart's GRPO run: seconds by phase, without evaluations.

    python benchmark/quickstart_step.py [--steps 80] [--staleness 2] [--versus f2b4580a] [--rounds 5]

Every run starts from the same model, which the quickstart's first two stages make once. With --versus the code of
another commit runs in turn. The figures are milliseconds per step from step 10 to the last: `step` is the time between
two steps, `trainer` the metric seconds/step, and the others are its phases; `cpu_ROLE` is the CPU time of the processes
of a role, without a role those of the launcher and its other children. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from other_tree import ROOT, compared

_FIRST_STEP = 10
"""Steps before it include the start of threads and caches."""
_PHASES = ("rollout", "prox_logprobs", "update", "publish_weights")
_NO_EVALUATION = ("evaluator.eval_before_train=false", "evaluator.freq_steps=null", "evaluator.stop_at={}")


def areal(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "areal", *argv], stdout=sys.stderr)


def prepare(fileroot: Path) -> None:
    """The data, the tiny model and its supervised warm-up."""
    script = ROOT / "examples/quickstart/prepare.py"
    subprocess.run([sys.executable, script, fileroot / "quickstart/data"], check=True, cwd=ROOT, stdout=sys.stderr)
    sft = areal("run", "--config", str(ROOT / "examples/quickstart/sft.yaml"), f"cluster.fileroot={fileroot}")
    if sft.wait():
        raise SystemExit("the supervised warm-up has failed")


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of the steps to be measured."""
    with suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be incomplete
        return [row for row in rows if "seconds/step" in row and row["step"] >= _FIRST_STEP]
    return []


def cpu_s(launcher: psutil.Process) -> dict[str, float]:
    """CPU seconds of a run so far by role."""
    seconds: dict[str, float] = defaultdict(float)
    for process in (launcher, *launcher.children(recursive=True)):
        with suppress(psutil.Error):
            context, times = process.environ().get("AREAL_PROCESS"), process.cpu_times()
            seconds[f"cpu_{json.loads(context)['role']}" if context else "cpu"] += times.user + times.system
    return seconds


def measured(fileroot: Path, steps: int, staleness: int) -> dict[str, float]:
    """Milliseconds of a step and of its phases, by the code that the current folder holds."""
    trial = f"measured-{os.getpid()}"
    run = fileroot / "quickstart" / trial
    process = areal(
        *("run", "--config", "examples/quickstart/grpo.yaml", f"cluster.fileroot={fileroot}", f"trial_name={trial}"),
        *(f"total_train_steps={steps}", "total_train_epochs=20"),
        *(f"rollout.max_head_offpolicyness={staleness}", *_NO_EVALUATION),
    )
    seen: list[tuple[int, dict[str, float]]] = []
    while process.poll() is None:
        time.sleep(0.1)
        rows = rows_of(run)
        if rows and rows[-1]["step"] >= (_FIRST_STEP, steps - 5)[min(len(seen), 1)] and len(seen) < 2:
            seen.append((rows[-1]["step"], cpu_s(psutil.Process(process.pid))))
    if process.returncode:
        raise SystemExit(f"the run {run} has failed")
    rows = rows_of(run)
    shutil.rmtree(run)
    first, last = rows[0], rows[-1]
    figures = {"step": (last["time"] - first["time"]) / (last["step"] - first["step"])}
    figures["trainer"] = fmean(row["seconds/step"] for row in rows[1:])
    figures |= {phase: fmean(row[f"seconds/{phase}"] for row in rows[1:]) for phase in _PHASES}
    (began, before), (ended, after) = seen
    figures |= {role: (after[role] - before[role]) / (ended - began) for role in sorted(before)}
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
