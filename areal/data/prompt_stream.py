"""Owns which dataset row each admission gets: a pure function of (seed, k), so the position is a count of admissions.

Epochs follow each other without a gap. With drop_last the rows behind the last whole batch of an epoch's order sit out
that epoch; without it every row is used and the batch at the border takes its rest from the next epoch. Rejected and
failed episodes take prompts too, so a run may go somewhat beyond its planned epochs: the stream never ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import numpy as np

from areal.api.config import BaseExperimentConfig
from areal.api.errors import ConfigError

RowT = TypeVar("RowT")


class PromptStream(Generic[RowT]):
    """Row number k of an endless, reproducible stream over a dataset."""

    def __init__(
        self,
        rows: Sequence[RowT],
        *,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = True,
        num_epochs: int = 1,
    ) -> None:
        self._rows = rows
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_rows = len(rows)
        self.num_epochs = num_epochs
        """Planned passes; replacements of rejected episodes may go beyond."""
        self.rows_per_epoch = len(rows) // batch_size * batch_size if drop_last else len(rows)
        if self.rows_per_epoch == 0:
            raise ConfigError(
                f"train_dataset.batch_size={batch_size} is more than its {len(rows)} usable rows: "
                "lower it or bring more data"
            )
        self._order: tuple[int, array[int]] = (-1, array("q"))

    @classmethod
    def of(cls, rows: Sequence[RowT], config: BaseExperimentConfig) -> Self:
        """The stream that a configuration describes."""
        return cls(
            rows,
            seed=config.seed,
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            drop_last=config.train_dataset.drop_last,
            num_epochs=config.total_train_epochs,
        )

    def index(self, k: int) -> int:
        """Which row of the dataset admission `k` gets."""
        epoch, position = divmod(k, self.rows_per_epoch)
        if not self.shuffle:
            return position
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            shuffled = generator.permutation(self.num_rows).astype(np.int64)
            self._order = (epoch, array("q", shuffled.tobytes()))  # indexing it is faster than an ndarray
        return self._order[1][position]

    def row(self, k: int) -> RowT:
        """The row of admission `k`; do not change it, it is the dataset's own."""
        return self._rows[self.index(k)]
