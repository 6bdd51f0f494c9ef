"""Kernels that were tried: each computes once what torch computes too, before a model relies on it.

A compiler that nobody has met may get any of them wrong. Letters are those of `kernels`; S tokens
of a context, F half of a head, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.matrices.grouped_codes import GROUP_SIZE, GroupedCodes
from llmrt.worker.native.kernels import HeadLayout, NativeKernels, PagedSpans
from llmrt.worker.native.library import NoKernelsError, load_library
from llmrt.worker.native.packing import pack, pack_codes
from llmrt.worker.shard import shard_heads

_TOLERANCE = 0.01
"""Of the largest number: a few roundings to bfloat16."""
_NUMBERS_OF_ROWS = (1, 5, 50)
"""Each takes another way through a multiplication."""
_NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 2, 64, 16
_TABLE = (2, 0, 3)
_NUM_BLOCKS, _CONTEXT = 4, 45
_HEADS = shard_heads(2 * _NUM_KV_HEADS, _NUM_KV_HEADS, 0, 1)

Comparison = tuple[str, Tensor, Tensor]
"""What computed it, what was found, and what was expected."""


def load_kernels(report: Callable[[str], None]) -> NativeKernels:
    """Return the kernels.

    Args:
        report: told that compiling goes on.

    Raises:
        NoKernelsError: they cannot be had here, or do not compute what they should.
    """
    kernels = NativeKernels(load_library(report))
    for name, found, expected in _compare(kernels):
        limit = _TOLERANCE * expected.abs().max().item()
        if not torch.allclose(found.float(), expected, rtol=0, atol=limit):
            raise NoKernelsError(f"as compiled here, {name} gives other numbers than torch")
    return kernels


def _compare(kernels: NativeKernels) -> Iterator[Comparison]:
    yield from _rows(kernels)
    for num_rows in _NUMBERS_OF_ROWS:
        yield from _products(kernels, _numbers(num_rows, 96).bfloat16())
    yield from _rotation(kernels)
    for num_tokens in (1, 20):
        yield from _attention(kernels, num_tokens)


def _numbers(*shape: int) -> Tensor:
    """Return numbers between -1 and 1 that follow no pattern a mistake could repeat."""
    return torch.arange(math.prod(shape), dtype=torch.float32).square().mul(0.7).sin().view(shape)


def _rows(kernels: NativeKernels) -> Iterator[Comparison]:
    x_TD, y_TD, weight_D = _numbers(4, 72), _numbers(4, 72).cos().bfloat16(), _numbers(72) + 2
    sum_TD = x_TD + y_TD
    norm_TD = kernels.add_rms_norm(x_TD, y_TD, weight_D, 1e-5)
    yield "add_rms_norm", x_TD, sum_TD
    yield "add_rms_norm", norm_TD, F.rms_norm(sum_TD, (72,), weight_D, 1e-5)
    gate_up_TI = (4 * _numbers(4, 144)).bfloat16()
    gate_TI, up_TI = gate_up_TI.float().chunk(2, -1)
    yield "silu_and_mul", kernels.silu_and_mul(gate_up_TI), F.silu(gate_TI) * up_TI


def _products(kernels: NativeKernels, x_TI: Tensor) -> Iterator[Comparison]:
    num_inputs = x_TI.shape[1]
    weight_OI, bias_O = _numbers(80, num_inputs).bfloat16(), _numbers(80).bfloat16()
    expected_TO = F.linear(x_TI.float(), weight_OI.float(), bias_O.float())
    for out_dtype in (torch.bfloat16, torch.float32):
        found_TO = kernels.multiply_packed(x_TI, pack(weight_OI), bias_O, 80, out_dtype)
        yield "multiply_packed", found_TO, expected_TO
    for num_bits, dtype in ((4, torch.uint8), (8, torch.int8)):
        most = (1 << num_bits) - 1
        codes_OI = torch.arange(80 * num_inputs).square().bitwise_and(most).view(80, -1)
        scale_OG = (_numbers(80, num_inputs // GROUP_SIZE) / most).bfloat16().float()
        codes = GroupedCodes(
            codes_OI=codes_OI.to(dtype),
            scale_OG=scale_OG,
            offset_OG=-4 * scale_OG,
            num_bits=num_bits,
        )
        found_TO = kernels.multiply_codes(x_TI, pack_codes(codes), bias_O)
        expected_TO = F.linear(x_TI.float(), codes.dequantize(), bias_O.float())
        yield f"multiply_codes of {num_bits} bits", found_TO, expected_TO


def _rotation(kernels: NativeKernels) -> Iterator[Comparison]:
    num_tokens, num_rotated = 5, _HEADS.num_heads + _NUM_KV_HEADS
    qkv_THD = _numbers(num_tokens, num_rotated + _NUM_KV_HEADS, _HEAD_DIM).bfloat16()
    angles_T1F = _numbers(num_tokens, 1, _HEAD_DIM // 2)
    cos_T1D = torch.cat((angles_T1F.cos(), angles_T1F.cos()), -1).bfloat16()
    sin_T1D = torch.cat((-angles_T1F.sin(), angles_T1F.sin()), -1).bfloat16()
    expected_THD = qkv_THD.float()
    turned_THD = expected_THD[:, :num_rotated]
    turned_THD.copy_(
        turned_THD * cos_T1D.float() + turned_THD.roll(_HEAD_DIM // 2, -1) * sin_T1D.float()
    )
    cache_HNBD = torch.zeros(2 * _NUM_KV_HEADS, 1, _BLOCK_SIZE, _HEAD_DIM, dtype=torch.bfloat16)
    slots_T = torch.tensor([3, 9, 0, 15, 4])
    kernels.rotate_and_store(qkv_THD, (cos_T1D, sin_T1D), cache_HNBD, slots_T, _NUM_KV_HEADS)
    yield "rotate_and_store", qkv_THD, expected_THD
    stored_THD = cache_HNBD[:, 0, slots_T].transpose(0, 1)
    yield "rotate_and_store", stored_THD, expected_THD[:, _HEADS.num_heads :]


def _attention(kernels: NativeKernels, num_tokens: int) -> Iterator[Comparison]:
    """Attention of the last tokens of a sequence whose context is in the cache."""
    start, num_heads = _CONTEXT - num_tokens, _HEADS.num_heads
    shape = (2 * _NUM_KV_HEADS, _NUM_BLOCKS, _BLOCK_SIZE, _HEAD_DIM)
    cache_HNBD = _numbers(*shape).bfloat16()
    qkv_THD = (3 * _numbers(num_tokens, num_heads + 2 * _NUM_KV_HEADS, _HEAD_DIM)).bfloat16()
    context_HSD = cache_HNBD[:, list(_TABLE)].flatten(1, 2)[:, :_CONTEXT].float()
    query_QTD = qkv_THD[:, :num_heads].transpose(0, 1).float()
    key_QSD, value_QSD = context_HSD.repeat_interleave(2, 0).chunk(2)
    is_seen_TS = torch.ones(num_tokens, _CONTEXT, dtype=torch.bool).tril(start)
    expected_QTD = F.scaled_dot_product_attention(query_QTD, key_QSD, value_QSD, is_seen_TS)
    spans = PagedSpans(
        tables_NM=torch.tensor([_TABLE], dtype=torch.int32),
        rows_N=torch.tensor([0]),
        starts_N=torch.tensor([start]),
        lengths_N=torch.tensor([num_tokens]),
        ends_N=torch.tensor([_CONTEXT]),
        longest=_CONTEXT,
    )
    name = "attend_decodes" if num_tokens == 1 else "attend_chunks"
    attend = getattr(kernels, name)
    found_TQD = torch.empty(num_tokens, num_heads, _HEAD_DIM, dtype=torch.bfloat16)
    attend(qkv_THD, cache_HNBD, spans, HeadLayout(_HEADS), None, found_TQD)
    yield name, found_TQD, expected_QTD.transpose(0, 1)
