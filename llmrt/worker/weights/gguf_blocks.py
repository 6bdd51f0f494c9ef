"""The block formats of GGUF files: how many values a block holds, in how many bytes, decoded how.

A row is a whole number of blocks. Formulas are those of ggml (`dequantize_row_*`), and every step
is rounded to float32 as there, so the values are equal to the last bit.

N blocks, B bytes of a block, E values of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from llmrt.worker.matrices.grouped_codes import GroupedCodes


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way of storing values in blocks of bytes."""

    num_values: int
    num_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]
    """uint8 of shape (..., num_bytes) to values of shape (..., num_values)."""
    group: Callable[[torch.Tensor], GroupedCodes] | None = None
    """uint8 of shape (rows, blocks, num_bytes) to codes; None for formats that have none."""


def _stored_as(dtype: torch.dtype) -> BlockFormat:
    return BlockFormat(1, dtype.itemsize, lambda blocks_NB: blocks_NB.view(dtype))


def _decode_q8_0(blocks_NB: torch.Tensor) -> torch.Tensor:
    scale_N1 = blocks_NB[..., 0:2].view(torch.float16).float()
    return blocks_NB[..., 2:].view(torch.int8).float() * scale_N1


def _decode_q4_0(blocks_NB: torch.Tensor) -> torch.Tensor:
    scale_N1 = blocks_NB[..., 0:2].view(torch.float16).float()
    return (_nibbles(blocks_NB[..., 2:]) - 8) * scale_N1


def _decode_q4_1(blocks_NB: torch.Tensor) -> torch.Tensor:
    scale_N1 = blocks_NB[..., 0:2].view(torch.float16).float()
    least_N1 = blocks_NB[..., 2:4].view(torch.float16).float()
    return _nibbles(blocks_NB[..., 4:]) * scale_N1 + least_N1


def _nibbles(packed_NB: torch.Tensor) -> torch.Tensor:
    return _codes(packed_NB).float()


def _codes(packed_NB: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, then the high halves: the order of ggml."""
    return torch.cat((packed_NB & 15, packed_NB >> 4), dim=-1)


def _group_q8_0(blocks_RGB: torch.Tensor) -> GroupedCodes:
    scale_RG = blocks_RGB[..., 0:2].view(torch.float16)[..., 0].float()
    return GroupedCodes(
        codes_OI=blocks_RGB[..., 2:].view(torch.int8).flatten(1),
        scale_OG=scale_RG,
        offset_OG=torch.zeros_like(scale_RG),
        num_bits=8,
    )


def _group_q4_0(blocks_RGB: torch.Tensor) -> GroupedCodes:
    scale_RG = blocks_RGB[..., 0:2].view(torch.float16)[..., 0].float()
    codes_RC = _codes(blocks_RGB[..., 2:]).flatten(1)
    return GroupedCodes(codes_OI=codes_RC, scale_OG=scale_RG, offset_OG=-8 * scale_RG)


def _group_q4_1(blocks_RGB: torch.Tensor) -> GroupedCodes:
    scale_RG = blocks_RGB[..., 0:2].view(torch.float16)[..., 0].float()
    least_RG = blocks_RGB[..., 2:4].view(torch.float16)[..., 0].float()
    codes_RC = _codes(blocks_RGB[..., 4:]).flatten(1)
    return GroupedCodes(codes_OI=codes_RC, scale_OG=scale_RG, offset_OG=least_RG)


BLOCK_FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "F32": _stored_as(torch.float32),
        "F16": _stored_as(torch.float16),
        "BF16": _stored_as(torch.bfloat16),
        "Q8_0": BlockFormat(32, 34, _decode_q8_0, _group_q8_0),
        "Q4_0": BlockFormat(32, 18, _decode_q4_0, _group_q4_0),
        "Q4_1": BlockFormat(32, 20, _decode_q4_1, _group_q4_1),
    }
)
"""By the name of the GGUF tensor type."""
