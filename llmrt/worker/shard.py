"""Which part of a model each rank holds: pure rules on numbers, no tensors.

Nothing has to divide evenly. Query heads are dealt out in order, the first ranks taking one more;
a KV head lives on every rank that has one of its query heads:

    9 query heads, 3 KV heads on 4 ranks
    query heads   0 1 2 │ 3 4 │ 5 6 │ 7 8
    KV heads      0     │ 1   │ 1 2 │ 2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from llmrt.model_config import ModelConfig

ROW_UNIT = 32
"""Vocabulary and MLP are cut at multiples of this: whole vectors, whole groups when quantised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShard:
    """The attention heads of one rank, as numbers of the whole model's heads."""

    query_heads: range
    kv_heads: range
    kv_head_of_query_head: tuple[int, ...]
    """By local query head: its local KV head. Their groups need not be of one size."""

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        return len(self.query_heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return len(self.kv_heads)


def split_evenly(total: int, parts: int, unit: int = 1) -> tuple[range, ...]:
    """Cut range(total) into *parts* ranges of whole units; the first ones take one unit more.

    The unit shrinks by halves until every part has one; with fewer items than parts the last
    parts are empty. A last unit that is not full belongs to the last part.
    """
    while unit > 1 and -(-total // unit) < parts:
        unit //= 2
    num_units = -(-total // unit)
    quotient, remainder = divmod(num_units, parts)
    starts = [unit * (quotient * p + min(p, remainder)) for p in range(parts + 1)]
    return tuple(range(min(a, total), min(b, total)) for a, b in pairwise(starts))


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """Return the heads of one rank."""
    heads_per_kv_head = num_heads // num_kv_heads
    query_heads = split_evenly(num_heads, world_size)[rank]
    global_kv_heads = [h // heads_per_kv_head for h in query_heads]
    kv_heads = range(global_kv_heads[0], global_kv_heads[-1] + 1)
    return HeadShard(
        query_heads=query_heads,
        kv_heads=kv_heads,
        kv_head_of_query_head=tuple(h - kv_heads.start for h in global_kv_heads),
    )


def shard_vocabulary(vocab_size: int, world_size: int) -> tuple[range, ...]:
    """Return the token ids whose rows each rank holds."""
    return split_evenly(vocab_size, world_size, ROW_UNIT)


def shard_intermediate(intermediate_size: int, rank: int, world_size: int) -> range:
    """Return the MLP columns of one rank."""
    return split_evenly(intermediate_size, world_size, ROW_UNIT)[rank]


def block_bytes(
    model: ModelConfig, rank: int, world_size: int, block_size: int, item_bytes: int
) -> int:
    """Return the size of one KV block on one rank: keys and values of all layers."""
    heads = shard_heads(model.num_heads, model.num_kv_heads, rank, world_size)
    per_layer = 2 * heads.num_kv_heads * block_size * model.head_dim * item_bytes
    return per_layer * model.num_layers


def share_of_cache(
    total_bytes: int, model: ModelConfig, rank: int, world_size: int, block_size: int
) -> int:
    """Return one rank's part of the cache: in proportion to its blocks, so none goes unused."""
    sizes = [block_bytes(model, r, world_size, block_size, 1) for r in range(world_size)]
    return total_bytes * sizes[rank] // sum(sizes)
