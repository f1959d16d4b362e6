"""Datasets: rows from files, folders and the hub, mapped to the columns that workflows and rewards read."""

import dataclasses
import datetime
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl

import orjson

from areal.api.config import DatasetConfig, TrainDatasetConfig, ValidDatasetConfig
from areal.api.config.data import ENVIRONMENT_PREFIX, is_environment_path, is_row_function
from areal.api.errors import ConfigError, InputError
from areal.api.registry import CURRICULUM_CALL, MAP_CALL, ROWS_CALL, load_function, resolve_function
from areal.data.chat import encode_prompt
from areal.data.images import PromptImages
from areal.data.row_check import mixed_rows, require_usable, size_problem
from areal.data.row_files import READERS, Row, dataset_files, object_row
from areal.data.supervised_rows import EncodedPair, EncodedRow, encode_pair, encode_sft_row
from areal.data.tokenizer import Tokenizer
from areal.system.durable import write_atomic

# ----------------------------------------------------------------------------------------------------------------------
# Numbers of tokens of prompts, kept in a folder between runs: counting them takes most of the time of reading rows.


def cached_lengths(folder: str, rows: Sequence[Row], tokenizer: Tokenizer, count: Callable[[], list[int]]) -> list[int]:
    """The numbers of tokens of all prompts: those in `folder`, or the result of `count`, which is then kept there.

    The name of the file is a hash of the rows, the tokenizer and its template, so a change of one of them counts again.
    A file that cannot be read or is damaged counts as missing. Raises InputError when the folder cannot be written.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not folder or backend is None:  # a tokenizer in Python has no text that identifies it
        return count()
    digest = hashlib.sha256(backend.to_str().encode())
    digest.update(repr(tokenizer.chat_template).encode())
    for row in rows:
        digest.update(repr(row).encode())  # JSON has no lone surrogates and no integers of more than 64 bits
    path = Path(folder).expanduser() / f"lengths-{digest.hexdigest()}.json"
    try:
        result = orjson.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, orjson.JSONDecodeError):
        result = None
    if isinstance(result, list) and len(result) == len(rows) and all(type(length) is int for length in result):
        return result
    lengths = count()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, orjson.dumps(lengths))
    except OSError as error:
        message = f"cache_dir: {folder} cannot be written: {error.strerror}"
        raise InputError(message, code="data.cache_dir") from error
    return lengths


# ----------------------------------------------------------------------------------------------------------------------
# Rows of public datasets with images, as chats that ask for an answer in the form that their reward reads.

_COUNT = "\n\nCount the objects. Write only their number in square brackets, like: [7]"
_FORMULA = "\n\nThink step by step. Write the final answer in a box, like: \\boxed{42}"


def clevr_count_row(row: Row) -> Row:
    """A row of clevr_count_70k (images, problem, answer); its answer becomes `[n]`."""
    return _chat(row, "problem", "images", _COUNT, f"[{str(row['answer']).strip(' []')}]")


def geometry3k_row(row: Row) -> Row:
    r"""A row of geometry3k (images, problem, answer); its answer becomes `\boxed{answer}`."""
    return _chat(row, "problem", "images", _FORMULA, _boxed(row["answer"]))


def virl39k_row(row: Row) -> Row:
    r"""A row of ViRL39K (image, question, answer); its answer becomes `\boxed{answer}`."""
    return _chat(row, "question", "image", _FORMULA, _boxed(row["answer"]))


def _chat(row: Row, question: str, images: str, instruction: str, answer: str) -> Row:
    """`question` and `images` are columns, which `messages` and the column `images` replace; the others stay."""
    others = {name: value for name, value in row.items() if name not in (question, images)}
    message = {"role": "user", "content": row[question] + instruction}
    return {**others, "messages": [message], "images": row[images], "answer": answer}


def _boxed(answer: Any) -> str:
    text = str(answer).strip()
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


AnyT = TypeVar("AnyT")
EncodedT = TypeVar("EncodedT", EncodedRow, EncodedPair)

_ANSWERS = {"answer", "answers", "final_answer", "ground_truth", "solution", "target", "label", "reward_model", "tests"}
"""Columns that rewards compare with."""
_EXACT_FLOATS = 2**53  # Above, a float no longer has the last digit of an integer.
_MORE_ROWS = 64  # Rows that are read beyond the first, because a map_fn and limits of length may drop some.
_GSM8K_INSTRUCTION = "\n\nThink step by step. End with a line that holds only #### and the final number, like: #### 42"


def load_rows(
    config: DatasetConfig | None,
    *,
    default_split: str,
    tokenizer: Tokenizer | None = None,
    first: int | None = None,
    images: PromptImages | None = None,
) -> list[Row]:
    """Load the rows of a dataset in order and map them. Rows with a prompt above max_length are dropped or refused.

    None, a dataset that the configuration leaves out, has no rows. A row for which map_fn returns None is dropped.
    InputError names the file and line, or the row, with the error.
    `first`: at least this number of rows is returned if they exist; the rest of a .jsonl file may be left unread.
    `images`: how the model takes images, whose tokens count too. `load_sft_rows` and `load_pairs` load rows for
    training without rollouts.
    """
    if config is None:
        return []
    limit = config.max_length
    if limit is not None and config.type != "rl":
        raise ValueError(f"max_length of dataset {config.path}: rows of type={config.type} are truncated when encoded")
    if limit is not None and tokenizer is None:
        message = f"max_length={limit} of dataset {config.path} needs a tokenizer: pass one to load_rows"
        raise ConfigError(message, code="data.no_tokenizer")
    curriculum = config.curriculum if isinstance(config, TrainDatasetConfig) else ""
    if first is not None and len(config.paths) == 1 and not curriculum:
        with suppress(InputError):
            rows = _of_all(config, lambda part: _short_rows(part, default_split, tokenizer, images, first + _MORE_ROWS))
            if len(rows) >= first:
                return rows
    rows = _of_all(config, lambda part: _short_rows(part, default_split, tokenizer, images))
    return _in_order_of(curriculum, rows) if curriculum else rows


def _in_order_of(curriculum: str, rows: list[Row]) -> list[Row]:
    """The rows of an epoch that `curriculum` chooses. InputError when it fails or returns something else."""
    key = "train_dataset.curriculum"
    function: Callable[[list[Row]], object] = load_function(resolve_function(curriculum, key=key), CURRICULUM_CALL)
    try:
        ordered = function(list(rows))
    except Exception as error:  # a user's function
        message = f"{key} {curriculum} raised {type(error).__name__}: {error}"
        raise InputError(message, code="data.curriculum_failed") from error
    if not isinstance(ordered, list) or not ordered:
        message = f"{key} {curriculum} returned {type(ordered).__name__}: return a list with at least one row"
        raise InputError(message, code="data.curriculum_failed")
    return [object_row(row, f"{key} {curriculum}, row {index}") for index, row in enumerate(ordered)]


def _short_rows(
    config: DatasetConfig,
    default_split: str,
    tokenizer: Tokenizer | None,
    images: PromptImages | None,
    first: int | None = None,
) -> list[Row]:
    """The mapped rows of one dataset whose prompt has at most max_length tokens."""
    rows, limit = _mapped_rows(config, default_split, first), config.max_length
    if limit is None or tokenizer is None:
        return rows

    def counted() -> list[int]:
        counts: list[int] = []
        for index, row in enumerate(rows):
            with _naming(config, index):
                counts.append(len(encode_prompt(row, tokenizer, images=images).token_ids))
        return counts

    folder = config.cache_dir if first is None and images is None else ""
    lengths = cached_lengths(folder, rows, tokenizer, counted)
    longest = max(range(len(rows)), key=lengths.__getitem__, default=0)
    if config.truncation == "error" and rows and lengths[longest] > limit:
        raise _too_long(config, longest, lengths[longest], limit)
    return [row for row, length in zip(rows, lengths, strict=True) if length <= limit]


def load_sft_rows(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    *,
    default_split: str,
    train_on: str = "last",
    images: PromptImages | None = None,
    image_key: str = "images",
) -> list[EncodedRow]:
    """Load the encoded rows of a dataset of type sft, at most max_length tokens each. Raises InputError."""
    encode = partial(encode_sft_row, tokenizer=tokenizer, train_on=train_on, images=images, image_key=image_key)
    return _of_all(config, lambda part: _encoded(part, default_split, encode))


def load_pairs(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    *,
    default_split: str,
    use_margin: bool = False,
    image_key: str = "images",
) -> list[EncodedPair]:
    """Load the encoded pairs of a dataset of type rw, at most max_length tokens per side. Raises InputError."""
    encode = partial(encode_pair, tokenizer=tokenizer, use_margin=use_margin, image_key=image_key)
    return _of_all(config, lambda part: _encoded(part, default_split, encode))


def gsm8k_row(row: Row) -> Row:
    """A row of GSM8K as one user message; the last line of the unchanged `answer` contains the number."""
    message = {"role": "user", "content": row["question"] + _GSM8K_INSTRUCTION}
    return {"messages": [message], "answer": row["answer"]}


def _raw_rows(config: DatasetConfig, split: str, first: int | None) -> list[Row]:
    (name,) = config.paths
    if is_environment_path(name):
        return environment_rows(name)[:first]
    if is_row_function(name):
        return list(islice(_made_rows(name), first))
    files = dataset_files(name)
    if len(files) == 1 and files[0].suffix not in READERS:
        if files[0].is_file():
            message = f"{name}: a dataset file is named {', '.join(READERS)}: convert, unpack or rename it"
            raise InputError(message, code="data.invalid_file")
        return _hub_rows(str(files[0]) if files[0].exists() else name, config, split)
    if not files or not all(file.is_file() for file in files):
        raise InputError(f"there is no dataset file {name}: correct the dataset's path", code="data.not_found")
    return list(islice(chain.from_iterable(READERS[file.suffix](file) for file in files), first))


def environment_rows(path: str) -> list[Row]:
    """The rows of `env:NAME?size=N&seed=S&KEY=VALUE`: an environment makes the item of each from these columns.

    Other keys are its config, JSON or text. InputError when size or seed is no number."""
    name, _, query = path.removeprefix(ENVIRONMENT_PREFIX).partition("?")
    config: dict[str, Any] = {"size": 1000, "seed": 0}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            config[key] = orjson.loads(text)
        except orjson.JSONDecodeError:
            config[key] = text
    size, seed = config.pop("size"), config.pop("seed")
    if type(size) is not int or type(seed) is not int or size < 1:
        message = f"dataset {path}: size and seed must be whole numbers: {ENVIRONMENT_PREFIX}NAME?size=1000&seed=0"
        raise InputError(message, code="data.invalid_file")
    shared: Row = {"env": name, "config": config, "seed": seed, "size": size}
    return [{**shared, "index": index} for index in range(size)]


def _made_rows(name: str) -> Iterator[Row]:
    """The rows that the function of a dataset's path returns. InputError when it fails or returns something else."""
    function: Callable[[], Iterable[Row]] = load_function(resolve_function(name, key="path"), ROWS_CALL)
    try:
        for index, row in enumerate(function()):
            yield object_row(row, f"{name}, row {index}")
    except InputError:
        raise
    except Exception as error:  # a user's function
        message = f"dataset {name} raised {type(error).__name__}: {error}"
        raise InputError(message, code="data.rows_failed") from error


