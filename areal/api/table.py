"""The token table: the columns of sequences, one after another. A ledger stores it, a batch is several of them joined.

S sequences with T tokens in all. Per-token columns are *token aligned*: row t refers to token t.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areal.api.columns import ColumnSpec, Runs, to_array
from areal.api.errors import LedgerError
from areal.api.images import ImageRef

SESSION = ColumnSpec("session", "i4", per="sequence", show="")
"""`Trajectory.session`."""
IMAGE_COUNT = ColumnSpec("image_count", "i4", per="sequence", fill=0, show="")
IMAGES = ColumnSpec("images", "u1", per="group", show="")
"""Digest and grid of the images of all sequences in order, `IMAGE_COUNT` of each."""
_IMAGE = struct.Struct("<32s3I")
_TYPECODES = {"f4": "f", "f8": "d", "i4": "i", "i8": "q", "i2": "h", "u1": "B"}


class StoredColumn(NamedTuple):
    """A column with the form of its rows."""

    spec: ColumnSpec
    dtype: str
    """Little-endian."""
    shape: tuple[int, ...]
    """The shape of one row."""
    rows: int = 0
    """Number of rows of a column of a group; others have one for each token or sequence."""

    def filled(self, rows: int) -> np.ndarray:
        """Rows of sequences without the column."""
        dtype, value = np.dtype(self.dtype), self.spec.fill
        if value is None:
            value = np.nan if dtype.kind == "f" else np.iinfo(dtype).max if dtype.kind == "u" else -1
        return np.full((rows, *self.shape), value, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Core columns by name, all others by their declaration."""

    lengths: np.ndarray  # [S] int32, sums to T
    token_ids: np.ndarray  # [T] int32
    output_versions: np.ndarray  # [T] int32, -1 where not generated
    rewards: np.ndarray  # [S] float32
    rollout_logprobs: np.ndarray  # [T] float32
    loss_mask: np.ndarray  # [T] uint8
    finished: np.ndarray  # [S] uint8
    columns: dict[ColumnSpec, np.ndarray] = field(default_factory=dict[ColumnSpec, np.ndarray])

    def core(self) -> tuple[np.ndarray, ...]:
        """The core columns in the order of `CORE`."""
        return (
            self.lengths,
            self.token_ids,
            self.output_versions,
            self.rewards,
            self.rollout_logprobs,
            self.loss_mask,
            self.finished,
        )

    def rows(self, spec: ColumnSpec) -> int:
        return len(self.lengths if spec.per == "sequence" else self.token_ids)

    def stored(self) -> tuple[StoredColumn, ...]:
        """The forms of the columns beyond the core."""
        return tuple(
            StoredColumn(spec, values.dtype.str, values.shape[1:], len(values) if spec.per == "group" else 0)
            for spec, values in self.columns.items()
        )


CORE = (
    ("lengths", "sequence", "<i4"),
    ("token_ids", "token", "<i4"),
    ("output_versions", "token", "<i4"),
    ("rewards", "sequence", "<f4"),
    ("rollout_logprobs", "token", "<f4"),
    ("loss_mask", "token", "|u1"),
    ("finished", "sequence", "|u1"),
)
"""Name, what has one row, type: the columns of every table in their order in a payload."""


def union(parts: Sequence[Sequence[StoredColumn]]) -> tuple[StoredColumn, ...]:
    """The columns that any of several tables has, by name. Raises LedgerError for two forms of one column."""
    columns: dict[str, StoredColumn] = {}
    for column in dict.fromkeys(column for part in parts for column in part):
        other = columns.setdefault(column.spec.name, column)
        if other[:3] != column[:3]:
            text = f"episodes have column {column.spec.name} in two forms: {other[:3]} and {column[:3]}"
            raise LedgerError(text, code="ledger.bad_payload")
    return tuple(columns[name]._replace(rows=0) for name in sorted(columns))


def joined(tables: Sequence[TokenTable], columns: Sequence[StoredColumn]) -> TokenTable:
    """Several tables as one, with these columns; rows of tables without one of them are filled."""
    cores = [table.core() for table in tables]
    core: dict[str, np.ndarray] = {}
    for place, (name, _, dtype) in enumerate(CORE):
        core[name] = np.concatenate([arrays[place] for arrays in cores]) if cores else np.zeros(0, dtype)
    joined_columns: dict[ColumnSpec, np.ndarray] = {}
    for column in columns:
        parts: list[np.ndarray] = [column.filled(0)]
        for table in tables:
            values = table.columns.get(column.spec)
            if values is not None:
                parts.append(values)
            elif column.spec.per != "group":
                parts.append(column.filled(table.rows(column.spec)))
        joined_columns[column.spec] = np.concatenate(parts)
    return TokenTable(**core, columns=joined_columns)


def to_numpy(values_of_column: np.ndarray | Sequence[Any], dtype: str) -> np.ndarray:
    """Numbers of a column as an array, only to be read. Raises TypeError, OverflowError or ValueError for others."""
    if isinstance(values_of_column, np.ndarray):
        numbers: np.ndarray = values_of_column
        return numbers.astype(dtype, casting="same_kind", copy=False) if dtype else numbers
    values: Sequence[Any] = values_of_column
    if isinstance(values, Runs) and dtype:
        each = np.frombuffer(array(_TYPECODES[dtype], values.values), dtype) if values.values else np.zeros(0, dtype)
        return np.repeat(each, np.diff(values.ends, prepend=0))
    if dtype in _TYPECODES and not (len(values) and isinstance(values[0], list | tuple)):
        return np.frombuffer(to_array(_TYPECODES[dtype], values), dtype) if len(values) else np.zeros(0, dtype)
    return np.asarray(values, dtype or None)


def image_columns(images: Sequence[Sequence[ImageRef]]) -> dict[ColumnSpec, np.ndarray]:
    """`IMAGES` and `IMAGE_COUNT` of the images of each sequence."""
    rows = b"".join(_IMAGE.pack(bytes.fromhex(image.sha256), *image.grid) for row in images for image in row)
    return {
        IMAGES: np.frombuffer(rows, np.uint8).reshape(-1, _IMAGE.size),
        IMAGE_COUNT: np.array([len(row) for row in images], "i4"),
    }


def images_of(table: TokenTable) -> list[tuple[ImageRef, ...]]:
    """The images of each sequence; empty when none has any."""
    if IMAGES not in table.columns or not len(table.columns[IMAGES]):
        return []
    records = _IMAGE.iter_unpack(table.columns[IMAGES].tobytes())
    refs = (ImageRef(digest.hex(), (time, height, width)) for digest, time, height, width in records)
    return [tuple(next(refs) for _ in range(count)) for count in table.columns[IMAGE_COUNT].tolist()]
