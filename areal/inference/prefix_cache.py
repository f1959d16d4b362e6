"""The blocks of the KV cache: reference counts, and a prefix cache that finds full blocks by what they contain.

A block that no sequence holds keeps its keys and values until the pool needs it. Of layers with a state, snapshots at
the borders of blocks are kept in slots of memory. No tensors.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.inference.scheduler import PlacedImage


def extend_keys(
    keys: list[bytes],
    token_ids: Sequence[int],
    images: Sequence[PlacedImage],
    count: int,
    block_size: int,
    adapter: int = 0,
) -> None:
    """Append the keys of the next full blocks of a sequence, up to `count` of them.

    A key is a hash of the key before (of the number of the adapter for the first block), the tokens of the block, and
    the images that have tokens in it. So equal keys mean equal sequences up to the end of the block. The weights are
    not in it: an update empties the cache, unless its mode keeps all keys and values.
    """
    for number in range(len(keys), count):
        first = number * block_size
        end = first + block_size
        content = blake2b(keys[-1] if keys else adapter.to_bytes(8), digest_size=16)
        content.update(array("q", token_ids[first:end]).tobytes())
        for image in images:
            if image.start < end and first < image.start + image.count:
                content.update(f"{image.sha256} {first - image.start}".encode())
        keys.append(content.digest())


class BlockPool:
    """Reference-counted blocks of `block_size` tokens. A block without references is free, or cached if it has a key:
    then it is found until the pool takes it, the least recently used first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        """Cached blocks that were taken for other tokens."""
        self._references = [0] * num_blocks
        # A stack: the block released last is used next, so that memory beyond the peak is never touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and without references, the least recently used first."""
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks with a key and without references."""
        return len(self._cached)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks with one reference each. None, without an effect, when all others are referenced."""
        free = self._free
        if count > len(free) + len(self._cached):
            return None
        while len(free) < count:
            block, _ = self._cached.popitem(last=False)
            del self._by_key[self._key_of.pop(block)]
            free.append(block)
            self.num_evicted += 1
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def name(self, block: int, key: bytes) -> None:
        """Let a referenced block be found by `key`, unless another one is already."""
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key], self._key_of[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of `keys`, with one more reference each."""
        blocks: list[int] = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            self._cached.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must not be free."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a sequence. The later ones are then taken before those that they
        continue."""
        references = self._references
        for block in reversed(blocks):
            if references[block] < 1:
                raise ValueError(f"block {block} was released more often than it was shared")
            references[block] -= 1
            if references[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """No longer find these blocks; None = all."""
        for block in list(self._key_of) if blocks is None else blocks:
            if (key := self._key_of.pop(block, None)) is not None:
                del self._by_key[key]
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)


class Snapshots:
    """Slots for states at the borders of blocks. The state behind a block has the key of the block. A slot with a key
    is taken for another state when no slot is free, the least recently used first."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._free = list(slots)
        self.num_slots = len(self._free)
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._new: list[tuple[bytes, int]] = []

    def take(self) -> int | None:
        """A slot for a state; None: running sequences hold all."""
        if not self._free and self._by_key:
            self._free.append(self._by_key.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def keep(self, key: bytes, slot: int) -> None:
        """Let later steps find the state that is in the slot after the next step."""
        self._new.append((key, slot))

    def publish(self) -> None:
        """The step is computed: what was kept before it is found."""
        for key, slot in self._new:
            if (old := self._by_key.pop(key, None)) is not None:
                self._free.append(old)
            self._by_key[key] = slot
        self._new = []

    def find(self, keys: Sequence[bytes]) -> tuple[int, int | None]:
        """(number of the first `keys` behind which there is a state, its slot); (0, None) without one, and (-1, None)
        when the next step computes it."""
        if not {key for key, _ in self._new}.isdisjoint(keys):
            return -1, None
        for count in range(len(keys), 0, -1):
            if (slot := self._by_key.get(keys[count - 1])) is not None:
                self._by_key.move_to_end(keys[count - 1])
                return count, slot
        return 0, None

    def forget(self) -> None:
        self.publish()
        self._free += self._by_key.values()
        self._by_key.clear()