def _hub_rows(path: str, config: DatasetConfig, split: str) -> list[Row]:
    """Rows of a folder that `datasets` saved, or of a hub dataset."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        message = (
            f"dataset {path!r} is no file of type {', '.join(READERS)}: it needs the datasets library: "
            "pip install -e '.[hub]'"
        )
        raise ConfigError(message, code="data.no_datasets_library") from error
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    message = f"dataset {path} has no split {split!r}, only {sorted(loaded)}: set split"
                    raise InputError(message, code="data.not_found")
                loaded = loaded[split]
            elif config.split:
                message = f"dataset {path} was saved without splits: remove split={config.split!r}"
                raise InputError(message, code="data.not_found")
        else:
            loaded = datasets.load_dataset(path, config.name or None, split=split, revision=config.revision or None)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds for names, networks and files
        first_line = str(error).strip().partition("\n")[0]
        message = f"dataset {path!r} (split {split!r}) cannot be loaded: {first_line}"
        raise InputError(message, code="data.not_found") from error
    rows = [dict(row) for row in loaded]
    names = {*_ANSWERS, *(source for source, name in config.columns.items() if name in _ANSWERS)}
    for index, row in enumerate(rows):
        for name in names & row.keys():
            if (what := _converted(row[name])) is not None:
                message = (
                    f"{path}, row {index}: the column {name} holds {what}, which the datasets library makes of JSON, "
                    "depending on other rows: give the .jsonl file itself as path, which areal reads unchanged"
                )
                raise InputError(message, code="data.converted_answer")
    return rows


def _converted(value: Any) -> str | None:
    """What the library has made of a JSON text or a large integer; None for a value that it left as it was."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return f"the {type(value).__name__} {value}"
    if isinstance(value, float) and abs(value) >= _EXACT_FLOATS and value.is_integer():
        return f"the float {value}"
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((what for part in cast("Iterable[Any]", parts) if (what := _converted(part)) is not None), None)


