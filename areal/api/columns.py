"""Columns of records: immutable sequences with one number per token, and the declarations of the token table's columns.

A `Column` behaves like a list that cannot be changed: it has an index, slices, `==` and `+` with lists and columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

import numpy as np

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The declaration of a column of the token table, by the module that fills it. It is the key of the column.

        HINTS = ColumnSpec("hint_weight", fill=1.0)
        Trajectory(..., columns={HINTS: weights})     # in a workflow: one number per token
        tokens.column(HINTS)                          # in a policy loss: a tensor of the trained batch

    Everything between carries it: the ledger, recovery, replay, the split into mini- and micro-batches.
    """

    name: str
    dtype: str = "f4"
    """numpy's code without byte order (f4, f8, i4, i8, i2, u1); empty = that of the array in the record."""
    per: Literal["token", "sequence", "group"] = "token"
    """What has one row. Columns of groups have any number of rows, and stay out of train batches."""
    is_predicted: bool = True
    """In a train batch the row of token t + 1 is at position t, which predicts it; False = at its own position."""
    fill: float | None = None
    """The row of a sequence without the column; None = missing: NaN, or an integer with all bits set."""
    show: Literal["mean", "sum", ""] = "mean"
    """What `areal show` prints of the tokens in the loss; empty = nothing."""
    made_by: str = ""
    """The stage of the trainer that adds it; empty = the workflow, and the ledger stores it."""


