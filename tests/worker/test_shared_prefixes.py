"""Sequences that begin with the same blocks: attention reads those once, and finds the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmrt.worker.attention import spans as spans_module
from llmrt.worker.attention.contexts import ContextKeeper
from llmrt.worker.attention.metadata import AttentionMetadata, AttentionPlan, build_plan
from llmrt.worker.attention.spans import Span, by_prefix, num_shared_blocks
from llmrt.worker.attention.torch_attention import TorchAttention
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.shard import HeadShard
from tests.support.tiny_driver import FLOAT32_CPU

BLOCK_SIZE, HEAD_DIM = 4, 8
HEADS = HeadShard(query_heads=range(5), kv_heads=range(2), kv_head_of_query_head=(0, 0, 0, 1, 1))
SYSTEM_PROMPT = list(range(100, 116))


@pytest.fixture(autouse=True)
def shares_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a prefix be worth reading once where it spares 32 blocks."""
    monkeypatch.setattr(spans_module, "LEAST_SPARED_BLOCKS", 32)


class Steps:
    """Attention of one layer over a cache of random numbers, step after step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.cache = KVCache(
            num_layers=1,
            num_blocks=512,
            block_size=BLOCK_SIZE,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            placement=FLOAT32_CPU,
        )
        slots = torch.arange(512 * BLOCK_SIZE)
        self.cache.write(0, torch.randn(len(slots), 4, HEAD_DIM), slots)
        self.keeper = ContextKeeper(self.cache)
        self.attention = TorchAttention(HEADS, 0, None, FLOAT32_CPU)

    def run(self, work: list[tuple[list[int], int, int]]) -> AttentionPlan:
        """Run (block table, start, number of tokens) of each sequence; compare every token."""
        spans: list[Span] = []
        for block_ids, start, num_tokens in work:
            row = spans[-1].row + spans[-1].num_tokens if spans else 0
            spans.append(Span(row=row, start=start, num_tokens=num_tokens, block_ids=block_ids))
        plan = build_plan(spans, None, self.cache, self.keeper, FLOAT32_CPU)
        self.keeper.forget_unused()
        places = [(span, p) for span in spans for p in range(span.start, span.end)]
        slots = torch.tensor([_slot(span.block_ids, p) for span, p in places])
        qkv_THD = torch.randn(len(places), 9, HEAD_DIM)
        metadata = AttentionMetadata(cache=self.cache, slot_mapping_T=slots, plans={None: plan})
        still = torch.ones(len(places), 1, HEAD_DIM)
        o_TQD = self.attention(qkv_THD.clone(), (still, torch.zeros_like(still)), metadata)
        for (span, position), qkv_HD, o_QD in zip(places, qkv_THD, o_TQD, strict=True):
            torch.testing.assert_close(o_QD, self._expected(span, position, qkv_HD[:5]))
        return plan

    def _expected(self, span: Span, position: int, q_QD: Tensor) -> Tensor:
        kv_21KSD = self.cache.gather(0, self.cache.places([span.block_ids]), 1)
        keys_QSD, values_QSD = kv_21KSD[:, 0, list(HEADS.kv_head_of_query_head), : position + 1]
        scores_QS = torch.einsum("qd,qsd->qs", q_QD, keys_QSD) / math.sqrt(HEAD_DIM)
        return torch.einsum("qs,qsd->qd", scores_QS.softmax(-1), values_QSD)


def _slot(block_ids: list[int], position: int) -> int:
    return block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def spans_of(*tables: list[int], start: int = 400) -> list[Span]:
    return [Span(row=i, start=start, num_tokens=1, block_ids=t) for i, t in enumerate(tables)]


def test_what_few_share_is_read_once_for_them() -> None:
    shared = list(range(32))
    assert num_shared_blocks(spans_of([*shared, 50], [*shared, 51]), BLOCK_SIZE) == 32
    assert num_shared_blocks(spans_of([*shared[:31], 50], [*shared[:31], 51]), BLOCK_SIZE) == 0
    assert num_shared_blocks(spans_of([*shared, 50]), BLOCK_SIZE) == 0


def test_a_block_that_a_running_token_is_in_counts_as_shared() -> None:
    tables = [list(range(40)) for _ in range(9)]
    assert num_shared_blocks(spans_of(*tables, start=39), BLOCK_SIZE) == 9
    assert num_shared_blocks(spans_of(*tables, start=36), BLOCK_SIZE) == 9
    assert num_shared_blocks(spans_of(*tables, start=35), BLOCK_SIZE) == 8


def test_sequences_are_parted_by_what_they_begin_with() -> None:
    first = [[*range(20), 100 + i] for i in range(3)]
    second = [[*range(40, 60), 110 + i] for i in range(4)]
    alone = [[200, 201], [210]]
    spans = spans_of(first[0], second[0], alone[0], *first[1:], *second[1:], alone[1])
    found = [(n, [s.block_ids for s in family]) for n, family in by_prefix(spans, BLOCK_SIZE)]
    assert found == [(20, first), (20, second), (0, alone)]


@pytest.mark.parametrize("num_sequences", [3, 12])
def test_decodes_behind_a_prefix_see_something_else(num_sequences: int) -> None:
    steps = Steps()
    tables = [[*SYSTEM_PROMPT, 2 * i, 2 * i + 1] for i in range(num_sequences)]
    for step in range(6):
        plan = steps.run([(t, 64 + step % 3 + i % 3, 1) for i, t in enumerate(tables)])
        assert [group.prefix_places is not None for group in plan.decodes] == [True]


def test_decodes_go_on_behind_a_prefix() -> None:
    steps = Steps()
    tables = [[*SYSTEM_PROMPT, *range(4 * i, 4 * i + 4)] for i in range(4)]
    kept = [steps.run([(t, 65 + step, 1) for t in tables]).decodes[0] for step in range(12)]
    assert kept[0].contexts is kept[3].contexts, "the part behind the prefix is kept, too"


def test_a_prefix_grows_shorter_with_a_newcomer_and_longer_without_it() -> None:
    steps = Steps()
    tables = [[*SYSTEM_PROMPT, *range(4 * i, 4 * i + 4)] for i in range(5)]
    newcomer = [*SYSTEM_PROMPT[:12], *range(40, 48)]
    for step in range(9):
        joined = [newcomer] if step % 3 == 1 else []
        steps.run([(t, 65 + step, 1) for t in [*tables, *joined]])


def test_chunks_behind_a_prefix_see_something_else() -> None:
    steps = Steps()
    tables = [[*SYSTEM_PROMPT, *range(4 * i, 4 * i + 4)] for i in range(6)]
    plan = steps.run([(t, 64, 9) for t in tables])
    assert [group.prefix_places is not None for group in plan.prefills] == [True]
    # Long chunks are cut into blocks of queries.
    tables = [[*SYSTEM_PROMPT, *range(40 * i, 40 * i + 40)] for i in range(3)]
    plan = steps.run([(t, 66, 150) for t in tables])
    assert [group.prefix_places is not None for group in plan.prefills] == [True]


def test_sequences_that_share_too_little_change_places() -> None:
    steps = Steps()
    tables = [[100, 1, 2], [110, 3, 4], [100, 5, 6]]
    for step in range(3):
        plan = steps.run([(t, 8 + step, 1) for t in tables])
        assert len(plan.decodes) == 1


def test_families_and_loners_run_in_one_step() -> None:
    steps = Steps()
    family = [[*SYSTEM_PROMPT, 3 * i, 3 * i + 1, 3 * i + 2] for i in range(4)]
    other = [[*range(200, 216), 230 + i] for i in range(4)]
    loners = [[300], [*range(301, 309)]]
    steps.run(
        [
            (family[0], 64, 1),
            (other[0], 64, 1),
            (loners[0], 2, 1),
            *((t, 66, 1) for t in other[1:]),
            (loners[1], 20, 1),
            *((t, 67, 5) for t in family[1:]),
        ]
    )
