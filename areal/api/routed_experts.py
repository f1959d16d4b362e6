"""The experts that a model chose for tokens, as a record that engines, servers and trainers exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
