"""The dataset row of each admission: a pure function of (seed, k), so the position is a count of admissions.

Epochs follow one another without a gap. With drop_last, the rows after the last complete batch of an epoch's order are
skipped in that epoch; without it, a batch may contain rows of two epochs. Rejected and failed episodes also consume
prompts, so a run may exceed its planned epochs: the stream is endless.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Self, TypeVar

import numpy as np

from areal.api.config import BaseExperimentConfig
from areal.api.errors import ConfigError

# ----------------------------------------------------------------------------------------------------------------------
# How many train steps a configuration asks for.


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


RowT = TypeVar("RowT")


class PromptStream(Generic[RowT]):
    """An endless, reproducible stream of the rows of a dataset."""

    def __init__(
        self, rows: Sequence[RowT], *, seed: int, batch_size: int, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        self._rows = rows
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_rows = len(rows)
        self.rows_per_epoch = len(rows) // batch_size * batch_size if drop_last else len(rows)
        if self.rows_per_epoch == 0:
            message = f"train_dataset.batch_size={batch_size} exceeds its {len(rows)} usable rows: lower it or add data"
            raise ConfigError(message, code="data.too_few_rows")
        self._order: tuple[int, array[int]] = (-1, array("q"))

    @classmethod
    def of(cls, rows: Sequence[RowT], config: BaseExperimentConfig) -> Self:
        """The stream of a configuration."""
        return cls(
            rows,
            seed=config.seed,
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            drop_last=config.train_dataset.drop_last,
        )

    def index(self, k: int) -> int:
        """Index of the dataset row of admission `k`."""
        epoch, position = divmod(k, self.rows_per_epoch)
        if not self.shuffle:
            return position
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            shuffled = generator.permutation(self.num_rows).astype(np.int64)
            self._order = (epoch, array("q", shuffled.tobytes()))  # faster to index than an ndarray
        return self._order[1][position]

    def row(self, k: int) -> RowT:
        """The row of admission `k`, not a copy: do not change it."""
        return self._rows[self.index(k)]


def row_stream(identity: Mapping[str, Any]) -> PromptStream[int] | None:
    """The stream of row indices of an identity; None when there is none, because the identity is damaged."""
    try:
        stream = PromptStream(
            range(identity["num_rows"]),
            seed=identity["seed"],
            batch_size=identity["batch_size"],
            shuffle=identity["shuffle"],
            drop_last=identity["rows_per_epoch"] != identity["num_rows"],
        )
    except (ConfigError, ArithmeticError, TypeError, ValueError):
        return None
    return stream if stream.rows_per_epoch == identity["rows_per_epoch"] else None
