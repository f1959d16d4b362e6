"""The decode rows of a step, one token each, in tensors on the device that a step changes in place.

A row changes in whole when its sequence joins, and by one number when its sequence gets a block. Everything that each
step changes in all rows is computed on the device: lengths, positions, cache slots and random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal.inference.scheduler import Sequence

_FIRST_ROWS, _FIRST_WIDTH = 8, 8
_TOKEN, _POSITION, _LENGTH, _SEED, _SLOT = range(5)
_NUM_FIELDS = 5


class DecodeInputs(NamedTuple):
    """The tensors of some decode rows. They change in place with the next step."""

    ids: Tensor  # [2, rows] int64: tokens, positions
    slots: Tensor  # [rows] int64: places of the new keys and values in the cache
    lengths: Tensor  # [rows] int64: tokens to attend to, including the own one
    blocks: Tensor  # [rows, width] int32, padded with the first block of the row


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What the sampler needs to know of the rows of logits."""

    sequences: list[Sequence]
    seeds: Tensor  # [rows] int64, scrambled
    places: Tensor  # [rows] int64: number of the token that is drawn
    temperatures: Tensor | None  # [rows] float32; None = 1 in all rows
    special: list[int]
    """Rows that are greedy, restricted or penalised."""

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> SampledRows:
        places = torch.tensor([len(sequence.token_ids) for sequence in sequences], device=device)
        heat = _temperatures(sequences)
        return cls(
            sequences,
            _seeds(sequences).to(device),
            places,
            None if heat is None else heat.to(device),
            _special(sequences),
        )

    def part(self, rows: list[int], index: Tensor) -> SampledRows:
        """These rows, which are all special or all plain; `index`: their numbers as a tensor."""
        heat = None if self.temperatures is None else self.temperatures[index]
        sequences = [self.sequences[row] for row in rows]
        return SampledRows(sequences, self.seeds[index], self.places[index], heat, _special(sequences))

    def uniforms(self) -> Tensor:
        """One float32 in [0, 1 - 2**-23] per row, from the seed of its sequence and the place of its token.

        It does not depend on the other rows, so a request that continues on another server after an interruption uses
        the same random numbers.
        """
        return ((_scramble(self.seeds + self.places) >> 41) & 0x7FFFFF).to(torch.float32) * 2.0**-23


def _seeds(sequences: list[Sequence]) -> Tensor:
    return _scramble(torch.tensor([sequence.seed for sequence in sequences], dtype=torch.int64))


def _temperatures(sequences: list[Sequence]) -> Tensor | None:
    values = [sequence.params.temperature or 1.0 for sequence in sequences]
    return torch.tensor(values) if any(value != 1.0 for value in values) else None


def _special(sequences: list[Sequence]) -> list[int]:
    return [row for row, sequence in enumerate(sequences) if not sequence.params.is_plain]


def _scramble(values: Tensor) -> Tensor:
    """The splitmix64 finaliser, a bijection of 64-bit numbers that decorrelates neighbouring values."""
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64


