"""How well `areal plan` predicts: (a) identity, (b) held-out runs on this machine, (c) closed forms.

    python benchmark/planner_accuracy.py [--folder FOLDER] [--steps 50]        (10 minutes, on an idle machine)

One run of a tiny model is measured (a server, staleness 1, long-tailed answers). From its service times alone the plan
predicts the other runs: other staleness, two servers, answers of equal spread, other group sizes, rewards that take
time. Nothing is fitted to those. (a): every run's decisions are repeated by a controller that gets its recorded ends
(benchmark/planner_identity.py). Prints a table, and one line of JSON at the end. A machine that does other work at the
same time changes the runs themselves: `load` is its load average before each.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.api.config import PPOConfig  # noqa: E402
from areal.api.config.load import load_experiment  # noqa: E402
from areal.api.data import TrajectoryGroup  # noqa: E402
from areal.api.engine import InferenceEngine  # noqa: E402
from areal.observe.log import get_logger  # noqa: E402
from areal.observe.spans import span  # noqa: E402
from areal.observe.step_files import read_step_lines  # noqa: E402
from areal.planner.command import adapted, setting_of  # noqa: E402
from areal.planner.figures import SEEDS, simulated  # noqa: E402
from areal.planner.measured import MeasuredRun, measured_run  # noqa: E402
from areal.planner.service import ServiceTimes  # noqa: E402
from areal.system.device import cpu_count  # noqa: E402
from areal.system.run_paths import RunPaths  # noqa: E402
from areal.workflow.synthetic import SyntheticWorkflow  # noqa: E402
from benchmark.planner_identity import repeated  # noqa: E402

PROMPT, CONTEXT, WARMUP = 8, 1024, 3
TAIL = "lognormal(64,0.6,256)"


class TimedRewards(SyntheticWorkflow):
    """Synthetic answers, whose rewards take `reward_s` seconds."""

    def __init__(self, gconfig: Any, tokenizer: Any, *, length: str, prompt_length: int, reward_s: float) -> None:
        super().__init__(gconfig, tokenizer, length=length, prompt_length=prompt_length)
        self._reward_s = reward_s

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TrajectoryGroup:
        group = await super().arun_episode(engine, data)
        with span("reward"):
            await asyncio.sleep(self._reward_s)
        return group


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    name: str
    staleness: int = 1
    servers: int = 1
    length: str = TAIL
    answers: int = 4
    batch: int = 16
    reward_s: float = 0.0


MEASURED = Case(name="measured")
HELD_OUT = (
    Case(name="staleness-0", staleness=0),
    Case(name="staleness-2", staleness=2),
    Case(name="staleness-4", staleness=4),
    Case(name="two-servers", servers=2),
    Case(name="uniform", length="uniform(16,200)"),
    Case(name="uniform-0", staleness=0, length="uniform(16,200)"),
    Case(name="groups-of-8", answers=8),
    Case(name="groups-of-2-batch-32", answers=2, batch=32),
    Case(name="slow-rewards", reward_s=1.5),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run and its prediction."""

    name: str
    load: float
    real_s: float
    plan_s: float
    error: float
    real_staleness: float
    plan_staleness: float
    identity: bool


def words(case: Case, folder: Path, model: Path, steps: int) -> list[str]:
    rows = folder / f"{case.name}.jsonl"
    lines = (json.dumps({"prompt": "", "index": index}) for index in range((steps + 8) * case.batch))
    rows.write_text("".join(f"{line}\n" for line in lines))
    longest = int(case.length.rpartition(",")[2].rstrip(")"))
    arguments = {"length": case.length, "prompt_length": PROMPT, "reward_s": case.reward_s}
    return [
        "--config", str(ROOT / "benchmark/long_answers.yaml"), f"cluster.fileroot={folder}",
        "cluster.n_gpus_per_node=0", "experiment_name=planner", f"trial_name={case.name}",
        f"total_train_steps={steps}", "total_train_epochs=null",
        f"allocation_mode=native:d{case.servers}+fsdp:d1", f"actor.path={model}", "actor.dtype=float32",
        "native.dtype=float32", f"native.context_length={CONTEXT}", "actor.mb_spec.max_tokens_per_mb=4096",
        "actor.gradient_checkpointing=false", f"train_dataset={{path: {rows}, batch_size: {case.batch}}}",
        f"workflow={ROOT / 'benchmark/planner_accuracy.py'}:TimedRewards", f"workflow_args={json.dumps(arguments)}",
        f"gconfig.n_samples={case.answers}", f"gconfig.max_new_tokens={longest}",
        f"gconfig.max_tokens={longest + PROMPT}", "reward_fn=''", "rollout.should_accept_fn=''", "alarms.action=off",
        f"rollout.max_head_offpolicyness={case.staleness}", f"benchmark.length={case.length!r}",
        f"benchmark.prompt_length={PROMPT}", "perf_tracer.enabled=true", "recover.mode=disabled", "saver={}",
        "strict_config=false",
    ]  # fmt: skip


