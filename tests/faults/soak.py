"""Kills a run of the quickstart again and again, by a seeded schedule, and proves that nothing was lost.

    make test-faults [SEED=0] [KILLS=100] [ARGS='--mode disk'] [ARGS='--cluster ssh|ray|slurm']
    python -m tests.faults.soak --seed 0 [--kills 30] [--mode xccl|disk|delta|...] [--folder runs/faults]

Two servers and two trainer ranks, as on a machine with four GPUs but on the CPU. Half of the faults hit runs with
weights over the collective, of which the first must solve the task; the others hit shorter runs with weights over disk.
Each mode has its own schedule of kills, stops (SIGSTOP, SIGCONT) and SIGTERM; more runs follow while faults are left.
The same seed gives the same schedules; the exact time within a moment depends on the machine.

With --cluster the runs use three nodes (tests/cluster/nodes.py), which also lose power, and no run must solve the task.

Checked after each run: exit status, task, audit, a second count of the raw ledger, rows, metrics, checkpoint, processes
left, replay. When something is wrong, the folder stays and the output says what. Exit status: 0 all is well, 1 not.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.cluster.cluster_run import LAUNCHERS, Cluster, ClusterRun, num_nodes
from tests.cluster.nodes import Nodes
from tests.faults.driver import ROOT, Run, RunBroken
from tests.faults.ledger_proof import raw_events, seconds_to_training
from tests.faults.proofs import prove
from tests.faults.schedule import Fault, make_schedule, with_node_losses
from tests.faults.striker import Blow, Striker, last_words

HANG_S = 6.0
LIMIT_S = 3600.0
"""Time limit of the whole soak, which is then ended by force."""
LIMIT_PER_FAULT_S = 120.0
"""The time limit of a soak with many faults."""
MODES = ("xccl", "disk")
OTHER_MODES = ("http", "delta", "delta_disk", "delta_xccl")
SECOND_LEG_STEPS = 60
QUICKSTART = "examples/quickstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One run and its share of the faults."""

    name: str
    weight_update_mode: str
    is_to_solve: bool
    """Continue until the task is solved; otherwise end after a few steps."""
    faults: list[Fault]


