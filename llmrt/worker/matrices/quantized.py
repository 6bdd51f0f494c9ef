"""Matrices kept as whole numbers, multiplied as such where that is faster. bfloat16 on a CPU only.

T tokens, I inputs, O outputs, G groups of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.matrices.grouped_codes import GROUP_SIZE, GroupedCodes
from llmrt.worker.matrices.matrix import Matrix
from llmrt.worker.native.kernels import NativeKernels
from llmrt.worker.native.packing import pack_codes, unpack_codes

MAX_INT4_ROWS = 6
MAX_INT8_ROWS = 16
"""Up to so many tokens the kernel on whole numbers is the faster one (measured with AVX-512)."""
_ROW_UNIT = 16
"""The kernels want whole vectors; given others, torch's 8-bit one returns NaN."""


class Int4Matrix:
    """4-bit codes for a few tokens, and a dense copy for many: 1.3 times the memory of bfloat16."""

    def __init__(self, codes: GroupedCodes, dense: Matrix) -> None:
        self._dense = dense
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            codes.codes_OI.to(torch.int32), 1
        )
        middle_OG = codes.offset_OG + 8 * codes.scale_OG
        pairs_GO2 = torch.stack((codes.scale_OG.T, middle_OG.T), dim=-1)
        self._scales_and_middles = pairs_GO2.bfloat16().contiguous()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @property
    def num_bytes(self) -> int:
        """Memory of the codes, their scales and the dense copy."""
        return self._dense.num_bytes + self._packed.nbytes + self._scales_and_middles.nbytes

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        if len(x_TI) > MAX_INT4_ROWS:
            return self._dense.multiply(x_TI, bias_O)
        y_TO = self._multiply(x_TI, self._packed, GROUP_SIZE, self._scales_and_middles)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def dense(self) -> Tensor:
        """Return weight_OI as the codes have it."""
        return self._dense.dense()


class CodesMatrix:
    """4- or 8-bit codes, multiplied by our own kernel: 0.31 or 0.56 of the memory of bfloat16.

    Results are in bfloat16, or in float32 where they are not to be rounded.
    """

    def __init__(
        self, codes: GroupedCodes, kernels: NativeKernels, out_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._out_dtype = out_dtype
        self._packed = pack_codes(codes)
        self._multiply = kernels.multiply_codes

    @property
    def num_bytes(self) -> int:
        """Memory of the codes and their scales."""
        return self._packed.num_bytes

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        return self._multiply(x_TI.contiguous(), self._packed, bias_O, self._out_dtype)

    def dense(self) -> Tensor:
        """Return weight_OI as the codes have it."""
        return unpack_codes(self._packed).dequantize().bfloat16()


class Int8Matrix:
    """8-bit codes with a scale for every row; made dense for many tokens, each time anew."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._codes_OI, self._scale_O = quantize_rows(weight_OI)

    @property
    def num_bytes(self) -> int:
        """Memory of the codes and their scales."""
        return self._codes_OI.nbytes + self._scale_O.nbytes

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        if len(x_TI) <= MAX_INT8_ROWS:
            y_TO = torch.ops.aten._weight_int8pack_mm(x_TI, self._codes_OI, self._scale_O)
        else:
            y_TO = F.linear(x_TI, self._codes_OI.to(x_TI.dtype)).mul_(self._scale_O)
        return y_TO if bias_O is None else y_TO.add_(bias_O)

    def dense(self) -> Tensor:
        """Return weight_OI as the codes have it."""
        return self._codes_OI.to(self._scale_O.dtype) * self._scale_O[:, None]


def quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes_OI (int8) and scale_O (bfloat16): value = code · scale.

    The scale is rounded before codes are chosen.
    """
    weight_OI = weight_OI.float()
    scale_O = (weight_OI.abs().amax(-1) / 127).bfloat16()
    divisor_O = torch.where(scale_O == 0, 1.0, scale_O.float())
    codes_OI = (weight_OI / divisor_O[:, None]).round_().clamp_(-127, 127)
    return codes_OI.to(torch.int8), scale_O


def rows_as_groups(weight_OI: Tensor) -> GroupedCodes:
    """Return the codes of `quantize_rows`, the scale of a row repeated for each of its groups."""
    codes_OI, scale_O = quantize_rows(weight_OI)
    scale_OG = scale_O.float()[:, None].repeat(1, codes_OI.shape[1] // GROUP_SIZE)
    return GroupedCodes(
        codes_OI=codes_OI, scale_OG=scale_OG, offset_OG=torch.zeros_like(scale_OG), num_bits=8
    )


def fits_kernels(num_outputs: int, num_inputs: int) -> bool:
    """Return whether the kernels on whole numbers take a matrix of this shape."""
    return num_outputs > 0 and num_outputs % _ROW_UNIT == 0 and num_inputs % GROUP_SIZE == 0
