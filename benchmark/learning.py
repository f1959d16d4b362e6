"""Measures how well each algorithm learns the quickstart's task under stale rollouts, with several seeds.

    python benchmark/learning.py [--steps 120] [--seeds 3] [--staleness 0 4 8] [--only grpo decoupled] [--jobs 2]

Every run is one process: the real train loop (areal.trainer.ppo_loop) is fed by the real native engine, which generates
batch k with the weights of version k - STALENESS exactly (the first ones with version 0). A result therefore depends on
the seed only, not on the machine's speed or load. Each seed has its own model, data and supervised warm-up, which all
algorithms share. Every step trains on the same number of answers; dapo generates more, because it replaces groups with
equal rewards.

Prints the reward on the held-out prompts after the last step: sampled (8 answers per prompt) and greedy. Finished runs
are kept in FILEROOT/learning and are not repeated (--fresh removes them). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from stale_rollouts import PROMPTS, SAMPLES, Generator, Snapshots, StaleBatches, reward_of

from areal.api.config import PPOConfig, load_config
from areal.api.data import StepInfo
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics, metric_values
from areal.data.tokenizer import load_tokenizer
from areal.engine.mesh import TrainerMesh
from areal.observe.phase import PhaseClock
from areal.trainer.ppo_loop import PPOLoop
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.recover import seed_process
from areal.trainer.roles import build_roles

HERE = Path(__file__).resolve().parent.parent
QUICKSTART = HERE / "examples" / "quickstart"
HELD_OUT_SAMPLES = 8

GRPO = ["actor.adv_estimator=grpo"]
ALGORITHMS: dict[str, list[str]] = {
    "ppo": [
        "critic.path=${actor.path}",
        "critic.dtype=float32",
        "critic.ppo_n_minibatches=2",
        "critic.optimizer.lr=4e-4",
        "critic.optimizer.beta2=0.99",
        "critic.optimizer.weight_decay=0",
        "actor.adv_norm.mean_level=batch",
        "actor.adv_norm.std_level=batch",
    ],
    "grpo": GRPO,
    "rloo": ["actor.adv_estimator=rloo"],
    "gspo": [*GRPO, "actor.policy_loss=gspo", "actor.eps_clip=0.03", "actor.eps_clip_higher=0.04"],
    "dapo": [
        *GRPO,
        "actor.eps_clip_higher=0.28",
        "actor.overlong_reward_penalty=true",
        "actor.overlong_tokens=2",
        "actor.overlong_penalty_factor=1.0",
        "rollout.should_accept_fn=mixed_rewards",
    ],
    "cispo": [*GRPO, "actor.policy_loss=cispo", "actor.eps_clip=-1", "actor.eps_clip_higher=4"],
    "decoupled": [*GRPO, "actor.use_decoupled_loss=true", "actor.behav_imp_weight_cap=5.0"],
}
"""Options of each algorithm besides the common ones. All except decoupled take the ratio to the rollout policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One cell of the table for one seed."""

    algorithm: str
    staleness: int
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-eta{self.staleness}-seed{self.seed}-steps{self.steps}"


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config_for(run: Run, fileroot: Path) -> PPOConfig:
    root = fileroot / "learning" / f"seed{run.seed}"
    overrides = [
        f"seed={run.seed}",
        f"trial_name={run.name}",
        f"cluster.fileroot={root}",
        f"total_train_steps={run.steps}",
        f"rollout.max_head_offpolicyness={run.staleness}",
        "train_dataset.batch_size=32",
        "gconfig.n_samples=16",
        "rollout.should_accept_fn=''",
        "rollout.dynamic_bs=false",
        "evaluator.stop_at={}",
        "actor.optimizer.lr=4e-4",
        "actor.use_decoupled_loss=false",
        "actor.behav_imp_weight_cap=null",
        "actor.reward_norm=null",
        *ALGORITHMS[run.algorithm],
    ]
    return load_config(["--config", str(QUICKSTART / "grpo.yaml"), *overrides], PPOConfig)


def train(run: Run, fileroot: Path) -> dict[str, Any]:
    """One run from the warm model to its final rewards."""
    began_s = time.monotonic()
    torch.set_num_threads(1)
    config = config_for(run, fileroot)
    seed_process(run.seed)
    tokenizer = load_tokenizer(config.actor.path)
    assert isinstance(config.train_dataset.path, str)
    data = Path(config.train_dataset.path).parent
    rows, held_out = read_rows(data / "train.jsonl"), read_rows(data / "held_out.jsonl")
    endless = (row for _ in range(1000) for row in rows)
    mesh = TrainerMesh(0, 1, torch.device("cpu"))
    length = TrainingLength(steps_per_epoch=len(rows) // PROMPTS, total_steps=run.steps)
    roles = build_roles(config, mesh, length)
    actor: TrainEngine = roles.trained["actor"]
    snapshots = Snapshots(actor, keep=run.staleness + 1)
    snapshots.publish(0)
    generator = Generator(config, tokenizer)
    before = evaluate(generator, snapshots, held_out, tokenizer)
    log: list[dict[str, float]] = []

    def after_step(info: StepInfo, metrics: Metrics, seconds: dict[str, float]) -> bool:
        values = metric_values(metrics)
        log.append({name: value for name, value in values.items() if name in ("batch/reward", "actor/clip_ratio")})
        return False

    batches = StaleBatches(config, generator, snapshots, endless, tokenizer)
    loop = PPOLoop(
        roles=roles,
        batches=batches,
        channel=snapshots,
        ranks=mesh,
        after_step=after_step,
        progress=Progress(length, start_step=0),
        clock=PhaseClock(),
    )
    loop.run()
    drawn = generator.num_answers - len(held_out) * (HELD_OUT_SAMPLES + 1)
    after = evaluate(generator, snapshots, held_out, tokenizer)
    return {
        "algorithm": run.algorithm,
        "staleness": run.staleness,
        "seed": run.seed,
        "steps": run.steps,
        "age_max": max(batches.ages),
        "trained_answers": run.steps * PROMPTS * SAMPLES,
        "drawn_answers": drawn,
        "before": before,
        "after": after,
        "curve": [round(values["batch/reward"], 4) for values in log],
        "clip_ratio": round(fmean(values.get("actor/clip_ratio", 0.0) for values in log), 5),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def evaluate(
    generator: Generator, snapshots: Snapshots, rows: Sequence[dict[str, str]], tokenizer: Any
) -> dict[str, float]:
    """Mean reward of the newest weights on the held-out prompts."""
    generator.hold(*snapshots.newest)
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    means: dict[str, float] = {}
    for mode, samples in (("sampled", HELD_OUT_SAMPLES), ("greedy", 1)):
        answers = generator.answer(prompts, samples, 999, greedy=mode == "greedy")
        scores = [reward_of(answer, rows[index // samples], tokenizer) for index, answer in enumerate(answers)]
        means[mode] = round(fmean(scores), 4)
    return means


def warm_up(seed: int, fileroot: Path) -> None:
    """Model, data and supervised warm-up of a seed: the quickstart's first two stages."""
    root = fileroot / "learning" / f"seed{seed}"
    done = root / "warm"
    if done.exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    prepare = [str(QUICKSTART / "prepare.py"), str(root / "quickstart" / "data"), "--seed", str(seed)]
    sft = ["-m", "areal", "run", "--config", str(QUICKSTART / "sft.yaml"), f"seed={seed}"]
    for argv in (prepare, [*sft, f"cluster.fileroot={root}"]):
        subprocess.run([sys.executable, *argv], cwd=HERE, stdout=sys.stderr, check=True)
    done.touch()


