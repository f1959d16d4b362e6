"""The experts that a model chose for tokens, as a record that engines, servers and trainers exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from areal.api.columns import ColumnSpec

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
