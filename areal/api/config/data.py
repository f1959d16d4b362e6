"""Owns the options of datasets."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where rows come from."""

    path: str = "???"
    """A .jsonl or .json file, a folder saved by `datasets`, or a hub name."""
    type: str = choice("rl", "rl", "sft")
    """What a row must hold: rl = a prompt and what the reward needs, sft = a prompt and its answer."""
    split: str = ""
    """Split of a hub dataset; empty = train for training, test for validation."""
    name: str = ""
    """Subset of a hub dataset; empty = its default."""
    map_fn: str = ""
    """Turns a raw row into ours: a registered name (gsm8k) or module:function; empty = rows are used as they are."""
    max_length: int | None = number(None, low=1)
    """Rows whose prompt (rl) or whole text (sft) has more tokens are left out; null = none."""

    def problems(self) -> Problems:
        if not self.path:
            yield "path", "is empty: name a .jsonl file, a folder or a hub data set"


@dataclass(frozen=True, kw_only=True)
class TrainDatasetConfig(DatasetConfig):
    """The training set."""

    batch_size: int = number(1, low=1)
    """Rows per step over all ranks."""
    shuffle: bool = True
    """New order in every epoch, derived from `seed` and the epoch."""
    drop_last: bool = True
    """Leave out the rows behind an epoch's last whole batch; false = that batch takes its rest from the next epoch."""


@dataclass(frozen=True, kw_only=True)
class ValidDatasetConfig(DatasetConfig):
    """The held-out set: never shuffled, no row dropped."""

    max_rows: int | None = number(None, low=1)
    """Evaluate on the first rows only; null = all."""
