"""The rules of who holds what, over all small models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from llmrt.worker.shard import (
    HeadShard,
    block_bytes,
    shard_heads,
    shard_intermediate,
    shard_vocabulary,
    share_of_cache,
    split_evenly,
)
from tests.support.checkpoints import tiny_config


def every_head_split() -> Iterator[tuple[int, int, list[HeadShard]]]:
    for num_heads in range(1, 33):
        for num_kv_heads in (k for k in range(1, num_heads + 1) if num_heads % k == 0):
            for tp in range(1, num_heads + 1):
                shards = [shard_heads(num_heads, num_kv_heads, r, tp) for r in range(tp)]
                yield num_heads, num_kv_heads, shards


def test_a_query_head_is_lost_or_held_twice() -> None:
    for num_heads, _, shards in every_head_split():
        held = [h for s in shards for h in s.query_heads]
        assert held == list(range(num_heads))


def test_ranks_have_very_different_numbers_of_heads() -> None:
    for _, _, shards in every_head_split():
        sizes = [s.num_heads for s in shards]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert sizes == sorted(sizes, reverse=True)


def test_a_query_head_reads_another_heads_keys() -> None:
    for num_heads, num_kv_heads, shards in every_head_split():
        for shard in shards:
            for local, head in enumerate(shard.query_heads):
                kv_head = shard.kv_heads[shard.kv_head_of_query_head[local]]
                assert kv_head == head * num_kv_heads // num_heads


def test_a_rank_keeps_a_kv_head_nobody_there_reads() -> None:
    for _, _, shards in every_head_split():
        for shard in shards:
            assert set(shard.kv_head_of_query_head) == set(range(shard.num_kv_heads))


def test_nine_heads_on_four_ranks_are_not_dealt_3_2_2_2() -> None:
    shards = [shard_heads(9, 3, rank, 4) for rank in range(4)]
    assert [s.num_heads for s in shards] == [3, 2, 2, 2]
    assert [list(s.kv_heads) for s in shards] == [[0], [1], [1, 2], [2]]


@pytest.mark.parametrize("unit", [1, 8, 32])
def test_a_split_loses_items_or_leaves_a_rank_empty_without_need(unit: int) -> None:
    for total, parts in itertools.product(range(1, 200), range(1, 12)):
        ranges = split_evenly(total, parts, unit)
        assert [i for r in ranges for i in r] == list(range(total))
        assert sum(len(r) > 0 for r in ranges) == min(total, parts)


def test_cuts_are_off_the_unit_though_there_is_enough() -> None:
    assert [r.start % 32 for r in shard_vocabulary(49152, 7)] == [0] * 7
    assert [len(r) for r in shard_vocabulary(257, 2)] == [160, 97]
    assert [len(shard_intermediate(1536, r, 4)) for r in range(4)] == [384] * 4


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 9])
def test_the_cache_is_shared_so_that_one_rank_limits_the_others(tp: int) -> None:
    config = tiny_config("smollm2")
    total = 10_000_000
    num_blocks = set()
    shares = [share_of_cache(total, config, rank, tp, 16) for rank in range(tp)]
    for rank, share in enumerate(shares):
        num_blocks.add(share // block_bytes(config, rank, tp, 16, 4))
    assert len(num_blocks) == 1
    assert total - tp <= sum(shares) <= total
