from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmrt.scheduler.prefix_cache import PrefixCache

blocks_of_tokens = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)), max_size=4)


def hash_of(cache: PrefixCache, blocks: list[tuple[int, int]]) -> bytes | None:
    block_hash = None
    for block in blocks:
        block_hash = cache.chain(block_hash, block)
    return block_hash


@given(blocks_of_tokens, blocks_of_tokens)
def test_chains_have_one_hash_exactly_where_all_their_tokens_are_equal(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    cache = PrefixCache()
    assert (hash_of(cache, one) == hash_of(cache, two)) == (one == two)


def test_the_first_of_two_equal_blocks_stays_the_one_that_is_found() -> None:
    cache = PrefixCache()
    block_hash = cache.chain(None, [1, 2])
    cache.insert(block_hash, 5)
    cache.insert(block_hash, 6)
    assert cache.find(block_hash) == 5
    assert not cache.holds(6)
    cache.check_invariants()


def test_a_forgotten_block_is_not_found() -> None:
    cache = PrefixCache()
    block_hash = cache.chain(None, [1, 2])
    cache.insert(block_hash, 5)
    cache.forget(5)
    assert cache.find(block_hash) is None
    cache.check_invariants()


def test_large_token_ids_do_not_collide() -> None:
    cache = PrefixCache()
    assert cache.chain(None, [1]) != cache.chain(None, [1 + 2**32])
