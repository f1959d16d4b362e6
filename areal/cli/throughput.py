"""What the metrics of a run say about its throughput. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from areal.api.errors import InputError

_GENERATION_BOUND = 0.1
"""Share of the time that trainers wait for batches from which on generation limits the run."""
_FLOPS_PER_PARAMETER = 6.0
"""Of a trained token: 2 forward, 4 backward (Kaplan et al. 2020, arXiv 2001.08361, without attention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What rates are divided by; None = unknown."""

    num_gpus: int
    num_trainer_gpus: int
    num_parameters: int | None
    peak_tflops: float | None
    """Of one GPU."""
    dollars_per_gpu_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates and shares over the measured steps. Per-GPU rates are None without GPUs."""

    steps: int
    seconds: float
    """From the end of the last warm-up step to the end of the last step."""
    seconds_per_step: float
    generated_tokens_per_s: float
    """Tokens of all answers, also of rejected, failed and unfinished ones."""
    trained_tokens_per_s: float
    """Prompt and answer tokens of the batches."""
    effective_tokens_per_s: float
    """Tokens that contribute to the loss: answers, without masked and filtered ones."""
    generated_tokens_per_s_per_gpu: float | None
    trained_tokens_per_s_per_gpu: float | None
    effective_tokens_per_s_per_gpu: float | None
    unused_share: float
    """Share of the generated tokens that are in no batch: rejected, dropped, failed, or still in the queue."""
    rejected_episodes: int
    failed_episodes: int
    dropped_episodes: int
    """Rejected as too stale."""
    seconds_by_phase: Mapping[str, float]
    """Mean seconds of a step in each phase of the trainer, the longest first."""
    waiting_share: float
    """Share of the time in which the trainers waited for a batch."""
    bound: str
    """generation or training: what limits the run."""
    weight_update_s: float
    """Mean seconds in which the trainer sends new weights or waits until the servers have them."""
    weight_update_share: float
    staleness_mean: float
    staleness_max: float
    mfu: float | None
    """Model FLOPs of the trained tokens divided by the peak of the trainers' GPUs, over the whole time."""
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
    trained, generated = total["tokens"], total["produced_tokens"]
    gpus, share = hardware.num_gpus, sum(row["seconds/rollout"] for row in measured) / seconds
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
        seconds_by_phase=dict(sorted(mean.items(), key=lambda item: -item[1])),
        waiting_share=share,
        bound="generation" if share >= _GENERATION_BOUND else "training",
        weight_update_s=mean.get("publish_weights", 0.0),
        weight_update_share=mean.get("publish_weights", 0.0) * len(measured) / seconds,
        staleness_mean=fmean(row["rollout/staleness_mean"] for row in measured),
        staleness_max=max(row["rollout/staleness_max"] for row in measured),
        mfu=_mfu(trained / seconds, hardware),
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


def table_lines(found: Throughput) -> list[str]:
    """The figures for people."""

    def each(value: float | None, unit: str) -> str:
        return "unknown" if value is None else f"{value:,.4g} {unit}".rstrip()

    rows = [
        ("steps measured", f"{found.steps} in {found.seconds:.1f} s ({found.seconds_per_step:.3g} s each)"),
        ("generated", each(found.generated_tokens_per_s, "tokens/s")),
        ("trained", each(found.trained_tokens_per_s, "tokens/s")),
        ("effective", each(found.effective_tokens_per_s, "tokens/s")),
        ("trained per GPU", each(found.trained_tokens_per_s_per_gpu, "tokens/s")),
        ("limited by", f"{found.bound} (trainers wait {found.waiting_share:.0%} of the time)"),
        ("weight update", f"{found.weight_update_s:.3g} s each ({found.weight_update_share:.1%} of the time)"),
        ("staleness", f"mean {found.staleness_mean:.2f}, maximum {found.staleness_max:g}"),
        (
            "not trained on",
            f"{found.unused_share:.1%} of the generated tokens; episodes: {found.rejected_episodes} rejected, "
            f"{found.failed_episodes} failed, {found.dropped_episodes} too stale",
        ),
        ("MFU", each(None if found.mfu is None else 100 * found.mfu, "%")),
        ("memory", ", ".join(f"{name} {size:.2f} GiB" for name, size in found.memory_gib.items())),
        ("cost", each(found.dollars_per_million_trained_tokens, "dollars per million trained tokens")),
    ]
    lines = [f"{name:<16} {text}" for name, text in rows]
    longest = [(name, spent) for name, spent in found.seconds_by_phase.items() if spent >= 0.001][:8]
    shares = ", ".join(f"{name} {spent / found.seconds_per_step:.0%}" for name, spent in longest)
    return [*lines, f"{'time of a step':<16} {shares}"]
