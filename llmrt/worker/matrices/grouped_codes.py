"""GroupedCodes: a matrix as 4- or 8-bit numbers, with a scale and an offset for every 32 of a row.

O outputs (rows), I inputs (columns), G groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
MAX_CODE = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedCodes:
    """value = code · scale + offset."""

    codes_OI: Tensor
    """Of 4 bits uint8, 0 to 15; of 8 bits int8."""
    scale_OG: Tensor
    offset_OG: Tensor
    num_bits: int = 4

    @property
    def middle_code(self) -> int:
        """The code in the midst of all."""
        return middle_code(self.num_bits)

    def __len__(self) -> int:
        return len(self.codes_OI)

    def dequantize(self) -> Tensor:
        """Return the values, in the dtype of the scales."""
        codes_OGE = self.codes_OI.unflatten(1, (-1, GROUP_SIZE)).to(self.scale_OG.dtype)
        return (codes_OGE * self.scale_OG[..., None] + self.offset_OG[..., None]).flatten(1)


def middle_code(num_bits: int) -> int:
    """Return the code in the midst of those of so many bits."""
    return {4: 8, 8: 0}[num_bits]


def stack(pieces: Sequence[GroupedCodes]) -> GroupedCodes:
    """Return one matrix with the rows of all; their codes have as many bits."""
    return GroupedCodes(
        codes_OI=torch.cat([p.codes_OI for p in pieces]),
        scale_OG=torch.cat([p.scale_OG for p in pieces]),
        offset_OG=torch.cat([p.offset_OG for p in pieces]),
        num_bits=pieces[0].num_bits,
    )


def quantize_to_groups(weight_OI: Tensor) -> GroupedCodes:
    """Return the nearest codes between the least and the greatest value of each group.

    Scale and offset are rounded to bfloat16, as the kernel keeps them, before codes are chosen.
    """
    groups_OGE = weight_OI.float().unflatten(1, (-1, GROUP_SIZE))
    least_OG, most_OG = groups_OGE.amin(-1), groups_OGE.amax(-1)
    scale_OG = ((most_OG - least_OG) / MAX_CODE).bfloat16().float()
    # The kernel's own offset is that of code 8, so this is the number that is rounded.
    middle_OG = (least_OG + 8 * scale_OG).bfloat16().float()
    offset_OG = middle_OG - 8 * scale_OG
    # A constant group has scale 0: any divisor will do, all its codes are equal.
    divisor_OG = torch.where(scale_OG == 0, 1.0, scale_OG)
    codes_OGE = ((groups_OGE - middle_OG[..., None]) / divisor_OG[..., None]).round_() + 8
    return GroupedCodes(
        codes_OI=codes_OGE.clamp_(0, MAX_CODE).to(torch.uint8).flatten(1),
        scale_OG=scale_OG,
        offset_OG=offset_OG,
    )