def _mapped_rows(config: DatasetConfig, default_split: str, first: int | None = None) -> list[Row]:
    rows = _raw_rows(config, config.split or default_split, first)
    if config.columns:
        rows = [_renamed(row, config, index) for index, row in enumerate(rows)]
    if not config.map_fn:
        return _without_long_texts(rows, config)
    function: Callable[[Row], Row | None] = load_function(
        resolve_function(config.map_fn, "datasets", key="map_fn"), MAP_CALL
    )
    mapped: list[Row] = []
    for index, row in enumerate(rows):
        place = f"{config.path}, row {index}"
        try:
            result = function(row)
        except KeyError as error:
            message = f"{place}: map_fn {config.map_fn} needs the column {error}, but the row has {sorted(row)}"
            raise InputError(message, code="data.map_fn_failed") from error
        except Exception as error:  # a user's function on one row
            message = f"{place}: map_fn {config.map_fn} raised {type(error).__name__}: {error}"
            raise InputError(message, code="data.map_fn_failed") from error
        if result is not None:
            mapped.append(object_row(result, f"{place} after map_fn {config.map_fn}"))
    return _without_long_texts(mapped, config)


def _renamed(row: Row, config: DatasetConfig, index: int) -> Row:
    """The row with the new names of its columns, and with values inside columns (`a.b`) as columns of their own.

    A new name replaces a column that had this name, wherever it is in the row.
    """
    renamed = {column: value for column, value in row.items() if column not in config.columns}
    for source, name in config.columns.items():
        if source in row:
            renamed[name] = row[source]
            continue
        value: Any = row
        for part in source.split("."):
            if not isinstance(value, dict) or part not in value:
                message = f"{config.path}, row {index} has no column {source!r}, only {sorted(row)}: correct columns"
                raise InputError(message, code="data.missing_column")
            value = cast("Row", value)[part]
        renamed[name] = value
    return renamed


