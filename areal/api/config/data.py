"""Options of datasets."""

import json
import random
from dataclasses import dataclass
from typing import Any

from areal.api.config.schema import Problem, Problems, choice, given, number, option, satisfies, section, unless, when

_SEVERAL = satisfies("path", lambda path: not isinstance(path, str), "a list")
_FILE_ENDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")


ENVIRONMENT_PREFIX = "env:"


def is_environment_path(path: str) -> bool:
    """Whether a dataset's path is the specification of rows of an environment."""
    return path.startswith(ENVIRONMENT_PREFIX)


def is_row_function(path: str) -> bool:
    """Whether a dataset's path names a function that returns the rows, or is a specification of rows."""
    return ":" in path and "://" not in path


_FROM_LIBRARY = satisfies(
    ".",
    lambda data: not all(path.endswith(_FILE_ENDS) or is_row_function(path) for path in data.paths),
    "path is a folder or a hub name",
)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset and how its rows are read."""

    path: str | list[str] = option("???", also="verl: data.train_files, data.val_files; ROLL: data_args.file_name")
    """Files (data/*.jsonl), a folder of `datasets`, a hub name, file.py:f, env:NAME?size=N, or a list of them."""
    type: str = choice("rl", "rl", "sft", "rw")
    """Kind of rows: rl = prompt and reward data, sft = prompt and answer, rw = chosen and rejected answer."""
    split: str = option("", relevant=_FROM_LIBRARY, also="cosmos-rl: dataset.split")
    """Split of a hub dataset; empty = train for training, test for validation."""
    name: str = option("", relevant=_FROM_LIBRARY, also="cosmos-rl: dataset.subset")
    """Subset of a hub dataset; empty = its default subset."""
    revision: str = option("", relevant=_FROM_LIBRARY, also="cosmos-rl: dataset.revision")
    """Branch, tag or commit of a hub dataset; empty = its main branch."""
    columns: dict[str, str] = section(dict[str, str], also="verl: data.prompt_key, data.response_key")
    """New names of columns of the raw rows, {question: prompt}; a.b is a value inside column a; {} = none."""
    map_fn: str = option("", also="verl: data.custom_cls")
    """Function that converts raw rows: a registered name (gsm8k) or module:function; empty = no conversion."""
    max_length: int | None = number(None, low=1, also="verl: data.max_prompt_length; ROLL: prompt_length")
    """Maximum tokens of a prompt (rl), a text (sft) or each of the two texts (rw); null = no limit."""
    truncation: str = choice(
        "drop", "drop", "error", "left", "right", relevant=given("max_length"), also="verl: data.truncation"
    )
    """Rows above max_length: drop = skip the row, error = stop, left / right = cut that end (sft and rw only)."""
    cache_dir: str = option(
        "", relevant=given("max_length") & when("type", "rl"), also="verl: data.cache_dir; ROLL: data_args.cache_dir"
    )
    """Folder that keeps the numbers of tokens of all prompts between runs (not of images); empty = none."""
    max_rows: int | None = number(None, low=1, also="verl: data.train_max_samples, data.val_max_samples")
    """Number of rows to use: the first of the mix, in valid_dataset with shuffle random ones; null = all rows."""
    max_characters: int | None = number(1_000_000, low=1)
    """Maximum characters of a text of a row, null = no limit; longer rows are dropped or refused, see truncation."""

    @property
    def paths(self) -> list[str]:
        """Every dataset of `path`."""
        return [self.path] if isinstance(self.path, str) else self.path

    def problems(self) -> Problems:
        if not self.paths or not all(self.paths):
            text = "is empty: name a file, a folder or a hub dataset"
            yield Problem("path", text, "config.missing_requirement")
        if len(set(self.columns.values())) < len(self.columns):
            yield "columns", "gives two columns one name: give each a separate name"
        if self.truncation in ("left", "right") and self.type == "rl":
            yield "truncation", f"{self.truncation} would change the prompts of an rl dataset: use drop or error"


@dataclass(frozen=True, kw_only=True)
class TrainDatasetConfig(DatasetConfig):
    """The training set."""

    weights: list[float] = section(list[float], relevant=_SEVERAL)
    """Sampling weight of each dataset of `path`, any scale; small ones repeat, none is shortened; [] = by size."""
    curriculum: str = ""
    """Function f(rows) -> rows of an epoch in the order of training (file.py:function); empty = as in the data."""
    batch_size: int = number(1, low=1, also="verl: data.train_batch_size; ROLL: rollout_batch_size")
    """Rows per train step, over all ranks."""
    shuffle: bool = option(True, also="verl: data.shuffle")
    """Shuffle the rows of every epoch with a seed derived from `seed` and the epoch."""
    drop_last: bool = True
    """Skip the rows after an epoch's last full batch; false = fill that batch with rows of the next epoch."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.weights and len(self.weights) != len(self.paths):
            yield (
                "weights",
                f"has {len(self.weights)} numbers for {len(self.paths)} datasets of path: give one for each",
            )
        if any(weight <= 0 for weight in self.weights):
            yield "weights", "has a number that is not above 0: remove that dataset from path, or weight it"
        if self.curriculum and self.shuffle:
            yield "curriculum", "sets the order of the rows, which shuffle=true would change: set shuffle: false"
        if self.curriculum and self.type != "rl":
            yield "curriculum", f"orders rows of type rl, and type is {self.type}: order the file"


@dataclass(frozen=True, kw_only=True)
class ValidDatasetConfig(DatasetConfig):
    """The held-out set; every evaluation reads the same rows."""

    shuffle: bool = option(False, relevant=given("max_rows") | when("drop_last", True), also="verl: validation_shuffle")
    """Choose the rows of max_rows and drop_last at random, equal in every run, not from the start."""
    batch_size: int | None = number(None, low=1, relevant=unless("type", "rl") | when("drop_last", True))
    """Rows that sft, rw and dpo evaluate at once, and the unit of drop_last; null = train_dataset.batch_size."""
    drop_last: bool = False
    """Leave out the rows after the last full batch_size."""

    def problems(self) -> Problems:
        yield from super().problems()
        if self.drop_last and self.batch_size is None:
            yield Problem("drop_last", "needs batch_size, of which it drops a part", "config.missing_requirement")

    def chosen(self, num_rows: int) -> list[int]:
        """The indices of the rows of an evaluation."""
        rows = list(range(num_rows))
        if self.shuffle:
            random.Random(0).shuffle(rows)
        rows = rows[: self.max_rows]
        return rows[: len(rows) // self.batch_size * self.batch_size] if self.drop_last and self.batch_size else rows


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """The chat template, which renders messages in rows, workflows and agents."""

    path: str = ""
    """Jinja file that replaces the template of the tokenizer; empty = the template of the tokenizer."""
    args: dict[str, Any] = section(dict[str, Any], also="verl: data.apply_chat_template_kwargs")
    """Variables that the template has in every rendering, {enable_thinking: false}; {} = those that areal passes."""

    def problems(self) -> Problems:
        for name, value in self.args.items():
            if not name.isidentifier():
                yield "args", f"{name!r} is no name of a variable: use letters, digits and _"
            try:
                json.dumps(value)
            except TypeError:
                yield "args", f"{name} is of type {type(value).__name__}: use text, a number, a list or a mapping"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Images in the rows of datasets, for models that take images."""

    image_key: str = option("images", also="verl: data.image_key")
    """Column with the images of a row: bytes, {bytes: or path:}, paths, base64 or data URLs, one or a list."""
    max_images: int = number(16, low=1, also="verl: limit_images")
    """Maximum images of a row; a row with more is refused."""
    max_pixels: int | None = number(None, low=1, also="ROLL: actor_train.model_args.max_pixels")
    """Maximum width x height after the resize; null = that of preprocessor_config.json."""
    root: str = ""
    """Folder of relative paths of images; empty = the current folder."""


def misplaced_data(kind: str, train: DatasetConfig, valid: DatasetConfig | None) -> Problems:
    """Datasets whose rows lack the columns that training of `kind` reads."""
    for path, dataset in (("train_dataset", train), ("valid_dataset", valid)):
        if dataset is not None and dataset.type != kind:
            yield f"{path}.type", f"{dataset.type} rows cannot be used here: set it to {kind}"
