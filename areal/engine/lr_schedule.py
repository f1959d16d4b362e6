"""Owns the learning-rate schedule: a pure function of the step, so that recovery needs no state."""

from __future__ import annotations

import math

from areal.api.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0 first) of `total_steps`.

    w = int(warmup_steps_proportion * total_steps) warm-up steps rise linearly; the w-th is the first at the full
    rate. Then the chosen shape falls from it to min_lr_ratio * lr, reached at the last step and kept beyond.
    """
    num_warmup = int(config.warmup_steps_proportion * total_steps)
    if step < num_warmup:
        return config.lr * (step + 1) / num_warmup
    first_full = max(num_warmup - 1, 0)
    progress = min((step - first_full) / max(total_steps - 1 - first_full, 1), 1.0)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _shape(config.lr_scheduler_type, progress))


def _shape(name: str, progress: float) -> float:
    """From 1 at progress 0 to 0 at progress 1; constant stays 1."""
    match name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"unknown lr_scheduler_type {name!r}")
