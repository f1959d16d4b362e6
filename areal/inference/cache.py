"""Owns the account of the KV cache: which block is free, and how many sequences hold each one. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks of `block_size` tokens. A block is free exactly when nobody holds it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # A stack: the block freed last is used next, so that memory never needed is never touched.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks, each now held once; None, and nothing changed, when there are fewer."""
        free = self._free
        if count > len(free):
            return None
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block, all of which somebody holds already."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; those without holders become free."""
        references = self._references
        for block in blocks:
            if references[block] < 1:
                raise ValueError(f"block {block} was released once too often")
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the counts are exactly what `holders` (one list of blocks each) amount to."""
        held = Counter[int]()
        for blocks in holders:
            if len(set(blocks)) != len(blocks):
                raise AssertionError(f"a sequence holds a block twice: {blocks}")
            held.update(blocks)
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a block is on the free list twice")
        free = set(self._free)
        for block, count in enumerate(self._references):
            if count != held[block]:
                raise AssertionError(f"block {block} counts {count} holders, but {held[block]} sequences hold it")
            if (count == 0) != (block in free):
                raise AssertionError(f"block {block} has {count} holders and is{'' if block in free else ' not'} free")
