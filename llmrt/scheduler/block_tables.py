"""BlockTables: gives each sequence the blocks of its tokens, and takes them back.

A table is filled for all known tokens when the sequence is admitted, beginning with the blocks of a
cached prefix; then it grows by a block at a time. Every full block becomes findable in the prefix
cache when the step that fills it is scheduled and its tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmrt.scheduler.block_manager import BlockManager
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.scheduler.prefix_cache import PrefixCache
from llmrt.scheduler.promised_blocks import PromisedBlocks
from llmrt.scheduler.request import Sequence


class BlockTables:
    """The block table of every sequence, and what may be shared between them."""

    def __init__(self, config: SchedulerConfig, promises: PromisedBlocks) -> None:
        self._block_size = config.block_size
        self._caches_prefixes = config.prefix_caching
        self._cache = PrefixCache(config.cache_salt)
        self._blocks = BlockManager(config.num_blocks, self._cache)
        self._promises = promises

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated."""
        return self._blocks.num_free

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks with which *sequence* begins.

        A token whose logits are needed is never among them: the last one, and those before a
        prompt token to score.
        """
        if not self._caches_prefixes:
            return []
        found: list[int] = []
        for block_hash in self._usable_hashes(sequence):
            block_id = self._cache.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def worth_waiting_for(self, sequence: Sequence, prefix: list[int]) -> bytes | None:
        """Return the hash of a block after *prefix* that another is about to compute, or None."""
        if not self._caches_prefixes:
            return None
        missing = self._usable_hashes(sequence)[len(prefix) :]
        return self._promises.last_worth_waiting_for(sequence, missing)

    def fits(self, sequence: Sequence, prefix: list[int], num_spare: int) -> bool:
        """Whether the known tokens of *sequence* fit, with *num_spare* blocks left over."""
        num_new = self._num_blocks_for(sequence.num_tokens) - len(prefix)
        num_free_left = self._blocks.num_free - self._blocks.num_unreferenced(prefix)
        return num_new + num_spare <= num_free_left

    def fill(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give *sequence* blocks for its known tokens: the computed *prefix*, and new ones."""
        self._blocks.share(prefix)
        num_new = self._num_blocks_for(sequence.num_tokens) - len(prefix)
        sequence.block_ids = prefix + self._blocks.allocate(num_new)
        sequence.num_slots = len(sequence.block_ids) * self._block_size
        sequence.num_computed_tokens = len(prefix) * self._block_size
        sequence.num_registered_blocks = len(prefix)
        sequence.registers_blocks = self._caches_prefixes
        if self._caches_prefixes:
            num_full = sequence.num_tokens // self._block_size
            self._promises.promise(sequence, self._hashes(sequence, num_full)[len(prefix) :])

    def grow(self, sequence: Sequence) -> int:
        """Append a new block to the table; there must be a free one."""
        (block_id,) = self._blocks.allocate(1)
        sequence.block_ids.append(block_id)
        sequence.num_slots += self._block_size
        return block_id

    def register(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Make the full blocks among the first *num_computed_tokens* findable, if any may be."""
        if not sequence.registers_blocks:
            return
        num_full = min(num_computed_tokens, sequence.num_tokens) // self._block_size
        known = sequence.num_registered_blocks
        new_hashes = self._hashes(sequence, num_full)[known:num_full]
        for block_hash, block_id in zip(
            new_hashes, sequence.block_ids[known:num_full], strict=True
        ):
            self._cache.insert(block_hash, block_id)
        sequence.num_registered_blocks = max(known, num_full)
        self._promises.settle(sequence, new_hashes)

    def break_promises(self, sequence: Sequence) -> None:
        """Let nobody wait for *sequence* any longer: it stops before its blocks are full."""
        self._promises.settle(sequence, sequence.block_hashes[sequence.num_registered_blocks :])

    def release(self, sequence: Sequence) -> None:
        """Take the blocks of *sequence* back; no step in flight may still run it."""
        self._blocks.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_slots = 0
        sequence.block_hashes = []
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0
        sequence.registers_blocks = False

    def forget_cached(self, sequences: Iterable[Sequence]) -> None:
        """Empty the prefix cache; *sequences*, which have begun, put nothing into it any more."""
        for sequence in sequences:
            self.break_promises(sequence)
            sequence.registers_blocks = False
        self._blocks.drop_cached()

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these are all tables there are, and that no shared block can be written."""
        tables = [s.block_ids for s in sequences]
        self._blocks.check_invariants(tables)
        self._promises.check_invariants()
        seen: set[int] = set()
        shared: set[int] = set()
        for table in tables:
            assert len(set(table)) == len(table)
            shared |= seen.intersection(table)
            seen.update(table)
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self._block_size
            assert shared.isdisjoint(sequence.block_ids[num_full:])

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        num_usable = sequence.first_token_to_run // self._block_size
        return self._hashes(sequence, num_usable)[:num_usable]

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the chain of *sequence*, computed for its first *num_blocks* blocks at least."""
        hashes = sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            start = index * self._block_size
            tokens = sequence.slice_tokens(start, start + self._block_size)
            hashes.append(self._cache.chain(hashes[-1] if hashes else None, tokens))
        return hashes