@dataclass(slots=True, kw_only=True)
class LegResult:
    """What one leg showed."""

    leg: Leg
    blows: list[Blow]
    seconds: float
    num_launches: int
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides about the whole schedule")
    parser.add_argument("--kills", type=int, default=30, help="how many faults, at least 2")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="emptied before; kept on failure")
    parser.add_argument("--mode", choices=(*MODES, *OTHER_MODES), help="only runs with this weight_update_mode")
    parser.add_argument("--cluster", choices=LAUNCHERS, help="three nodes on this machine, with this launcher")
    args = parser.parse_args()
    folder = args.folder.absolute() / f"seed-{args.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    modes = [args.mode] if args.mode else MODES
    shares = dict(zip(modes, [-(-args.kills // len(modes)), args.kills // 2], strict=False))
    schedules = {mode: make_schedule(args.seed, num, hang_s=HANG_S, mode=mode) for mode, num in shares.items()}
    if args.cluster:
        schedules = {mode: with_node_losses(faults, ("node2", "node3")) for mode, faults in schedules.items()}
    say(f"seed {args.seed}, {args.kills} faults, folder {folder}")
    for mode, schedule in schedules.items():
        for number, fault in enumerate(schedule, 1):
            say(f"{mode} {number:3}. {fault.moment}: {fault}{' (chained)' if fault.is_chained else ''}")
    began_s = time.monotonic()
    deadline = began_s + max(LIMIT_S, LIMIT_PER_FAULT_S * args.kills)
    prepare(folder)
    results: list[LegResult] = []
    for mode, rest in schedules.items():
        while rest and not any(result.problems for result in results):
            is_to_solve = not results and not args.cluster
            leg = Leg(name=f"leg-{len(results)}", weight_update_mode=mode, is_to_solve=is_to_solve, faults=rest)
            with nodes_for(args.cluster, folder) as cluster:
                result, rest = run_leg(leg, folder, deadline, cluster)
            results.append(result)
    return report(args.seed, folder, results, time.monotonic() - began_s)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


def prepare(folder: Path) -> None:
    """The quickstart's data, model and supervised warm-up, as its own commands make them."""
    say("preparing data and the warm-up checkpoint ...")
    root = f"cluster.fileroot={folder}"
    commands = [
        [f"{QUICKSTART}/prepare.py", str(folder / "quickstart" / "data")],
        ["-m", "areal.launcher.local", "--config", f"{QUICKSTART}/sft.yaml", root],
    ]
    for words in commands:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")


def leg_arguments(leg: Leg, folder: Path) -> list[str]:
    words = [
        "--config",
        f"{QUICKSTART}/grpo.yaml",
        f"cluster.fileroot={folder}",
        f"trial_name={leg.name}",
        "allocation_mode=native:d2+fsdp:d2",
        f"actor.weight_update_mode={leg.weight_update_mode}",
        "recover.mode=auto",
        "recover.freq_steps=4",
        "recover.retries=50",
        f"launcher.hang_s={HANG_S:g}",
        "launcher.stall_s=60",
        "rollout.health_check_interval_s=0.5",
        "rollout.weight_update_timeout_s=20",
        "evaluator.freq_steps=5",
    ]
    return words if leg.is_to_solve else [*words, f"total_train_steps={SECOND_LEG_STEPS}", "evaluator.stop_at={}"]


@contextmanager
def nodes_for(launcher: str | None, folder: Path) -> Iterator[Cluster | None]:
    """Nodes for one run of this launcher; None without a launcher."""
    if launcher is None:
        yield None
        return
    with Nodes(num_nodes(launcher), private=("/tmp/ray",)) as nodes, tempfile.TemporaryDirectory() as files:
        yield Cluster(nodes, launcher, Path(files, launcher))


def run_leg(leg: Leg, folder: Path, deadline: float, cluster: Cluster | None = None) -> tuple[LegResult, list[Fault]]:
    """One run to its end under its faults, and all proofs. Returns also the faults that came too late."""
    root = folder / "quickstart" / leg.name
    words, log = leg_arguments(leg, folder), root.with_name(f"{leg.name}-launcher.log")
    if cluster is None:
        run = Run(arguments=words, folder=root, log_path=log, deadline=deadline)
    else:
        words.append("cluster.node_silence_s=5")
        run = ClusterRun(arguments=words, folder=root, log_path=log, deadline=deadline, cluster=cluster)
    say(f"\n{leg.name}: weights over {leg.weight_update_mode}, {len(leg.faults)} faults")
    striker = Striker(run=run, hang_s=HANG_S, say=say)
    result = LegResult(leg=leg, blows=striker.blows, seconds=0.0, num_launches=0)
    began_s = time.monotonic()
    rest: list[Fault] = []
    try:
        run.start()
        rest = striker.run_to_the_end(leg.faults)
    except RunBroken as error:
        result.problems += [str(error), f"logs at that moment:\n{last_words(run)}"]
    finally:
        run.abandon()
    result.seconds, result.num_launches = time.monotonic() - began_s, run.num_launches
    if not result.problems:
        result.facts, result.problems = prove(run, data=folder / "quickstart" / "data", is_to_solve=leg.is_to_solve)
    for fact in result.facts:
        say(f"    {fact}")
    return result, rest


def report(seed: int, folder: Path, results: list[LegResult], seconds: float) -> int:
    """The table and the verdict."""
    for result in results:
        say(
            f"\n{result.leg.name} ({result.leg.weight_update_mode}): {result.seconds:.0f} s, "
            f"{len(result.blows)} faults, launched {result.num_launches} times"
        )
        say(f"{'':4}{'step':>5}  {'fault':34} {'moment':26} {'trains again':>12} {'new step':>9}")
        events = raw_events(folder / "quickstart" / result.leg.name / "ledger")
        times: list[float] = []
        for number, blow in enumerate(result.blows, 1):
            again, new = seconds_to_training(events, blow.at)
            times += [new] if new is not None else []
            shown = [f"{value:.1f} s" if value is not None else "-" for value in (again, new)]
            targets = "everything" if len(blow.fault.targets) > 3 else str(blow.fault)
            moment = f"{blow.fault.moment}{'' if blow.was_moment else ' (not seen)'}"
            say(f"{number:3}.{blow.step:5}  {targets:34} {moment:26} {shown[0]:>12} {shown[1]:>9}")
        if times:
            say(f"seconds to the next new step: median {median(times):.1f}, longest {max(times):.1f}")
    problems = [f"{result.leg.name}: {problem}" for result in results for problem in result.problems]
    total = sum(len(result.blows) for result in results)
    for problem in problems:
        say(f"WRONG {problem}")
    say(f"\n{total} faults in {seconds:.0f} s: {'NOT well' if problems else 'nothing lost, nothing trained twice'}")
    if problems:
        say(f"seed {seed}; the run is kept in {folder}; again: make test-faults SEED={seed}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
