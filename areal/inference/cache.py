"""Allocation of KV-cache blocks with reference counts. No tensors."""

from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks of `block_size` tokens. A block without references is free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # A stack: the block released last is used next, so that memory beyond the peak is never touched.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks with one reference each. None, without an effect, when fewer are free."""
        free = self._free
        if count > len(free):
            return None
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must not be free."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block. A block without references becomes free."""
        references = self._references
        for block in blocks:
            if references[block] < 1:
                raise ValueError(f"block {block} was released more often than it was shared")
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)
