"""The decode rows of a step, one token each, in tensors on the device that a step changes in place.

A row changes in whole when its sequence joins, and by one number when its sequence gets a block. Everything that each
step changes in all rows is computed on the device: lengths, positions, cache slots and random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal.inference.scheduler import Sequence, StepPlan

_TOKEN, _SEED, _POSITION, _LENGTH, _SLOT = range(5)


class DecodeInputs(NamedTuple):
    """The tensors of all decode rows of one size. They change in place with each step."""

    numbers: Tensor  # [fields, rows] int64
    blocks: Tensor  # [rows, width] int32, padded with the first block of the row

    @property
    def tokens(self) -> Tensor:
        return self.numbers[_TOKEN]

    @property
    def positions(self) -> Tensor:
        return self.numbers[_POSITION]

    @property
    def slots(self) -> Tensor:
        """Places of the new keys and values in the cache."""
        return self.numbers[_SLOT]

    @property
    def lengths(self) -> Tensor:
        """Tokens to attend to, including the own one."""
        return self.numbers[_LENGTH]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What the sampler needs to know of the rows of logits."""

    sequences: list[Sequence]
    seeds: Tensor  # [rows] int64, scrambled
    places: Tensor  # [rows] int64: number of the token that is drawn
    temperatures: Tensor | None  # [rows] float32; None = 1 in all rows
    special: list[int]
    """Rows that are greedy, restricted or penalised."""
    ahead: list[int] | None = None
    """Tokens of the sequence's draft before the one that is drawn; None = none in all rows."""

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device, ahead: list[int] | None = None) -> SampledRows:
        places = torch.tensor([len(sequence.token_ids) for sequence in sequences])
        if ahead is not None:
            places += torch.tensor(ahead, dtype=torch.int64)
        heat = _temperatures(sequences)
        return cls(
            sequences,
            _seeds(sequences).to(device),
            places.to(device),
            None if heat is None else heat.to(device),
            _special(sequences),
            ahead,
        )

    def drafted(self, row: int) -> list[int]:
        """The tokens behind those of the sequence before the one that is drawn."""
        return self.sequences[row].draft[: self.ahead[row]] if self.ahead else []

    def part(self, rows: list[int], index: Tensor) -> SampledRows:
        """These rows, which are all special or all plain; `index`: their numbers as a tensor."""
        heat = None if self.temperatures is None else self.temperatures[index]
        sequences = [self.sequences[row] for row in rows]
        ahead = [self.ahead[row] for row in rows] if self.ahead else None
        return SampledRows(sequences, self.seeds[index], self.places[index], heat, _special(sequences), ahead)

    def uniforms(self) -> Tensor:
        """One float32 in [0, 1 - 2**-23] per row, from the seed of its sequence and the place of its token.

        It does not depend on the other rows, so a request that continues on another server after an interruption uses
        the same random numbers.
        """
        numbers = self.seeds + self.places
        if numbers.device.type == "cpu":  # numpy takes a third of the time
            bits = (_scramble(numbers.numpy()) >> 41) & 0x7FFFFF
            return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0**-23))
        return ((_scramble(numbers) >> 41) & 0x7FFFFF).to(torch.float32) * 2.0**-23


def _seeds(sequences: list[Sequence]) -> Tensor:
    return _scramble(torch.tensor([sequence.seed for sequence in sequences], dtype=torch.int64))


def _temperatures(sequences: list[Sequence]) -> Tensor | None:
    values = [sequence.params.temperature or 1.0 for sequence in sequences]
    return torch.tensor(values) if any(value != 1.0 for value in values) else None


def _special(sequences: list[Sequence]) -> list[int]:
    return [row for row, sequence in enumerate(sequences) if not sequence.params.is_plain]


def _scramble(values: Any) -> Any:
    """The splitmix64 finaliser, a bijection of 64-bit numbers that decorrelates neighbouring values: int64 of torch or
    numpy, whose shifts keep the sign."""
    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64


