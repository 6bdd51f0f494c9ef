"""Pages of the cache: what is written is found again, and memory is only what is used."""

from __future__ import annotations

import psutil
import torch

from llmrt.worker.kv_cache import KVCache
from tests.support.tiny_driver import FLOAT32_CPU


def test_tokens_are_gathered_from_other_slots() -> None:
    cache = KVCache(
        num_layers=2,
        num_blocks=5,
        block_size=4,
        num_kv_heads=3,
        head_dim=2,
        placement=FLOAT32_CPU,
    )
    kv_THD = torch.arange(6 * 6 * 2, dtype=torch.float32).view(6, 6, 2)
    # Tokens 0 to 3 in block 4, tokens 4 and 5 in block 1.
    cache.write(1, kv_THD, torch.tensor([16, 17, 18, 19, 4, 5]))
    (keys_KSD,), (values_KSD,) = cache.gather(1, cache.places([[4, 1]]), 1)
    assert torch.equal(keys_KSD[:, :6], kv_THD[:, :3].transpose(0, 1))
    assert torch.equal(values_KSD[:, :6], kv_THD[:, 3:].transpose(0, 1))
    assert not keys_KSD[:, 6:].any()
    assert not cache.gather(0, cache.places([[4, 1]]), 1)[0].any()


def test_an_unused_cache_takes_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(
        num_layers=4,
        num_blocks=4096,
        block_size=16,
        num_kv_heads=4,
        head_dim=64,
        placement=FLOAT32_CPU,
    )
    assert process.memory_info().rss - before < 50e6, "of half a gigabyte"
    cache.write(3, torch.ones(1, 8, 64), torch.tensor([4095 * 16]))
    assert cache.gather(3, cache.places([[4095]]), 1)[0][0, 0, 0].tolist() == [1.0] * 64
