"""`areal benchmark`: runs a configuration for a few steps, or a grid of them, and reports its throughput."""

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from areal.api.config import PPOConfig
from areal.api.config.experiment import LengthRule, sweep_words
from areal.api.config.load import load_experiment
from areal.api.errors import ConfigError, InputError
from areal.api.metrics import rounded
from areal.models.checkpoint_files import stored_weights
from areal.observe.trace import WAIT, waits_text
from areal.system.durable import write_atomic
from areal.system.process import run_to_its_end
from areal.system.run_paths import RunPaths

# What the metrics of a run say about its throughput. Pure.

_GENERATION_BOUND = 0.1  # Share of the time that trainers wait for batches from which on generation limits the run.
_FLOPS_PER_PARAMETER = 6.0
"""Operations for a trained token: 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361, without attention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What rates are divided by; None = unknown."""

    num_gpus: int
    num_trainer_gpus: int
    num_parameters: int | None
    peak_tflops: float | None  # Peak of one GPU.
    dollars_per_gpu_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates and shares over the measured steps. Per-GPU rates are None without GPUs."""

    steps: int
    seconds: float  # Time from the end of the last warm-up step to the end of the last step.
    seconds_per_step: float
    generated_tokens_per_s: float  # Tokens of all answers, also of rejected, failed and unfinished ones.
    trained_tokens_per_s: float  # Prompt and answer tokens of the batches.
    effective_tokens_per_s: float  # Tokens that contribute to the loss: answers, without masked and filtered ones.
    generated_tokens_per_s_per_gpu: float | None
    trained_tokens_per_s_per_gpu: float | None
    effective_tokens_per_s_per_gpu: float | None
    unused_share: float
    """Share of the generated tokens that are in no batch: rejected, dropped, failed, or still in the queue."""
    rejected_episodes: int
    failed_episodes: int
    dropped_episodes: int  # Rejected as too stale.
    seconds_by_phase: Mapping[str, float]  # Mean seconds of a step in each phase of the trainer, the longest first.
    waiting_share: float  # Share of the time in which the trainers did nothing but wait.
    waits: Mapping[str, float]  # The same by what they waited for, the longest first.
    bound: str  # generation or training: what limits the run.
    weight_update_s: float  # Mean seconds in which the trainer sends new weights or waits until the servers have them.
    weight_update_share: float
    staleness_mean: float
    staleness_max: float
    tree_ratio: float | None  # Tokens of the batches for each token that was computed; None where no row shares any.
    mfu: float | None
    """Model FLOPs of the computed tokens divided by the peak of the trainers' GPUs, over the whole time."""
    dollars_per_million_trained_tokens: float | None
    memory_gib: Mapping[str, float]
    """Process -> its largest resident memory in a measured step, with that of its children."""


