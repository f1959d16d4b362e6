"""Start time and cost per step of the launchers for several nodes, against the local launcher on the same machine.

    python benchmark/launchers.py [--steps 30] [--repeats 2] [--only local ssh ray slurm] [--into FILE]

The same GRPO run (the quickstart without evaluations, two servers and two trainer ranks) with each launcher in turn,
on three nodes of this machine (tests/cluster/nodes.py: root and Linux), `--repeats` times. Ray needs its package, Slurm
Debian packages. For each launcher:

- seconds from the command to the end of the first train step. The nodes and their Ray, Slurm or ssh servers run before.
- seconds between two train steps (median), which other work on the machine changes.
- CPU milliseconds per train step of everything that is not the controller, a server or a trainer: the launcher, its
  agents, and the programs of Ray, Slurm or ssh. Other work hardly changes them.

`--into FILE` adds the runs to a file of JSON lines, and the table shows all runs of the file: launchers can be measured
one by one. Ratios are to the local launcher. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.cluster.cluster_run import LAUNCHERS, Cluster, ClusterRun, num_nodes  # noqa: E402
from tests.cluster.nodes import Nodes  # noqa: E402
from tests.faults.driver import Run, RunBroken  # noqa: E402
from tests.faults.ledger_proof import raw_events  # noqa: E402
from tests.faults.schedule import EVERYTHING  # noqa: E402
from tests.faults.soak import prepare  # noqa: E402

FIRST_STEPS = 3
"""Steps after the first one that are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run."""

    start_s: float
    """From the command to the end of the first train step."""
    steps_s: tuple[float, ...]
    """Between the ends of two steps."""
    other_cpu_ms: float
    """CPU time per step outside of the controller, servers and trainers."""
    load: float
    """Processes that wanted to run, 1-minute mean, before the run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="train steps of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs with each launcher")
    parser.add_argument("--only", nargs="+", choices=("local", *LAUNCHERS), default=("local", *LAUNCHERS))
    parser.add_argument("--into", type=Path, metavar="FILE", help="adds the runs to this file, and compares all of it")
    args = parser.parse_args()
    timings: dict[str, list[Timing]] = {}
    lines = args.into.read_text().splitlines() if args.into is not None and args.into.exists() else []
    for line in lines:
        row = json.loads(line)
        timings.setdefault(row.pop("launcher"), []).append(Timing(**row))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for number in range(args.repeats):
            for kind in args.only:
                with started(kind, folder, f"{kind}-{number}", args.steps) as run:
                    shown = timed(run, args.steps)
                timings.setdefault(kind, []).append(shown)
                if args.into is not None:
                    with open(args.into, "a") as file:
                        file.write(json.dumps({"launcher": kind} | asdict(shown)) + "\n")
                print(f"{kind}: first step after {shown.start_s:.1f} s, load before {shown.load:.1f}", flush=True)
    print(json.dumps(compared(timings)))


@contextmanager
def started(kind: str, folder: Path, trial: str, steps: int) -> Iterator[Run]:
    """A run whose launcher was not started yet, on nodes that are ready. All of it ends with the block."""
    words = ["--config", "examples/quickstart/grpo.yaml", f"cluster.fileroot={folder}", f"trial_name={trial}"]
    words += ["allocation_mode=native:d2+fsdp:d2", f"total_train_steps={steps}", "evaluator.stop_at={}"]
    words += ["evaluator.eval_before_train=false", "evaluator.freq_steps=10000"]
    root, log = folder / "quickstart" / trial, folder / f"{trial}.log"
    if kind == "local":
        run = Run(arguments=words, folder=root, log_path=log)
        try:
            yield run
        finally:
            run.abandon()
        return
    with Nodes(num_nodes(kind), private=("/tmp/ray",)) as nodes, tempfile.TemporaryDirectory() as files:
        cluster = Cluster(nodes, kind, Path(files, kind))
        run = ClusterRun(arguments=words, folder=root, log_path=log, cluster=cluster)
        try:
            yield run
        finally:
            run.abandon()


def timed(run: Run, steps: int) -> Timing:
    load = os.getloadavg()[0]
    began_s = time.time()
    run.start()
    run.train_up_to(1 + FIRST_STEPS)
    before, cpu_before = run.highest_step, other_cpu_s(run)
    run.train_up_to(steps - 1)
    last, cpu_s = run.highest_step, other_cpu_s(run) - cpu_before
    if code := run.wait_for_the_end():
        raise RunBroken(f"the launcher ended with {code}:\n{run.tail(run.log_path)}")
    ends = [event["at"] for event in raw_events(run.folder / "ledger") if event["event"] == "consumed"]
    gaps = tuple(later - sooner for sooner, later in zip(ends[FIRST_STEPS:], ends[FIRST_STEPS + 1 :], strict=False))
    return Timing(start_s=ends[0] - began_s, steps_s=gaps, other_cpu_ms=cpu_s / max(1, last - before) * 1e3, load=load)


def other_cpu_s(run: Run) -> float:
    """CPU time so far of the processes that run on the nodes, or of the launcher, but not of the run's others."""
    run_pids = run.pids(fresh=True)
    if not isinstance(run, ClusterRun):
        return cpu_s(run_pids["launcher"])
    computing = {run_pids[name] for name in EVERYTHING if name != "launcher" and name in run_pids}
    pids = {pid for node in run.nodes for pid in node.pids()}
    return sum(cpu_s(pid) for pid in pids if pid not in computing and not is_below(pid, computing))


def is_below(pid: int, roots: set[int]) -> bool:
    """Whether a process was started by one of some others, also indirectly."""
    try:
        return any(parent.pid in roots for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def cpu_s(pid: int) -> float:
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return used.user + used.system


def compared(timings: dict[str, list[Timing]]) -> dict[str, object]:
    """The medians of each launcher, and their ratios to those of the local one."""
    result: dict[str, dict[str, float]] = {}
    for kind, runs in timings.items():
        result[kind] = {
            "start_s": median(run.start_s for run in runs),
            "step_s": median(gap for run in runs for gap in run.steps_s),
            "other_cpu_ms_per_step": median(run.other_cpu_ms for run in runs),
            "load_before": max(run.load for run in runs),
        }
    local = result.get("local", {})
    print(f"\n{'launcher':>10} {'first step':>11} {'ratio':>6} {'step':>8} {'ratio':>6} {'other CPU per step':>19}")
    rows: dict[str, object] = {}
    for kind, figures in result.items():
        ratios = {f"{key}_ratio": figures[key] / local.get(key, math.nan) for key in ("start_s", "step_s")}
        rows[kind] = {key: round(value, 3) for key, value in (figures | ratios).items()}
        print(
            f"{kind:>10} {figures['start_s']:>9.1f} s {ratios['start_s_ratio']:>6.2f} {figures['step_s']:>6.2f} s "
            f"{ratios['step_s_ratio']:>6.2f} {figures['other_cpu_ms_per_step']:>16.1f} ms"
        )
    return rows


if __name__ == "__main__":
    main()
