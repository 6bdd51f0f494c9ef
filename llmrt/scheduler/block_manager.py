"""BlockManager: who uses which block of the KV cache.

    referenced ──release──► free: contents worthless ─────────────────────┐
        ▲   └─────release──► evictable: contents in the prefix cache ──────┤ the oldest, where
        │                         │ share: a prefix was found              │ nothing is free
        └─────────────────────────┴───────────────────────── allocate ◄────┘

Numbers only; the tensors are in the workers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from llmrt.scheduler.prefix_cache import PrefixCache


class BlockManager:
    """Reference counts of all blocks, and the blocks that nobody refers to."""

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self._cache = prefix_cache
        self._num_references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Return how many blocks there are."""
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated, those with cached contents included."""
        return len(self._free) + len(self._evictable)

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks count as free."""
        return sum(self._num_references[b] == 0 for b in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Take *count* blocks for writing; there must be as many free."""
        return [self._allocate_one() for _ in range(count)]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, whose contents are cached."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                del self._evictable[block_id]
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table.

        The last blocks of the table will be evicted first: without the blocks before them they
        cannot be found.
        """
        for block_id in reversed(block_ids):
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._give_back(block_id)

    def drop_cached(self) -> None:
        """Empty the prefix cache; blocks that were kept for it are simply free."""
        self._cache.reset()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that *tables* account for every reference, and that all other blocks are free."""
        expected = Counter(block_id for table in tables for block_id in table)
        assert [expected[b] for b in range(self.num_blocks)] == self._num_references
        unreferenced = sorted(b for b in range(self.num_blocks) if not expected[b])
        assert sorted([*self._free, *self._evictable]) == unreferenced
        assert all(self._cache.holds(b) for b in self._evictable)
        assert not any(self._cache.holds(b) for b in self._free)
        self._cache.check_invariants()

    def _allocate_one(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            self._cache.forget(block_id)
        self._num_references[block_id] = 1
        return block_id

    def _give_back(self, block_id: int) -> None:
        if self._cache.holds(block_id):
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)
