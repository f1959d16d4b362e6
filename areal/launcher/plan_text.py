"""The text of a plan, which --dry-run prints."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from areal.api.config.redaction import public_command, public_environment
from areal.api.errors import ConfigError
from areal.launcher.job import LaunchPlan
from areal.system.process import AREAL_PROCESS


def plan_text(plan: LaunchPlan, step_s: float | None, *, given_step_s: float | None = None) -> str:
    """The plan as text. `step_s`: seconds of a train step, if an earlier run has measured it; `given_step_s`: as the
    user expects them, which comes first."""
    hosts = ", ".join(sorted({process.host.bind for process in plan.processes}))
    lines = [f"run folder: {plan.run_dir}", f"allocation: {plan.allocation}", f"ports: chosen at start, on {hosts}"]
    if len({process.host for process in plan.processes}) > 1:
        lines += ["placement:", *(f"  {row}" for row in _table(plan))]
    lines.append("processes:")
    for process in plan.processes:
        where = f"GPU {','.join(process.gpus)}" if process.gpus else process.device
        memory = "" if process.memory_bytes == 0 else f", model state {bytes_text(process.memory_bytes)}"
        lines.append(f"  {process.name}: {where}, CPU threads {process.num_threads}{memory}")
        lines.append(f"    {shlex.join(public_command(process.argv))}")
        if process.role != "controller":
            lines.append(f"    with {_variables(process.env)}")
    lines += [f"  server-{index}: already runs at {url}" for index, url in enumerate(plan.attached)]
    if plan.weight_path is not None:
        lines.append(f"weight updates: {plan.weight_path.transport} ({plan.weight_path.reason})")
    lines.append("numbers:")
    lines += [f"  {name}: {value}" for name, value in describe(plan).items()]
    lines.append(f"  GPU hours: {_gpu_hours(plan, step_s, given_step_s)}")
    lines.append("Model state: weights, gradients, optimiser state and KV cache, without activations and libraries.")
    return "\n".join(lines) + "\n"


def _table(plan: LaunchPlan) -> list[str]:
    """One row for each process, by node."""
    rows = [("node", "address", "process", "GPUs", "CPU threads", "model state")]
    nodes = dict.fromkeys(process.host for process in plan.processes)
    for host in nodes:
        for process in (process for process in plan.processes if process.host == host):
            memory = bytes_text(process.memory_bytes) if process.memory_bytes != 0 else "-"
            gpus = ",".join(process.gpus) or "-"
            rows.append((host.node, host.advertise, process.name, gpus, str(process.num_threads), memory))
        rows += [
            (host.node, host.advertise, "free", ",".join(gpus), "", "") for at, gpus in plan.spare_gpus if at == host
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _gpu_hours(plan: LaunchPlan, measured_s: float | None, given_s: float | None) -> str:
    gpus, steps = sum(len(process.gpus) for process in plan.processes), plan.numbers.total_steps
    if not gpus:
        return "0 (the run uses no GPU)"
    step_s = measured_s if given_s is None else given_s
    if steps is None or step_s is None:
        return "unknown (they need the number of steps, and an earlier run in this folder or --step-s=SECONDS)"
    source = "measured before" if given_s is None else "given by --step-s"
    return f"about {gpus * steps * step_s / 3600:.1f} ({gpus} GPUs, {steps} steps of {step_s:.1f} s as {source})"


def bytes_text(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _variables(env: Mapping[str, str]) -> str:
    """In shell syntax, as a start by hand needs them. Secrets and PATH are not shown."""
    shown = {name: value for name, value in public_environment(env).items() if name not in (AREAL_PROCESS, "PATH")}
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items()))


def describe(plan: LaunchPlan) -> dict[str, Any]:
    """The numbers of a plan under readable names."""
    numbers = plan.numbers
    shown: dict[str, Any] = {
        "episodes per train step": numbers.episodes_per_step,
        "samples per train step": numbers.samples_per_step,
        "optimiser steps per train step": numbers.optimizer_steps_per_train_step,
    }
    if numbers.max_staleness is not None:
        late = "; older episodes are trained on too" if numbers.on_stale == "train" else ""
        limit = f"{numbers.max_staleness} versions (on_stale={numbers.on_stale}{late})"
        shown["maximum episodes in flight"] = numbers.max_concurrent_episodes
        shown["maximum staleness at admission"] = limit
    shown["rows of train_dataset"] = numbers.rows
    shown["maximum train steps per epoch"] = numbers.steps_per_epoch
    shown["maximum train steps"] = numbers.total_steps
    return {name: "known after the dataset is read" if value is None else value for name, value in shown.items()}


def given_step_s(argv: Sequence[str]) -> float | None:
    """The number of `--step-s=SECONDS`; None without this word. ConfigError when it is not positive."""
    for text in (word.partition("=")[2] for word in argv if word.startswith("--step-s=")):
        try:
            step_s = float(text)
        except ValueError:
            step_s = math.nan
        if not 0 < step_s < math.inf:
            raise ConfigError(f"--step-s={text}: give seconds, such as --step-s=90", code="config.bad_override")
        return step_s
    return None
