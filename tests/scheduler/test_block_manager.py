from __future__ import annotations

import pytest

from llmrt.scheduler.block_manager import BlockManager
from llmrt.scheduler.prefix_cache import PrefixCache


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache()


@pytest.fixture
def blocks(cache: PrefixCache) -> BlockManager:
    return BlockManager(4, cache)


def test_a_block_is_not_given_out_twice(blocks: BlockManager) -> None:
    taken = blocks.allocate(4)
    assert sorted(taken) == [0, 1, 2, 3]
    assert blocks.num_free == 0
    blocks.check_invariants([taken])


def test_a_shared_block_is_free_only_after_its_last_release(
    blocks: BlockManager, cache: PrefixCache
) -> None:
    taken = blocks.allocate(2)
    cache.insert(cache.chain(None, [1]), taken[0])
    blocks.share(taken[:1])
    blocks.release(taken)
    assert blocks.num_free == 3
    blocks.check_invariants([taken[:1]])
    blocks.release(taken[:1])
    assert blocks.num_free == 4
    blocks.check_invariants([])


def test_cached_blocks_are_taken_last_and_the_end_of_a_chain_first(
    blocks: BlockManager, cache: PrefixCache
) -> None:
    chain = blocks.allocate(3)
    block_hash = None
    for number, block_id in enumerate(chain):
        block_hash = cache.chain(block_hash, [number])
        cache.insert(block_hash, block_id)
    blocks.release(chain)
    assert blocks.allocate(3) == [3, chain[2], chain[1]]
    assert cache.holds(chain[0])
    assert not cache.holds(chain[1])


def test_dropping_the_cache_frees_what_was_kept_for_it_and_nothing_else(
    blocks: BlockManager, cache: PrefixCache
) -> None:
    kept, used = blocks.allocate(2)
    cache.insert(cache.chain(None, [1]), kept)
    cache.insert(cache.chain(None, [2]), used)
    blocks.release([kept])
    blocks.drop_cached()
    blocks.check_invariants([[used]])
    assert len(cache) == 0
    assert blocks.num_free == 3


def test_a_leaked_reference_is_noticed(blocks: BlockManager) -> None:
    blocks.allocate(1)
    with pytest.raises(AssertionError):
        blocks.check_invariants([])