def throughput(rows: Sequence[Mapping[str, float]], *, warmup_steps: int, steps: int, hardware: Hardware) -> Throughput:
    """The throughput of `steps` steps after `warmup_steps`. `rows`: lines of metrics.jsonl, in order.

    Raises InputError when the run has fewer steps.
    """
    before = next((row for row in rows if row["step"] == warmup_steps), None)
    measured = [row for row in rows if warmup_steps < row["step"] <= warmup_steps + steps]
    if before is None or len(measured) < steps:
        message = f"the run has {len(measured)} of {steps} steps after {warmup_steps} warm-up steps: see its logs"
        raise InputError(message, code="benchmark.too_few_steps")
    seconds = measured[-1]["time"] - before["time"]
    total = {name: sum(row[f"rollout/{name}"] for row in measured) for name in _SUMMED}
    effective = sum(row["batch/num_trained_tokens"] for row in measured)
    phases = {name.removeprefix("seconds/") for row in measured for name in row if name.startswith("seconds/")}
    mean = {name: fmean(row.get(f"seconds/{name}", 0.0) for row in measured) for name in phases - {"step", "elapsed"}}
    mean = dict(sorted(mean.items(), key=lambda item: -item[1]))
    waits = {name: spent * len(measured) / seconds for name, spent in mean.items() if name.startswith(WAIT)}
    ratios = [row["actor/tree_ratio"] for row in measured if "actor/tree_ratio" in row]
    tree_ratio = fmean(ratios) if ratios else None
    trained, generated = total["tokens"], total["produced_tokens"]
    gpus = hardware.num_gpus
    per_gpu = (lambda tokens: tokens / seconds / gpus) if gpus else (lambda tokens: None)
    dollars = hardware.dollars_per_gpu_hour
    return Throughput(
        steps=len(measured),
        seconds=seconds,
        seconds_per_step=seconds / len(measured),
        generated_tokens_per_s=generated / seconds,
        trained_tokens_per_s=trained / seconds,
        effective_tokens_per_s=effective / seconds,
        generated_tokens_per_s_per_gpu=per_gpu(generated),
        trained_tokens_per_s_per_gpu=per_gpu(trained),
        effective_tokens_per_s_per_gpu=per_gpu(effective),
        unused_share=1.0 - min(1.0, total["generated_tokens"] / generated) if generated else 0.0,
        rejected_episodes=int(total["rejected"]),
        failed_episodes=int(total["failed"]),
        dropped_episodes=int(total["dropped"]),
        seconds_by_phase={name: spent for name, spent in mean.items() if not name.startswith(WAIT)},
        waiting_share=sum(waits.values()),
        waits={name.removeprefix(WAIT): share for name, share in waits.items()},
        bound="generation" if waits.get(f"{WAIT}batch", 0.0) >= _GENERATION_BOUND else "training",
        weight_update_s=mean.get("publish_weights", 0.0),
        weight_update_share=mean.get("publish_weights", 0.0) * len(measured) / seconds,
        staleness_mean=fmean(row["rollout/staleness_mean"] for row in measured),
        staleness_max=max(row["rollout/staleness_max"] for row in measured),
        tree_ratio=tree_ratio,
        mfu=_mfu(trained / (tree_ratio or 1.0) / seconds, hardware),
        dollars_per_million_trained_tokens=(
            dollars * gpus * seconds / 3600 / trained * 1e6 if dollars and gpus and trained else None
        ),
        memory_gib={
            name.removeprefix("memory/"): max(row.get(name, 0.0) for row in measured)
            for name in measured[-1]
            if name.startswith("memory/")
        },
    )


_SUMMED = ("tokens", "produced_tokens", "generated_tokens", "rejected", "failed", "dropped")


def _mfu(tokens_per_s: float, hardware: Hardware) -> float | None:
    peak, parameters = hardware.peak_tflops, hardware.num_parameters
    if not peak or not parameters or not hardware.num_trainer_gpus:
        return None
    return _FLOPS_PER_PARAMETER * parameters * tokens_per_s / (peak * 1e12 * hardware.num_trainer_gpus)


def table_lines(figures: Throughput) -> list[str]:
    def each(value: float | None, unit: str) -> str:
        return "unknown" if value is None else f"{rounded(value)} {unit}".rstrip()

    rows = [
        ("steps measured", f"{figures.steps} in {figures.seconds:.1f} s ({figures.seconds_per_step:.3g} s each)"),
        ("generated", each(figures.generated_tokens_per_s, "tokens/s")),
        ("trained", each(figures.trained_tokens_per_s, "tokens/s")),
        ("effective", each(figures.effective_tokens_per_s, "tokens/s")),
        ("trained per GPU", each(figures.trained_tokens_per_s_per_gpu, "tokens/s")),
        ("limited by", figures.bound),
        ("trainer waits", waits_text(figures.waits)),
        ("weight update", f"{figures.weight_update_s:.3g} s each ({figures.weight_update_share:.1%} of the time)"),
        ("staleness", f"mean {figures.staleness_mean:.2f}, maximum {figures.staleness_max:g}"),
        (
            "not trained on",
            f"{figures.unused_share:.1%} of the generated tokens; episodes: {figures.rejected_episodes} rejected, "
            f"{figures.failed_episodes} failed, {figures.dropped_episodes} too stale",
        ),
        ("tree ratio", "nothing shared" if figures.tree_ratio is None else f"{figures.tree_ratio:.2f}"),
        ("MFU", each(None if figures.mfu is None else 100 * figures.mfu, "%")),
        ("memory", ", ".join(f"{name} {size:.2f} GiB" for name, size in figures.memory_gib.items())),
        ("cost", each(figures.dollars_per_million_trained_tokens, "dollars per million trained tokens")),
    ]
    lines = [f"{name:<16} {text}" for name, text in rows]
    longest = [(name, spent) for name, spent in figures.seconds_by_phase.items() if spent >= 0.001][:8]
    shares = ", ".join(f"{name} {spent / figures.seconds_per_step:.0%}" for name, spent in longest)
    return [*lines, f"{'time of a step':<16} {shares}"]


_PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "A10G": 70.0}
"""Part of a card's name -> peak dense TFLOP/s in bf16, from the makers' data sheets."""
_EVERY_RUN = (
    "total_train_epochs=null", "total_train_n_seqs=null", "valid_dataset=null", "evaluator={}",
    "saver={}", "recover.mode=disabled", "strict_config=false",
)  # fmt: skip
"""The end of every command line: nothing but training happens, and nothing else ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    settings: Mapping[str, str]  # The options that the sweep varies.
    repeat: int
    folder: str
    peak_memory_gib: float  # Largest sum of the resident memory of all processes.
    throughput: Throughput


def benchmark(words: Sequence[str]) -> int:
    """`areal benchmark --config FILE [key=value ...] [--sweep key=a,b ...] [--json]`."""
    parser = argparse.ArgumentParser(
        prog="areal benchmark",
        usage="%(prog)s --config FILE.yaml [key.sub=value ...] [--sweep key.sub=A,B ...] [--launcher NAME] [--json]",
        description="Run a configuration for benchmark.warmup_steps + benchmark.steps train steps and report tokens "
        "per second, time by phase, staleness, unused tokens and cost. benchmark.length replaces the dataset, the "
        "workflow and the rewards by synthetic ones. `areal config benchmark` lists the options.",
        epilog="The runs, and the results in benchmark-TIME.json, are in cluster.fileroot/experiment_name.",
    )
    parser.add_argument("--config", metavar="FILE", action="append", required=True, help="several are merged in order")
    parser.add_argument("--sweep", metavar="KEY=A,B", nargs="+", default=[], help="measure every combination")
    parser.add_argument("--launcher", metavar="NAME", help="as for areal run")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(words)
    files = [word for path in args.config for word in ("--config", path)]
    started = time.strftime("%Y%m%d-%H%M%S")
    combinations = itertools.product(*map(sweep_words, args.sweep))
    grid = [dict(word.split("=", 1) for word in words) for words in combinations]
    plans = [_load([*files, *args.overrides, *_words(settings)]) for settings in grid]  # before the first run
    runs: list[Run] = []
    for number, (settings, config) in enumerate(zip(grid, plans, strict=True)):
        for repeat in range(config.benchmark.repeats):
            trial = f"benchmark-{started}-{number:02d}-{repeat}"
            command = [*files, *args.overrides, *_words(settings)]
            launcher = ["--launcher", args.launcher] if args.launcher else []
            measured = _measure(command, config, trial=trial, launcher=launcher)
            runs.append(Run(settings=settings, repeat=repeat, **measured))
            title = f"== {' '.join(_words(runs[-1].settings)) or 'benchmark'} (run {runs[-1].repeat + 1})"
            _say([title, *table_lines(runs[-1].throughput)])
    report = {"config": args.config, "overrides": args.overrides, "runs": [asdict(run) for run in runs]}
    path = Path(runs[0].folder).parent / f"benchmark-{started}.json"
    write_atomic(path, json.dumps(report, indent=1).encode())
    if len(runs) > 1:
        _say(_comparison(runs))
    sys.stdout.write(json.dumps(report, indent=1) + "\n" if args.json else f"{path}\n")
    return 0


def _words(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _load(words: Sequence[str]) -> PPOConfig:
    config = load_experiment(words)
    if not isinstance(config, PPOConfig):
        message = "areal benchmark measures runs with rollouts: use a configuration with an actor"
        raise ConfigError(message, code="benchmark.no_rollouts")
    return config


def _measure(command: Sequence[str], config: PPOConfig, *, trial: str, launcher: Sequence[str]) -> dict[str, Any]:
    options = config.benchmark
    # Towards its end a run generates less, because no batch needs more: those steps are not measured.
    total = options.warmup_steps + options.steps + config.rollout.max_head_offpolicyness + 1
    words = [*command, *_EVERY_RUN, f"trial_name={trial}", f"total_train_steps={total}"]
    paths = RunPaths(Path(config.cluster.fileroot).expanduser().absolute() / config.experiment_name / trial)
    if options.length:
        words += _synthetic(config, paths.root.with_name(f"{trial}-rows.jsonl"), num_steps=total)
    status = run_to_its_end([sys.executable, "-m", "areal.launcher", *launcher, *words])
    if status == 130:
        raise KeyboardInterrupt
    if status:
        message = f"the run ended with status {status}, see above: {paths.root}"
        raise InputError(message, code="benchmark.run_failed")
    rows = [json.loads(line) for line in paths.metrics.read_text(encoding="utf-8").splitlines()]
    plan, summary = json.loads(paths.plan.read_bytes()), json.loads(paths.summary.read_bytes())
    hardware = _hardware(config, plan["processes"])
    figures = throughput(rows, warmup_steps=options.warmup_steps, steps=options.steps, hardware=hardware)
    return {"folder": str(paths.root), "peak_memory_gib": summary["peak_rss_gib"], "throughput": figures}


def _synthetic(config: PPOConfig, path: Path, *, num_steps: int) -> list[str]:
    """Overrides for synthetic prompts and answers; `path` becomes their dataset."""
    options, longest = config.benchmark, LengthRule.parse(config.benchmark.length).longest
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"prompt": "", "index": index}) for index in range(num_steps * config.train_dataset.batch_size))
    write_atomic(path, "".join(f"{row}\n" for row in rows).encode())
    return [
        "workflow=synthetic",
        f"workflow_args={{length: '{options.length}', prompt_length: {options.prompt_length}}}",
        f"train_dataset={{path: {path}, batch_size: {config.train_dataset.batch_size}}}",
        f"gconfig.max_new_tokens={longest}",
        f"gconfig.max_tokens={longest + options.prompt_length}",
        "rollout.should_accept_fn=''",
        "reward_fn=''",
        "alarms.action=off",  # random rewards and drawn lengths
    ]


def _hardware(config: PPOConfig, processes: Sequence[Mapping[str, Any]]) -> Hardware:
    gpus = {
        name: sum(len(process["gpus"]) for process in processes if process["role"] == name)
        for name in ("server", "trainer")
    }
    folder = Path(config.actor.path).expanduser()
    shapes = [entry.shape for entry in stored_weights(folder).values()] if any(folder.glob("*.safetensors")) else []
    return Hardware(
        num_gpus=sum(gpus.values()),
        num_trainer_gpus=gpus["trainer"],
        num_parameters=sum(math.prod(shape) for shape in shapes) or None,
        peak_tflops=config.benchmark.peak_tflops or (_card_tflops() if gpus["trainer"] else None),
        dollars_per_gpu_hour=config.benchmark.dollars_per_gpu_hour,
    )


def _card_tflops() -> float | None:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def _comparison(runs: Sequence[Run]) -> list[str]:
    """A line for each combination: means over its repeats, the deviation of the step time, a bar of trained tokens."""
    most = max(run.throughput.trained_tokens_per_s for run in runs)
    lines = [f"{'s/step':>8} {'+-':>6} {'generated/s':>11} {'waiting':>7} {'stale':>5} {'trained/s':>10}"]
    for words, group in itertools.groupby(runs, key=lambda run: " ".join(_words(run.settings))):
        figures = [run.throughput for run in group]
        seconds = [figure.seconds_per_step for figure in figures]
        spread = stdev(seconds) if len(seconds) > 1 else 0.0
        trained = fmean(figure.trained_tokens_per_s for figure in figures)
        lines.append(
            f"{fmean(seconds):8.3g} {spread:6.2g} {fmean(row.generated_tokens_per_s for row in figures):11,.0f} "
            f"{fmean(row.waiting_share for row in figures):7.0%} {fmean(row.staleness_mean for row in figures):5.2f} "
            f"{trained:10,.0f} {'#' * round(20 * trained / most):<20} {words}"
        )
    return lines


def _say(lines: Sequence[str]) -> None:
    sys.stderr.write("\n".join(["", *lines, ""]))
    sys.stderr.flush()
