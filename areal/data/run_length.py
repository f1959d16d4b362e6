"""How many train steps a configuration asks for."""

import math
from fractions import Fraction

from areal.api.config import BaseExperimentConfig


def steps_per_epoch(config: BaseExperimentConfig, num_rows: int) -> int | Fraction:
    """Train steps per pass over `num_rows` rows.

    A fraction without drop_last: a batch at the border of two epochs has rows of both.
    """
    data = config.train_dataset
    return num_rows // data.batch_size if data.drop_last else Fraction(num_rows, data.batch_size)


def step_limits(config: BaseExperimentConfig, num_rows: int, *, samples_per_row: int) -> dict[str, int]:
    """Train steps that each limit of the run's length allows, by option; the smallest one applies.

    total_train_epochs limits only where it is given, or where nothing else does (one epoch).
    """
    limits: dict[str, int] = {}
    if config.total_train_steps is not None:
        limits["total_train_steps"] = config.total_train_steps
    if config.total_train_n_seqs is not None:
        per_step = config.train_dataset.batch_size * samples_per_row
        limits["total_train_n_seqs"] = -(-config.total_train_n_seqs // per_step)
    if config.total_train_epochs is not None or not limits:
        limits["total_train_epochs"] = math.ceil(steps_per_epoch(config, num_rows) * (config.total_train_epochs or 1))
    return limits
