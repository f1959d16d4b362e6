"""Owns the options of datasets."""

from __future__ import annotations

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where rows come from."""

    path: str = "???"
    """A .jsonl or .json file, a folder saved by `datasets`, or a hub name."""
    type: str = choice("rl", "rl", "sft", "rw")
    """What a row holds: rl = a prompt and what the reward needs, sft = prompt and answer, rw = chosen and rejected."""
    split: str = ""
    """Split of a hub dataset; empty = train for training, test for validation."""
    name: str = ""
    """Subset of a hub dataset; empty = its default."""
    map_fn: str = ""
    """Turns a raw row into ours: a registered name (gsm8k) or module:function; empty = rows are used as they are."""
    max_length: int | None = number(None, low=1)
    """Most tokens of a prompt (rl), of a whole text (sft) or of each of the two texts (rw); null = no limit."""
    truncation: str = choice("drop", "drop", "error", "left", "right")
    """Longer rows: drop = left out, error = the run ends, left = loses its beginning, right = its end (sft, rw)."""

    def problems(self) -> Problems:
        if not self.path:
            yield "path", "is empty: name a .jsonl file, a folder or a hub data set"
        if self.truncation in ("left", "right") and self.type == "rl":
            yield "truncation", f"{self.truncation} would change the questions of an rl data set: use drop or error"
        elif self.truncation != "drop" and self.max_length is None:
            yield "truncation", f"{self.truncation} has no effect without a limit: set max_length, or remove it"


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


def misplaced_data(kind: str, train: DatasetConfig, valid: DatasetConfig | None) -> Problems:
    """Rows of another kind of training lack the columns that `kind` reads."""
    for path, dataset in (("train_dataset", train), ("valid_dataset", valid)):
        if dataset is not None and dataset.type != kind:
            yield f"{path}.type", f"{dataset.type} rows cannot be used here: set it to {kind}"