class DecodeRows:
    """The rows of the running sequences. Only the engine thread uses it."""

    def __init__(self, block_size: int, device: torch.device, *, spare_block: int) -> None:
        """`spare_block`: a block of the cache that no sequence uses, for the rows that fill up a graph."""
        self.sequences: list[Sequence] = []
        self.lengths = np.zeros(_FIRST_ROWS, dtype=np.int64)
        """Of the rows, on the host."""
        self._block_size, self._device = block_size, device
        self._filling = torch.tensor([0, 0, 1, 0, spare_block * block_size], device=device)[:, None]
        self._spare_block = spare_block
        self._numbers = self._filling.repeat(1, _FIRST_ROWS)
        self._blocks = torch.full((_FIRST_ROWS, _FIRST_WIDTH), spare_block, dtype=torch.int32, device=device)
        self._members: set[Sequence] = set()
        self._held: list[int] = []
        """Number of blocks of each row in the tensor."""
        self._has_tokens = False
        """The tokens of the last step are in the tensor."""
        self._temperatures: Tensor | None = None
        self._special: list[int] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def width(self) -> int:
        """Blocks of the longest row."""
        return (int(self.lengths[: len(self)].max()) - 1) // self._block_size + 1

    def update(self, running: list[Sequence], started: list[Sequence]) -> None:
        """The rows of the next step: one more token of `running`, and the next one to compute of `started`.

        Between two steps, the blocks of a sequence that stays in `running` only become more.
        """
        members = set(running)
        has_changed = bool(started) or members != self._members
        if has_changed:
            self._remove(members)
        if count := len(self):
            self._advance(count)
        self._has_tokens = False
        if has_changed:
            new = [sequence for sequence in running if sequence not in self._members]
            self._add(new + started)
            temperatures = _temperatures(self.sequences)
            self._temperatures = None if temperatures is None else temperatures.to(self._device)
            self._special = _special(self.sequences)
        if count := len(self):
            lengths = self._numbers[_LENGTH, :count] - 1
            own = self._blocks[:count].gather(1, (lengths // self._block_size)[:, None])[:, 0]
            torch.add(lengths % self._block_size, own, alpha=self._block_size, out=self._numbers[_SLOT, :count])

    def inputs(self, rows: int, width: int) -> DecodeInputs:
        """The first `rows` rows, which may be more than there are: those are of the spare block."""
        numbers = self._numbers[:, :rows]
        return DecodeInputs(
            numbers[_TOKEN : _POSITION + 1], numbers[_SLOT], numbers[_LENGTH], self._blocks[:rows, :width]
        )

    def sampled(self) -> SampledRows:
        """All rows, for the sampler."""
        seeds, places = self._numbers[_SEED, : len(self)], self._numbers[_LENGTH, : len(self)]
        return SampledRows(self.sequences, seeds, places, self._temperatures, self._special)

    @torch.inference_mode()
    def take_tokens(self, tokens: Tensor) -> None:
        """The tokens that were drawn for all rows, which the next step computes."""
        self._numbers[_TOKEN, : len(self)].copy_(tokens)
        self._has_tokens = True

    def _advance(self, count: int) -> None:
        """The next token of the rows that stay."""
        self.lengths[:count] += 1
        self._numbers[_POSITION : _LENGTH + 1, :count] += 1
        if not self._has_tokens:
            tokens = [sequence.token_ids[-1] for sequence in self.sequences]
            self._numbers[_TOKEN, :count].copy_(torch.tensor(tokens))
        grown: list[list[int]] = []
        for row, (sequence, held) in enumerate(zip(self.sequences, self._held, strict=True)):
            if len(sequence.blocks) > held:
                grown += [[row, column, sequence.blocks[column]] for column in range(held, len(sequence.blocks))]
        if grown:
            self._make_room(count, max(column for _, column, _ in grown) + 1)
            rows, columns, blocks = torch.tensor(grown, device=self._device).unbind(1)
            self._blocks[rows, columns] = blocks.to(torch.int32)
            for row, column, _ in grown:
                self._held[row] = column + 1

    def _remove(self, members: set[Sequence]) -> None:
        """Remove the rows of other sequences; the last rows take their places."""
        kept = sum(sequence in members for sequence in self.sequences)
        count = len(self)
        if kept == count:
            return
        empty = [row for row in range(kept) if self.sequences[row] not in members]
        moved = [row for row in range(kept, count) if self.sequences[row] in members]
        for target, source in zip(empty, moved, strict=True):
            self.sequences[target], self._held[target] = self.sequences[source], self._held[source]
        if moved:
            self.lengths[empty] = self.lengths[moved]
            targets, sources = torch.tensor([empty, moved], device=self._device)
            self._numbers[:, targets] = self._numbers[:, sources]
            self._blocks[targets] = self._blocks[sources]
        self._numbers[:, kept:count] = self._filling
        self._blocks[kept:count] = self._spare_block
        # A new list: the sampler of the last step may hold the old one.
        self.sequences, self._held = self.sequences[:kept], self._held[:kept]
        self._members = set(self.sequences)

    def _add(self, new: list[Sequence]) -> None:
        if not new:
            return
        first, count = len(self), len(self) + len(new)
        held = [len(sequence.blocks) for sequence in new]
        self._make_room(count, max(held))
        starts = [sequence.num_computed - 1 for sequence in new]
        self.lengths[first:count] = [start + 1 for start in starts]
        numbers = [
            (sequence.token_ids[start], start + sequence.position_shift, start + 1, 0, 0)
            for sequence, start in zip(new, starts, strict=True)
        ]
        self._numbers[:, first:count] = torch.tensor(numbers).T
        self._numbers[_SEED, first:count] = _seeds(new)
        width = self._blocks.shape[1]
        table = np.empty((len(new), width), dtype=np.int32)
        for row, sequence in enumerate(new):
            table[row, : held[row]] = sequence.blocks
            table[row, held[row] :] = sequence.blocks[0]
        self._blocks[first:count] = torch.from_numpy(table)
        self.sequences = self.sequences + new
        self._held += held
        self._members.update(new)

    def _make_room(self, rows: int, width: int) -> None:
        """Tensors for this number of rows and blocks; sizes are powers of two, as those of graphs."""
        old_rows, old_width = self._blocks.shape
        if width > old_width:
            more = self._blocks[:, :1].expand(old_rows, (1 << (width - 1).bit_length()) - old_width)
            self._blocks = torch.cat((self._blocks, more), dim=1)
        if rows > old_rows:
            added = (1 << (rows - 1).bit_length()) - old_rows
            self._numbers = torch.cat((self._numbers, self._filling.expand(-1, added)), dim=1)
            filling = self._blocks.new_full((added, self._blocks.shape[1]), self._spare_block)
            self._blocks = torch.cat((self._blocks, filling))
            self.lengths = np.concatenate((self.lengths, np.zeros(added, dtype=np.int64)))