def _without_long_texts(rows: list[Row], config: DatasetConfig) -> list[Row]:
    """Drop rows above max_characters where longer rows are dropped anyway; else raise InputError."""
    problems = [size_problem(row, config.max_characters) for row in rows]
    if config.max_length is None or config.truncation != "drop":
        require_usable(problems, str(config.path))
    return [row for row, problem in zip(rows, problems, strict=True) if problem is None]


@contextmanager
def _naming(config: DatasetConfig, index: int) -> Iterator[None]:
    """Add the dataset and the row to an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{config.path}, row {index}: {error}", code=error.code) from error


def _encoded(config: DatasetConfig, default_split: str, encode: Callable[[Row], EncodedT]) -> list[EncodedT]:
    """Encode every row and apply `truncation` to those above max_length. Rows without a trained token are dropped."""
    encoded: list[EncodedT] = []
    limit = config.max_length
    for index, row in enumerate(_mapped_rows(config, default_split)):
        with _naming(config, index):
            made = encode(row)
        if limit is not None and made.max_length > limit:
            if config.truncation == "error":
                raise _too_long(config, index, made.max_length, limit)
            if config.truncation == "drop":
                continue
            made = made.shortened(limit, keep_end=config.truncation == "left")
        if made.is_trainable:
            encoded.append(made)
    return encoded


def _too_long(config: DatasetConfig, index: int, num_tokens: int, limit: int) -> InputError:
    message = f"{config.path}, row {index} has {num_tokens} tokens, but max_length={limit}: raise it, or set truncation"
    return InputError(message, code="data.too_long")


def _of_all(config: DatasetConfig, load: Callable[[DatasetConfig], list[AnyT]]) -> list[AnyT]:
    """The rows that `load` gives for each dataset of `path`, mixed by `weights`, or those that an evaluation chooses.

    Raises InputError when a dataset has no rows.
    """
    parts: list[list[AnyT]] = []
    for path in config.paths:
        parts.append(load(dataclasses.replace(config, path=path)))
        if not parts[-1]:
            limit = f" of at most max_length={config.max_length} tokens" if config.max_length else ""
            raise InputError(f"dataset {path} has no rows{limit}", code="data.no_rows")
    rows = mixed_rows(parts, config.weights if isinstance(config, TrainDatasetConfig) else ())
    if not isinstance(config, ValidDatasetConfig):
        return rows[: config.max_rows]
    if not (chosen := config.chosen(len(rows))):
        message = f"dataset {config.path} has {len(rows)} rows, and drop_last drops them all: lower batch_size"
        raise InputError(message, code="data.too_few_rows")
    return [rows[index] for index in chosen]
