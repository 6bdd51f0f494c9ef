"""The order in which matrices.c reads a matrix.

O outputs (rows of the matrix), I inputs, P pairs of inputs, G groups of 32 inputs, W words of
codes, E codes of a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmrt.worker.matrices.grouped_codes import GroupedCodes, middle_code

COLUMNS = 64
"""Outputs of a packed matrix that lie together."""
CODE_COLUMNS = 16
"""Outputs of a matrix of codes that lie together."""
_CODE_SHIFTS = {
    4: tuple(4 * (i // 2) + 16 * (i % 2) for i in range(8)),
    8: (0, 8, 16, 24),
}
"""Where in a word the codes of its inputs stand. Of 4 bits, even ones below and odd ones above."""


def pack(weight_OI: Tensor) -> Tensor:
    """Return a matrix in blocks of 64 outputs, as oneDNN packs it too: pairs_BP64.

    A pair is two inputs, in one int32. The last block is filled up with 0.
    """
    pairs_OP = weight_OI.contiguous().view(torch.int32)
    num_outputs, num_pairs = pairs_OP.shape
    packed = pairs_OP.new_zeros(-(-num_outputs // COLUMNS), num_pairs, COLUMNS)
    num_full = num_outputs // COLUMNS
    full = pairs_OP[: num_full * COLUMNS].view(num_full, COLUMNS, num_pairs)
    packed[:num_full] = full.transpose(1, 2)
    rest = pairs_OP[num_full * COLUMNS :]
    if len(rest):
        packed[-1, :, : len(rest)] = rest.T
    return packed


def unpack(packed: Tensor, num_outputs: int) -> Tensor:
    """Return weight_OI."""
    pairs_OP = packed.transpose(1, 2).flatten(0, 1)[:num_outputs]
    return pairs_OP.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCodes:
    """A matrix of codes."""

    words: Tensor
    """int32; sixteen outputs lie together, of each a word in turn."""
    scales_and_middles: Tensor
    """bfloat16; for each group sixteen scales, then the values in the midst of their codes."""
    num_bits: int

    @property
    def num_outputs(self) -> int:
        """Rows of the matrix."""
        return len(self.words) * CODE_COLUMNS

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        return self.words.nbytes + self.scales_and_middles.nbytes


def pack_codes(codes: GroupedCodes) -> PackedCodes:
    """Return a matrix of codes in the order of matrices.c."""
    shifts = _CODE_SHIFTS[codes.num_bits]
    mask = (1 << codes.num_bits) - 1
    codes_OWE = codes.codes_OI.to(torch.int32).unflatten(1, (-1, len(shifts))) & mask
    words_OW = torch.zeros(codes_OWE.shape[:2], dtype=torch.int32)
    for i, shift in enumerate(shifts):
        words_OW |= codes_OWE[..., i] << shift
    middle_OG = codes.offset_OG + codes.middle_code * codes.scale_OG
    pairs_OG2 = torch.stack((codes.scale_OG, middle_OG), dim=-1).bfloat16()
    return PackedCodes(
        words=words_OW.unflatten(0, (-1, CODE_COLUMNS)).transpose(1, 2).contiguous(),
        scales_and_middles=pairs_OG2.unflatten(0, (-1, CODE_COLUMNS))
        .permute(0, 2, 3, 1)
        .contiguous(),
        num_bits=codes.num_bits,
    )


def unpack_codes(packed: PackedCodes) -> GroupedCodes:
    """Return the codes again; scales and offsets are as rounded as the kernel has them."""
    num_bits = packed.num_bits
    words_OW1 = packed.words.transpose(1, 2).flatten(0, 1)[..., None]
    shifts_E = torch.tensor(_CODE_SHIFTS[num_bits], dtype=torch.int32)
    if num_bits == 4:
        codes_OI = (words_OW1 >> shifts_E & 15).flatten(1).to(torch.uint8)
    else:
        codes_OI = (words_OW1 >> shifts_E).flatten(1).to(torch.int8)
    pairs_OG2 = packed.scales_and_middles.permute(0, 3, 1, 2).flatten(0, 1).float()
    scale_OG, middle_OG = pairs_OG2.unbind(-1)
    return GroupedCodes(
        codes_OI=codes_OI,
        scale_OG=scale_OG,
        offset_OG=middle_OG - middle_code(num_bits) * scale_OG,
        num_bits=num_bits,
    )