def run(case: Case, folder: Path, model: Path, steps: int) -> tuple[RunPaths, PPOConfig]:
    options = words(case, folder, model, steps)
    paths = RunPaths(folder / "planner" / case.name)
    if not paths.summary.exists():
        command = [sys.executable, "-m", "areal", "run", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        if done.returncode:
            sys.exit(f"{case.name} failed:\n{done.stderr[-2000:]}")
    config = load_experiment(options, is_quiet=True)
    assert isinstance(config, PPOConfig)
    return paths, config


def steady(paths: RunPaths, staleness: int) -> tuple[float, float]:
    """Seconds of a step and mean staleness of a run, without its first and last steps."""
    rows = [row for row in read_step_lines(paths.metrics) if "rollout/tokens" in row]
    rows = rows[WARMUP - 1 : len(rows) - staleness]
    seconds = rows[-1]["seconds/elapsed"] - rows[0]["seconds/elapsed"]
    return seconds / (len(rows) - 1), fmean(row["rollout/staleness_mean"] for row in rows[1:])


def predicted(seen: MeasuredRun, case: Case, config: PPOConfig) -> tuple[float, float]:
    times, work = adapted(seen, config)
    if case.reward_s:
        times: ServiceTimes = replace(times, rewards_s=(case.reward_s,), reward_workers=2**31)
    setting = setting_of(config, times, work)
    figures = simulated(setting, SEEDS)
    return figures.step_s.mean, figures.staleness_mean.mean


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(place)) for place in range(len(values))]


def correlation(left_values: Sequence[float], other: Sequence[float]) -> float:
    """Of ranks (Spearman)."""
    left, right = ranks(left_values), ranks(other)
    middle = (len(left) - 1) / 2
    spread = sum((rank - middle) ** 2 for rank in left)
    return sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True)) / spread


def make_model(folder: Path) -> Path:
    path = folder / "model"
    if not path.exists():
        command = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), str(folder / "data"), "--seed", "0"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        (folder / "data" / "model").rename(path)
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": CONTEXT}))
    return path


def closed_forms() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "tests/planner"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def measure(folder: Path, steps: int) -> dict[str, Any]:
    model = make_model(folder)
    paths, _ = run(MEASURED, folder, model, steps)
    seen = measured_run(paths.root, cores=cpu_count())
    results: list[Result] = []
    for case in (MEASURED, *HELD_OUT):
        load = os.getloadavg()[0]
        paths, config = run(case, folder, model, steps)
        (real_s, real_staleness), decisions = steady(paths, case.staleness), repeated(paths.root)
        plan_s, plan_staleness = predicted(seen, case, config)
        results.append(
            Result(
                name=case.name,
                load=load,
                real_s=real_s,
                plan_s=plan_s,
                error=plan_s / real_s - 1,
                real_staleness=real_staleness,
                plan_staleness=plan_staleness,
                identity=decisions[0] == decisions[1],
            )
        )
        last = results[-1]
        print(
            f"{last.name:<22} load {last.load:4.1f} {last.real_s:6.2f} s/step, "
            f"plan {last.plan_s:6.2f} ({last.error:+.0%}), "
            f"staleness {last.real_staleness:.2f}, plan {last.plan_staleness:.2f}; identity {last.identity}",
            file=sys.stderr,
            flush=True,
        )
    held_out = results[1:]
    same_work = [result for result in results if result.name in ("measured", *(case.name for case in HELD_OUT[:4]))]
    best, chosen = min(result.real_s for result in same_work), min(same_work, key=lambda result: result.plan_s)
    return {
        "results": [asdict(result) for result in results],
        "identity": all(result.identity for result in results),
        "largest_error": max(abs(result.error) for result in held_out),
        "within_15_percent": sum(abs(result.error) <= 0.15 for result in held_out),
        "held_out": len(held_out),
        "largest_staleness_error": max(abs(result.real_staleness - result.plan_staleness) for result in held_out),
        "rank_correlation": correlation([result.real_s for result in held_out], [result.plan_s for result in held_out]),
        "choice_above_best": chosen.real_s / best - 1,
        "closed_forms": closed_forms(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=None, help="keeps the runs; those that are there are not repeated"
    )
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    get_logger("areal").setLevel("ERROR")
    with tempfile.TemporaryDirectory() as name:
        folder = (args.folder or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure(folder, args.steps)))


if __name__ == "__main__":
    main()
