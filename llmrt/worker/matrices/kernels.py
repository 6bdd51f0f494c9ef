"""Which kernels this processor and this torch have.

The fast ones are torch's private operators, so each is tried once on a small matrix: one that is
missing, has another signature or gives another result is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from llmrt.worker.device import Placement
from llmrt.worker.matrices.grouped_codes import quantize_to_groups
from llmrt.worker.matrices.matrix import Matrix, PackedMatrix, PlainMatrix
from llmrt.worker.matrices.quantized import Int4Matrix, Int8Matrix


def can_pack(placement: Placement) -> bool:
    """Return whether matrices can be packed for oneDNN here."""
    return _is_cpu_bfloat16(placement) and has_fast_bfloat16() and _packing_works()


def can_multiply_int4(placement: Placement) -> bool:
    """Return whether 4-bit codes can be multiplied as such here."""
    return placement.kernels is not None or (_is_cpu_bfloat16(placement) and _int4_works())


def can_multiply_int8(placement: Placement) -> bool:
    """Return whether 8-bit codes can be multiplied as such here."""
    return placement.kernels is not None or (_is_cpu_bfloat16(placement) and _int8_works())


@cache
def has_fast_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor, rather than converting it."""
    try:
        return torch.backends.mkldnn.is_available() and bool(
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
    except (AttributeError, RuntimeError):
        return False


def _is_cpu_bfloat16(placement: Placement) -> bool:
    return placement.device.type == "cpu" and placement.dtype == torch.bfloat16


@cache
def _packing_works() -> bool:
    return gives_the_same(PackedMatrix)


@cache
def _int4_works() -> bool:
    return gives_the_same(lambda w: Int4Matrix(quantize_to_groups(w), PlainMatrix(w)))


@cache
def _int8_works() -> bool:
    return gives_the_same(Int8Matrix)


def gives_the_same(make: Callable[[torch.Tensor], Matrix]) -> bool:
    """Return whether a kind of matrix multiplies like F.linear, for few tokens and for many."""
    # Values that 4 and 8 bits hold exactly: a kernel that works differs by rounding only.
    weight_OI = (torch.arange(32 * 64).view(32, 64) * 7 % 16 - 8).bfloat16() * 16
    weight_OI[:, 0], weight_OI[:, 32] = -127, 127
    weight_OI = weight_OI.clamp(-127, 127)
    x_TI = torch.cos(torch.arange(32 * 64.0)).view(32, 64).bfloat16()
    bias_O = torch.arange(32.0).bfloat16()
    try:
        matrix = make(weight_OI)
        return all(
            _is_close(
                matrix.multiply(x_TI[:n], bias_O),
                F.linear(x_TI[:n].float(), weight_OI.float(), bias_O.float()),
            )
            for n in (1, 32)
        )
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.float() - expected).abs().max() <= 0.1 * expected.abs().max())
