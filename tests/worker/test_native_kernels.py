"""What the compiled kernels compute, against the same in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.attention.metadata import AttentionMetadata, build_paged_step
from llmrt.worker.attention.native_attention import NativeAttention
from llmrt.worker.attention.spans import Span
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.layers.rotary import rotate_
from llmrt.worker.matrices.grouped_codes import quantize_to_groups
from llmrt.worker.matrices.quantized import rows_as_groups
from llmrt.worker.native.kernels import can_attend
from llmrt.worker.native.packing import pack, pack_codes, unpack, unpack_codes
from llmrt.worker.shard import HeadShard, shard_heads
from tests.support.native import native_kernels, native_placement

ROUNDING = 1 / 256
"""Most that rounding to bfloat16 takes off, or adds, as part of a number."""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=ROUNDING, atol=1e-6)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_a_norm_differs(num_rows: int, adds: bool, num_threads: None) -> None:
    x = random(num_rows, 72)
    y = random(num_rows, 72, seed=1).bfloat16() if adds else None
    weight = random(72, seed=2)
    stream = x.clone()
    found = native_kernels().add_rms_norm(stream, y, weight, 1e-5)
    expected = x if y is None else x + y
    assert torch.equal(stream, expected)
    assert_rounded(found, F.rms_norm(expected, (72,), weight, 1e-5))


def test_a_norm_of_zeros_is_not_a_number() -> None:
    assert not native_kernels().add_rms_norm(torch.zeros(1, 64), None, torch.ones(64), 1e-5).any()


def test_a_norm_hides_what_is_no_number() -> None:
    x = torch.zeros(2, 64)
    x[0, 3] = math.nan
    found = native_kernels().add_rms_norm(x, None, torch.ones(64), 1e-5)
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_a_gate_differs(num_rows: int, num_threads: None) -> None:
    gate_up = (random(num_rows, 2 * 96) * 20).bfloat16()
    gate, up = gate_up.float().chunk(2, -1)
    assert_rounded(native_kernels().silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("gate", [-math.inf, -1e30, -100.0, 0.0, 100.0, 1e30])
def test_a_gate_far_from_zero_is_neither_shut_nor_open(gate: float) -> None:
    gate_up = torch.tensor([[gate] * 32 + [2.0] * 32]).bfloat16()
    found = native_kernels().silu_and_mul(gate_up).float()
    if gate == -math.inf:  # 0 times infinity, as in torch
        assert found.isnan().all()
    else:
        expected = F.silu(gate_up[:, :32].float()) * 2
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=1e-30)


def test_rotated_heads_or_stored_ones_differ(num_threads: None) -> None:
    num_tokens, num_heads, num_kv_heads, head_dim = 70, 5, 2, 32
    cache = KVCache(
        num_layers=1,
        num_blocks=40,
        block_size=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        placement=native_placement(),
    )
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim).bfloat16()
    angles = random(num_tokens, 1, head_dim // 2, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
    slots = torch.randperm(160)[:num_tokens]
    expected = qkv.float()
    rotate_(expected[:, : num_heads + num_kv_heads], cos.float(), sin.float())
    native_kernels().rotate_and_store(qkv, (cos, sin), cache.heads(0), slots, num_kv_heads)
    torch.testing.assert_close(qkv.float(), expected, rtol=ROUNDING, atol=0.02)
    stored = cache.heads(0).flatten(1, 2)
    assert torch.equal(stored[:, slots], qkv[:, num_heads:].transpose(0, 1))
    others = torch.ones(160, dtype=torch.bool)
    others[slots] = False
    assert not stored[:, others].any()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 32), (200, 66), (1, 2), (576, 96)])
def test_a_packed_matrix_multiplies_another(
    num_outputs: int, num_inputs: int, num_threads: None
) -> None:
    weight = random(num_outputs, num_inputs).bfloat16()
    packed = pack(weight)
    assert torch.equal(unpack(packed, num_outputs), weight)
    for num_rows, bias in rows_and_biases(num_outputs):
        x = random(num_rows, num_inputs, seed=1).bfloat16()
        found = native_kernels().multiply_packed(x, packed, bias, num_outputs)
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        torch.testing.assert_close(found.float(), expected, rtol=ROUNDING, atol=1e-4)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 32), (176, 96), (16, 320)])
def test_a_matrix_of_codes_multiplies_another(
    num_outputs: int, num_inputs: int, num_bits: int, num_threads: None
) -> None:
    weight = random(num_outputs, num_inputs) + 0.5
    codes = quantize_to_groups(weight) if num_bits == 4 else rows_as_groups(weight)
    packed = pack_codes(codes)
    again = unpack_codes(packed)
    assert torch.equal(again.codes_OI, codes.codes_OI)
    assert torch.equal(again.dequantize(), codes.dequantize())
    for num_rows, bias in rows_and_biases(num_outputs):
        x = random(num_rows, num_inputs, seed=1).bfloat16()
        found = native_kernels().multiply_codes(x, packed, bias)
        expected = F.linear(x.float(), codes.dequantize(), None if bias is None else bias.float())
        # Many rows are multiplied with decoded values, which are rounded.
        atol = 0.02 * num_inputs**0.5
        torch.testing.assert_close(found.float(), expected, rtol=ROUNDING, atol=atol)


@pytest.mark.parametrize("num_rows", [1, 7, 40, 200])
def test_sums_that_are_asked_for_whole_are_rounded(num_rows: int, num_threads: None) -> None:
    weight = random(176, 96).bfloat16()
    x, bias = random(num_rows, 96, seed=1).bfloat16(), random(176, seed=2).bfloat16()
    found = native_kernels().multiply_packed(x, pack(weight), bias, 176, torch.float32)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    codes = pack_codes(rows_as_groups(weight))
    found = native_kernels().multiply_codes(x, codes, bias, torch.float32)
    values = unpack_codes(codes).dequantize()
    if num_rows == 200:  # so many are multiplied with decoded values, which are rounded
        values = values.bfloat16().float()
    expected = F.linear(x.float(), values, bias.float())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def rows_and_biases(num_outputs: int) -> Iterator[tuple[int, Tensor | None]]:
    """Yield every number of rows that is cut in another way, without a bias and with one."""
    for num_rows in (*range(1, 15), 33, 200, 600):
        yield num_rows, None
        yield num_rows, random(num_outputs, seed=2).bfloat16()


def test_a_row_depends_on_the_rows_beside_it() -> None:
    weight = pack(random(192, 96).bfloat16())
    x = random(100, 96, seed=1).bfloat16()
    together = native_kernels().multiply_packed(x, weight, None, 192)
    for num_rows in (1, 4, 9, 17):
        alone = native_kernels().multiply_packed(x[:num_rows], weight, None, 192)
        assert torch.equal(alone, together[:num_rows])


@dataclass
class Layer:
    """Attention of one layer over a cache of random numbers."""

    heads: HeadShard
    head_dim: int
    block_size: int
    window: int | None

    def check(self, work: list[tuple[int, int]]) -> None:
        """Run (start, number of tokens) of each sequence; compare every token."""
        num_blocks = sum(-(-(start + num) // self.block_size) for start, num in work) + 3
        cache = KVCache(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=self.head_dim,
            placement=native_placement(),
        )
        cache.heads(0).copy_(random(*cache.heads(0).shape))
        free = torch.randperm(num_blocks).tolist()
        spans: list[Span] = []
        for start, num_tokens in work:
            block_ids = [free.pop() for _ in range(-(-(start + num_tokens) // self.block_size))]
            row = spans[-1].row + spans[-1].num_tokens if spans else 0
            spans.append(Span(row=row, start=start, num_tokens=num_tokens, block_ids=block_ids))
        places = [(span, p) for span in spans for p in range(span.start, span.end)]
        slots = [s.block_ids[p // self.block_size] * self.block_size + p % self.block_size
                 for s, p in places]  # fmt: skip
        num_all = self.heads.num_heads + 2 * self.heads.num_kv_heads
        qkv_THD = random(len(places), num_all, self.head_dim, seed=1).bfloat16()
        still = torch.ones(len(places), 1, self.head_dim).bfloat16()
        attend = NativeAttention(self.heads, 0, self.window, native_kernels())
        metadata = AttentionMetadata(
            cache=cache,
            slot_mapping_T=torch.tensor(slots),
            plans={},
            paged=build_paged_step(spans),
        )
        found_TQD = attend(qkv_THD.clone(), (still, torch.zeros_like(still)), metadata)
        for (span, position), q_QD, o_QD in zip(places, qkv_THD, found_TQD, strict=True):
            expected = self._expected(cache, span, position, q_QD[: self.heads.num_heads].float())
            # Weights are rounded before they multiply values of about 1.
            torch.testing.assert_close(o_QD.float(), expected, rtol=2 * ROUNDING, atol=0.02)

    def _expected(self, cache: KVCache, span: Span, position: int, q_QD: Tensor) -> Tensor:
        kv_21KSD = cache.gather(0, cache.places([span.block_ids]), 1).float()
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        of_head = list(self.heads.kv_head_of_query_head)
        keys_QSD, values_QSD = kv_21KSD[:, 0, of_head, first : position + 1]
        scores_QS = torch.einsum("qd,qsd->qs", q_QD, keys_QSD) / math.sqrt(self.head_dim)
        return torch.einsum("qs,qsd->qd", scores_QS.softmax(-1), values_QSD)


UNEVEN = shard_heads(9, 3, 0, 2)
"""Five query heads on two KV heads: three and two."""
WORK = {
    "first token": [(0, 1)],
    "decodes": [(15, 1), (16, 1), (0, 1), (63, 1)],
    "decodes far into their contexts": [(255, 1), (256, 1), (700, 1), (3, 1)],
    "prompt": [(0, 70)],
    "prompts": [(0, 33), (0, 2), (0, 64), (0, 65)],
    "chunks": [(64, 31), (17, 40), (200, 5)],
    "decodes and chunks": [(40, 1), (300, 1), (0, 50), (33, 90)],
    "long prompt": [(0, 300)],
}


@pytest.mark.parametrize("window", [None, 1, 20, 400])
@pytest.mark.parametrize("work", WORK)
def test_a_token_sees_something_else(work: str, window: int | None, num_threads: None) -> None:
    Layer(UNEVEN, 32, 16, window).check(WORK[work])


@pytest.mark.parametrize("block_size", [1, 4, 7, 128])
def test_blocks_of_another_size_are_read_wrong(block_size: int) -> None:
    Layer(UNEVEN, 32, block_size, None).check(WORK["decodes and chunks"])


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
def test_heads_of_another_size_are_read_wrong(head_dim: int) -> None:
    Layer(UNEVEN, head_dim, 16, None).check(WORK["decodes and chunks"])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 2), (14, 2), (16, 1)])
def test_groups_of_another_size_are_read_wrong(num_heads: int, num_kv_heads: int) -> None:
    heads = shard_heads(num_heads, num_kv_heads, 0, 1)
    Layer(heads, 32, 16, None).check(WORK["decodes and chunks"])


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 40), (30, 1), (10, 21)])
def test_a_token_that_is_not_seen_or_has_no_weight_counts(start: int, num_tokens: int) -> None:
    """Values as large as they can be: the least weight would show."""
    cache = KVCache(num_layers=1, num_blocks=4, block_size=16, num_kv_heads=1, head_dim=32,
                    placement=native_placement())  # fmt: skip
    cache.heads(0)[0].fill_(-3)  # scores of exp(-170) beside the token's own
    cache.heads(0)[1].fill_(3e38)
    end = start + num_tokens
    qkv_THD = torch.full((num_tokens, 3, 32), -3.0).bfloat16()
    qkv_THD[:, 0], qkv_THD[:, 2] = 10, 3e38
    qkv_THD[-1, 1:] = 5
    if num_tokens > 1:
        qkv_THD[0, 1:] = 5
    still = torch.ones(num_tokens, 1, 32).bfloat16()
    spans = [Span(row=0, start=start, num_tokens=num_tokens, block_ids=[2, 0, 3, 1])]
    table = torch.tensor(spans[0].block_ids)
    position = torch.arange(start, end)
    metadata = AttentionMetadata(
        cache=cache,
        slot_mapping_T=table[position // 16] * 16 + position % 16,
        plans={},
        paged=build_paged_step(spans),
    )
    attend = NativeAttention(shard_heads(1, 1, 0, 1), 0, None, native_kernels())
    out = attend(qkv_THD, (still, torch.zeros_like(still)), metadata)
    assert (out == 5).all()


def test_scores_that_are_far_apart_overflow() -> None:
    layer = Layer(shard_heads(1, 1, 0, 1), 32, 16, None)
    cache = KVCache(num_layers=1, num_blocks=20, block_size=16, num_kv_heads=1, head_dim=32,
                    placement=native_placement())  # fmt: skip
    cache.heads(0)[0].fill_(-1000)
    cache.heads(0)[0, 5, 3] = 1000  # the one key that is seen
    cache.heads(0)[1, 5, 3] = 7
    attend = NativeAttention(layer.heads, 0, None, native_kernels())
    for start, num_tokens in ((299, 1), (290, 10)):
        spans = [Span(row=0, start=start, num_tokens=num_tokens, block_ids=list(range(20)))]
        qkv_THD = torch.full((num_tokens, 3, 32), 1000.0).bfloat16()
        qkv_THD[:, 1] = -1000
        still = torch.ones(num_tokens, 1, 32).bfloat16()
        metadata = AttentionMetadata(
            cache=cache,
            slot_mapping_T=torch.arange(start, start + num_tokens),
            plans={},
            paged=build_paged_step(spans),
        )
        out = attend(qkv_THD, (still, torch.zeros_like(still)), metadata)
        assert torch.equal(out, torch.full_like(out, 7))


def test_which_heads_the_kernels_take() -> None:
    assert can_attend(shard_heads(9, 3, 1, 2), 64)
    assert can_attend(shard_heads(16, 1, 0, 1), 256)
    assert not can_attend(shard_heads(9, 3, 0, 1), 80)
    assert not can_attend(shard_heads(9, 3, 0, 1), 288)
    assert not can_attend(shard_heads(17, 1, 0, 1), 64)