class DecodeRows:
    """The rows of the running sequences. Only the engine thread uses it.

    The tensors have the next powers of two of rows and blocks, and those of a size are always the same, so that a CUDA
    graph can read them.
    """

    def __init__(self, block_size: int, device: torch.device, *, spare_block: int) -> None:
        """`spare_block`: a block of the cache that no sequence uses, for the rows that fill up the tensors."""
        self.sequences: list[Sequence] = []
        self.lengths = np.zeros(0, dtype=np.int64)
        """Of the rows, on the host."""
        self._block_size, self._device = block_size, device
        self._filling = torch.tensor([0, 0, 0, 1, spare_block * block_size], device=device)[:, None]
        self._spare_block = spare_block
        self._sizes: dict[tuple[int, int], DecodeInputs] = {}
        self.inputs = self._empty(1, 1)
        self._row_of: dict[Sequence, int] = {}
        self._running: list[Sequence] = []
        """The decode rows of the last plan."""
        self._has_tokens = False
        """The tokens of the last step are in the tensor."""
        self._temperatures: Tensor | None = None
        self._special: list[int] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def update(self, plan: StepPlan, started: list[Sequence]) -> None:
        """The rows of the next step: those of `plan.decode`, and `started` with the next token to compute.

        A sequence gets a block only for the token that this step computes.
        """
        new: list[Sequence] = []
        has_changed = bool(started) or plan.decode is not self._running
        if has_changed:
            self._remove(set(plan.decode))
            new = [sequence for sequence in plan.decode if sequence not in self._row_of] + started
            self._running = [] if started else plan.decode  # they are in the list of the next plan
        count = len(self)
        self.lengths += 1
        if new:
            added = np.array([sequence.num_computed for sequence in new], dtype=np.int64)
            self.lengths = np.concatenate((self.lengths, added))
        if has_changed or plan.grown:
            self._fit(count)
        if count:
            self._advance(count)
            self._grow(plan.grown)
        if new:
            self._add(new)
        self._has_tokens = False
        if has_changed:
            temperatures = _temperatures(self.sequences)
            self._temperatures = None if temperatures is None else temperatures.to(self._device)
            self._special = _special(self.sequences)

    def sampled(self) -> SampledRows:
        """All rows, for the sampler."""
        count, numbers = len(self), self.inputs.numbers
        return SampledRows(
            self.sequences, numbers[_SEED, :count], numbers[_LENGTH, :count], self._temperatures, self._special
        )

    @torch.inference_mode()
    def take_tokens(self, tokens: Tensor) -> None:
        """The tokens that were drawn for all rows, which the next step computes."""
        self.inputs.numbers[_TOKEN, : len(self)].copy_(tokens)
        self._has_tokens = True

    def _empty(self, rows: int, width: int) -> DecodeInputs:
        """The tensors of a size, with any content but in a new one, where all rows are of the spare block."""
        if (rows, width) not in self._sizes:
            blocks = torch.full((rows, width), self._spare_block, dtype=torch.int32, device=self._device)
            self._sizes[rows, width] = DecodeInputs(self._filling.repeat(1, rows), blocks)
        return self._sizes[rows, width]

    def _fit(self, count: int) -> None:
        """Use the tensors of the size of the next step, with the first `count` rows of the present ones."""
        if not len(self.lengths):
            return
        widest = (int(self.lengths.max()) - 1) // self._block_size
        size = 1 << (len(self.lengths) - 1).bit_length(), 1 << widest.bit_length()
        old = self.inputs
        if tuple(old.blocks.shape) == size:
            return
        self.inputs = numbers, blocks = self._empty(*size)
        width = min(size[1], old.blocks.shape[1])
        numbers[:, :count] = old.numbers[:, :count]
        blocks[:count, :width] = old.blocks[:count, :width]
        blocks[:count, width:] = old.blocks[:count, :1]
        self._fill(count)

    def _fill(self, first: int) -> None:
        """Rows from `first` on are of the spare block."""
        self.inputs.numbers[:, first:] = self._filling
        self.inputs.blocks[first:] = self._spare_block

    def _advance(self, count: int) -> None:
        """The next token of the rows that stay."""
        numbers = self.inputs.numbers
        numbers[_POSITION:, :count].add_(1)
        if not self._has_tokens:
            tokens = [sequence.token_ids[-1] for sequence in self.sequences]
            numbers[_TOKEN, :count].copy_(torch.tensor(tokens))

    def _grow(self, grown: list[Sequence]) -> None:
        """Take over the last block of these sequences, as far as they have rows: their tokens are its first."""
        places = [
            (row, len(sequence.blocks) - 1, sequence.blocks[-1])
            for sequence in grown
            if (row := self._row_of.get(sequence)) is not None
        ]
        if places:
            rows, columns, blocks = torch.tensor(places, device=self._device).unbind(1)
            self.inputs.blocks[rows, columns] = blocks.to(torch.int32)
            self.inputs.slots[rows] = blocks * self._block_size

    def _remove(self, members: set[Sequence]) -> None:
        """Remove the rows of other sequences; the last rows take their places."""
        count = len(self)
        kept = sum(sequence in members for sequence in self.sequences)
        if kept == count:
            return
        empty = [row for row in range(kept) if self.sequences[row] not in members]
        moved = [row for row in range(kept, count) if self.sequences[row] in members]
        sequences = self.sequences[:kept]  # a new list: the sampler of the last step may hold the old one
        for target, source in zip(empty, moved, strict=True):
            sequences[target] = self.sequences[source]
        if moved:
            self.lengths[empty] = self.lengths[moved]
            targets, sources = torch.tensor([empty, moved], device=self._device)
            for tensor, axis in ((self.inputs.numbers, 1), (self.inputs.blocks, 0)):
                tensor.index_copy_(axis, targets, tensor.index_select(axis, sources))
        self.lengths = self.lengths[:kept]
        self.sequences = sequences
        self._row_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._fill(kept)

    def _add(self, new: list[Sequence]) -> None:
        first, count = len(self), len(self.lengths)
        size = self._block_size
        numbers: list[tuple[int, ...]] = []
        table = np.empty((len(new), self.inputs.blocks.shape[1]), dtype=np.int32)
        for row, sequence in enumerate(new):
            held, start = sequence.blocks, sequence.num_computed - 1
            slot = held[start // size] * size + start % size
            numbers.append((sequence.token_ids[start], 0, start + sequence.position_shift, start + 1, slot))
            table[row, : len(held)] = held
            table[row, len(held) :] = held[0]
        values = torch.tensor(numbers).T
        values[_SEED] = _seeds(new)
        self.inputs.numbers[:, first:count] = values
        self.inputs.blocks[first:count] = torch.from_numpy(table)
        self.sequences = self.sequences + new
        self._row_of.update((sequence, first + row) for row, sequence in enumerate(new))