class Column(Sequence[T]):
    """The base of both kinds of column."""

    __slots__ = ()

    def tolist(self) -> list[T]:
        return list(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return self.tolist() == list(cast("Sequence[object]", other))

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as a list

    def __repr__(self) -> str:
        return repr(self.tolist())


class Packed(Column[T]):
    """Numbers in an array of 4 bytes each: int32 ("i") or float32 ("f")."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: array[T]) -> None:
        """`numbers` is not copied, and nobody may change it afterwards."""
        self._numbers = numbers

    @property
    def numbers(self) -> array[T]:
        """The array itself, only to be read."""
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> T | Self:
        part = self._numbers[index]
        return type(self)(part) if isinstance(part, array) else part

    def __iter__(self) -> Iterator[T]:
        return iter(self._numbers)

    def tolist(self) -> list[T]:
        return self._numbers.tolist()

    def __add__(self, other: Sequence[T]) -> Self:
        return type(self)(self._numbers + to_array(self._numbers.typecode, other))

    def __radd__(self, other: Sequence[T]) -> Self:
        return type(self)(to_array(self._numbers.typecode, other) + self._numbers)


class Runs(Column[T]):
    """Numbers of which neighbours are mostly equal, for example one policy version per token."""

    __slots__ = ("_ends", "_values")

    def __init__(self, runs: Iterable[tuple[T, int]] = ()) -> None:
        """`runs`: (number, how often). Neighbours with the same number become one run."""
        values: list[T] = []
        ends: list[int] = []
        end = 0
        for value, count in runs:
            if count <= 0:
                continue
            end += count
            if values and values[-1] == value:
                ends[-1] = end
            else:
                values.append(value)
                ends.append(end)
        self._values, self._ends = tuple(values), tuple(ends)

    @classmethod
    def of(cls, value: T, count: int) -> Runs[T]:
        """One number, `count` times."""
        packed = cls.__new__(cls)
        packed._values, packed._ends = ((value,), (count,)) if count > 0 else ((), ())
        return packed

    @property
    def values(self) -> tuple[T, ...]:
        """The number of each run, in order."""
        return self._values

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of entries up to the end of each run."""
        return self._ends

    @property
    def runs(self) -> Iterator[tuple[T, int]]:
        """(number, how often)."""
        if len(self._values) == 1:  # nearly all columns of an answer
            return iter(((self._values[0], self._ends[0]),))
        return zip(self._values, self._counts(), strict=True)

    def _counts(self) -> Iterator[int]:
        return (end - start for start, end in zip((0, *self._ends), self._ends, strict=False))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Runs[T]: ...
    def __getitem__(self, index: int | slice) -> T | Runs[T]:
        size = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step != 1:
                return to_runs(self.tolist()[index])
            spans = zip(self._values, (0, *self._ends), self._ends, strict=False)
            return Runs((value, min(end, stop) - max(first, start)) for value, first, end in spans)
        place = index + size if index < 0 else index
        if not 0 <= place < size:
            raise IndexError(f"index {index} is beyond the {size} numbers of the column")
        return self._values[bisect_right(self._ends, place)]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(map(repeat, self._values, self._counts()))

    def __add__(self, other: Sequence[T]) -> Runs[T]:
        return Runs(chain(self.runs, to_runs(other).runs))

    def __radd__(self, other: Sequence[T]) -> Runs[T]:
        return Runs(chain(to_runs(other).runs, self.runs))


class RunsBuilder(Generic[T]):
    """Runs that grow while an answer is generated."""

    __slots__ = ("ends", "values")

    def __init__(self) -> None:
        self.values: list[T] = []
        self.ends: list[int] = []
        """Number of entries up to the end of each run."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, value: T, count: int) -> None:
        """`count` more entries; none when it is not positive."""
        if count <= 0:
            return
        if self.values and self.values[-1] == value:
            self.ends[-1] += count
        else:
            self.ends.append(len(self) + count)
            self.values.append(value)

    def extend_last(self, runs: Runs[T]) -> bool:
        """Append `runs` if they are one number, and the last one, as in nearly all chunks of an answer."""
        values, ends = runs.values, runs.ends
        if len(values) != 1 or (self.values and values[0] != self.values[-1]):
            return False
        if self.values:
            self.ends[-1] += ends[0]
        else:
            self.values.append(values[0])
            self.ends.append(ends[0])
        return True

    def cut(self, size: int) -> None:
        """Keep the first `size` entries."""
        while self.ends and (self.ends[-2] if len(self.ends) > 1 else 0) >= size:
            del self.ends[-1], self.values[-1]
        if self.ends:
            self.ends[-1] = min(self.ends[-1], size)

    def column(self) -> Runs[T]:
        if len(self.values) == 1:
            kind: type[Runs[T]] = Runs  # `Runs[T].of` takes as long as the rest
            return kind.of(self.values[0], self.ends[0])
        counts = (end - start for start, end in zip((0, *self.ends), self.ends, strict=False))
        return Runs(zip(self.values, counts, strict=True))


def to_array(typecode: str, values: Sequence[T]) -> array[T]:
    """The numbers as an array of that type, only to be read: that of a packed column is not copied.

    Raises TypeError or OverflowError for a value that the type does not hold.
    """
    if isinstance(values, list):  # the tests below take longer than a chunk's copy: sequences are abstract classes
        return array(typecode, values)
    if isinstance(values, Packed) and values.numbers.typecode == typecode:
        return values.numbers
    if not isinstance(values, Runs):
        return array(typecode, values)
    numbers: array[Any] = array(typecode)
    for value, count in values.runs:
        numbers += array(typecode, [value]) * count
    return numbers


def append(numbers: array[T], values: Sequence[T]) -> None:
    """Append to an array, or raise what `to_array` raises and change nothing."""
    if isinstance(values, list):
        numbers.fromlist(values)
    else:
        numbers += to_array(numbers.typecode, values)


def to_runs(values: Sequence[T]) -> Runs[T]:
    if isinstance(values, Runs):
        return values
    return Runs((value, sum(1 for _ in group)) for value, group in groupby(values))


def total(values: Sequence[int]) -> int:
    """The sum of a column."""
    if not isinstance(values, Runs):
        return sum(values)
    result = start = 0
    for value, end in zip(values.values, values.ends, strict=True):
        result += value * (end - start)
        start = end
    return result


def packed_ids(values: Sequence[int]) -> Packed[int]:
    """Token ids as int32. Raises TypeError or OverflowError for other values."""
    return _packed("i", values)


def packed_logprobs(values: Sequence[float]) -> Packed[float]:
    """Log-probabilities as float32. Raises TypeError for other values."""
    return _packed("f", values)


def _packed(typecode: str, values: Sequence[T]) -> Packed[T]:
    if isinstance(values, Packed) and values.numbers.typecode == typecode:
        return values
    return Packed(to_array(typecode, values))


def joined(typecode: str, columns: Iterable[Sequence[T]]) -> Packed[T]:
    """The numbers of several columns, one after another."""
    numbers: array[Any] = array(typecode)
    for column in columns:
        numbers += to_array(typecode, column)
    return Packed(numbers)


# ----------------------------------------------------------------------------------------------------------------------
# The experts that a model chose for tokens, as a record that engines, servers and trainers exchange.

ROUTED_EXPERTS = ColumnSpec("routed_experts", "", is_predicted=False, show="")
"""[T, layers, choices]: the experts that the servers chose for token t, uint8 or int16; all bits set = not recorded."""
_LIMIT = 255
"""Number of experts up to which one byte holds a choice; 255 means not recorded."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of the record of one token: one number for each decoder layer and choice.

    A layer without experts has numbers too, which mean nothing.
    """

    layers: int
    choices: int
    """Experts of a token in a layer."""
    experts: int
    """Experts of a layer."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a number: uint8 up to 255 experts, else little-endian int16."""
        return 1 if self.experts <= _LIMIT else 2

    @property
    def row_bytes(self) -> int:
        return self.layers * self.choices * self.item_bytes


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Choices for consecutive tokens: [tokens, layers, choices] in row-major order. All bits set = not recorded."""

    shape: ExpertShape
    data: bytes

    def __post_init__(self) -> None:
        """Raises ValueError for a part of a row."""
        if len(self.data) % self.shape.row_bytes:
            raise ValueError(f"{len(self.data)} bytes are not rows of {self.shape.row_bytes} bytes")

    @property
    def array(self) -> np.ndarray:
        """The rows of `ROUTED_EXPERTS`, only to be read."""
        shape = self.shape
        numbers = np.frombuffer(self.data, "u1" if shape.item_bytes == 1 else "<i2")
        return numbers.reshape(-1, shape.layers, shape.choices)

    @classmethod
    def of_array(cls, rows: np.ndarray) -> Self:
        """The record of `array`, which does not keep the number of experts."""
        limit = _LIMIT if rows.dtype.itemsize == 1 else 1 << 15
        return cls(ExpertShape(rows.shape[1], rows.shape[2], limit), rows.tobytes())

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.data) // self.shape.row_bytes

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        start, stop, _ = tokens.indices(len(self))
        size = self.shape.row_bytes
        return RoutedExperts(self.shape, self.data[start * size : max(start, stop) * size])

    @staticmethod
    def joined(parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """The tokens of several records, at least one, one after another. Raises ValueError for other shapes."""
        if any(part.shape != parts[0].shape for part in parts):
            raise ValueError("routed experts of different models cannot be joined")
        return RoutedExperts(parts[0].shape, b"".join(part.data for part in parts))

    @staticmethod
    def unknown(shape: ExpertShape, num_tokens: int) -> RoutedExperts:
        return RoutedExperts(shape, b"\xff" * (shape.row_bytes * max(num_tokens, 0)))