def run_all(runs: Sequence[Run], fileroot: Path, jobs: int) -> list[dict[str, Any]]:
    """The result of every run, read from its file if it exists; `jobs` runs at a time, one thread each."""
    folder = fileroot / "learning" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    waiting = deque(run for run in runs if not (folder / f"{run.name}.json").exists())
    total, running = len(waiting), dict[Run, subprocess.Popen[bytes]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.popleft()
            spec = [run.algorithm, run.staleness, run.seed, run.steps]
            command = [sys.executable, __file__, "--fileroot", str(fileroot), "--one", json.dumps(spec)]
            running[run] = subprocess.Popen(command, cwd=HERE, stdout=sys.stderr)
        for run, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[run]
            if process.returncode:
                for other in running.values():
                    other.kill()
                sys.exit(f"areal: error: {run.name} ended with {process.returncode}; what is done is kept")
            done = total - len(waiting) - len(running)
            result = json.loads((folder / f"{run.name}.json").read_text())
            print(f"[{done}/{total}] {run.name}: {result['after']} in {result['seconds']} s", file=sys.stderr)
        time.sleep(0.2)
    return [json.loads((folder / f"{run.name}.json").read_text()) for run in runs]


def table(results: Sequence[dict[str, Any]], mode: str, staleness: Sequence[int]) -> str:
    """Mean and spread over the seeds, one row for each algorithm, as Markdown."""
    lines = [f"| {mode} reward | " + " | ".join(f"staleness {eta}" for eta in staleness) + " |"]
    lines.append("|---|" + "---|" * len(staleness))
    for name in dict.fromkeys(result["algorithm"] for result in results):
        cells: list[str] = []
        for eta in staleness:
            values = [r["after"][mode] for r in results if r["algorithm"] == name and r["staleness"] == eta]
            cells.append(f"{fmean(values):.3f} +- {pstdev(values):.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="train steps of each run (512 answers each)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0, 4, 8], help="versions between weights and batch"
    )
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), help="algorithms")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--fileroot", type=Path, default=Path("runs"), help="root of the run folders")
    parser.add_argument("--fresh", action="store_true", help="run again what was run before")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    fileroot = args.fileroot.resolve()
    if args.one:
        algorithm, staleness, seed, steps = json.loads(args.one)
        run = Run(algorithm=algorithm, staleness=staleness, seed=seed, steps=steps)
        target = fileroot / "learning" / "results" / f"{run.name}.json"
        text = json.dumps(train(run, fileroot))
        temporary = target.with_suffix(".part")
        temporary.write_text(text)
        temporary.replace(target)
        return
    if args.fresh:
        shutil.rmtree(fileroot / "learning", ignore_errors=True)
    for seed in range(args.seeds):
        warm_up(seed, fileroot)
    runs = [
        Run(algorithm=name, staleness=eta, seed=seed, steps=args.steps)
        for seed in range(args.seeds)
        for name in args.only
        for eta in args.staleness
    ]
    results = run_all(runs, fileroot, args.jobs)
    before = {mode: fmean(result["before"][mode] for result in results) for mode in ("sampled", "greedy")}
    print(f"before: sampled {before['sampled']:.3f}, greedy {before['greedy']:.3f}; {args.seeds} seeds, mean +- std\n")
    for mode in ("sampled", "greedy"):
        print(table(results, mode, args.staleness) + "\n")
    print(json.dumps([{key: value for key, value in result.items() if key != "curve"} for result in results]))


if __name__ == "__main__":
    main()
