"""Linear: the one place where activations meet a weight matrix, whatever kernel multiplies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmrt.worker.device import Placement
from llmrt.worker.matrices.grouped_codes import GroupedCodes, quantize_to_groups, stack
from llmrt.worker.matrices.kernels import can_multiply_int4, can_pack
from llmrt.worker.matrices.matrix import Matrix, NativeMatrix, PackedMatrix, PlainMatrix
from llmrt.worker.matrices.quantized import (
    CodesMatrix,
    Int4Matrix,
    Int8Matrix,
    fits_kernels,
    rows_as_groups,
)

Piece = Tensor | GroupedCodes
"""Some rows of a matrix, as its checkpoint stores them."""


class Linear(nn.Module):
    """y = x Wᵀ + b, with the rows of W (one per output) in one piece.

    T tokens, I inputs, O outputs. y has the dtype of the placement, unless `rounds` is False and a
    kernel has it in float32 anyway.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        placement: Placement,
        *,
        bias: bool = False,
        is_quantizable: bool = True,
        rounds: bool = True,
    ) -> None:
        super().__init__()
        self._placement = placement
        self._quantization = placement.quantization if is_quantizable else None
        self._native_dtype = placement.dtype if rounds else torch.float32
        self._shape = (num_outputs, num_inputs)
        self._matrix: Matrix | None = None
        self.weight: nn.Parameter | None = None
        """The matrix, where it is kept as it is; None where its kernel has another form of it."""
        self.bias = _parameter((num_outputs,), placement) if bias else None

    def load(self, weights: Sequence[Piece], biases: Sequence[Tensor] = ()) -> None:
        """Take these pieces, one under the other, as the matrix, and the bias likewise.

        A piece on the `meta` device has no values: what is there in its place stays.
        """
        if self.bias is not None:
            fill(self.bias, biases)
        codes = [w for w in weights if isinstance(w, GroupedCodes)]
        if len(codes) == len(weights) and self._keeps(codes):
            self._matrix = self._of_codes(stack(codes))
        else:
            weight = self._weight_to_fill(weights)
            fill(weight, [w.dequantize() if isinstance(w, GroupedCodes) else w for w in weights])
            self.share(weight)

    def _weight_to_fill(self, pieces: Sequence[Piece]) -> nn.Parameter:
        weight = _parameter(self._shape, self._placement)
        if any(isinstance(piece, Tensor) and piece.is_meta for piece in pieces):
            assert self._matrix is not None, "there is nothing to stay"
            weight.data.copy_(self._matrix.dense())
        return weight

    def share(self, weight: nn.Parameter) -> None:
        """Multiply with a matrix that somebody else has, too."""
        if self._quantization == "int4" and fits_kernels(*self._shape):
            self._matrix = self._of_codes(quantize_to_groups(weight))
        elif self._quantization == "int8" and fits_kernels(*self._shape):
            kernels = self._placement.kernels
            self._matrix = (
                Int8Matrix(weight)
                if kernels is None
                else CodesMatrix(rows_as_groups(weight), kernels, self._native_dtype)
            )
        else:
            self._matrix = self._dense(weight)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        assert self._matrix is not None, "nothing is loaded"
        return self._matrix.multiply(x_TI, self.bias)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix beside the parameters."""
        return 0 if self._matrix is None else self._matrix.num_bytes

    def _keeps(self, codes: Sequence[GroupedCodes]) -> bool:
        """Return whether these can be multiplied as they are, and nobody asked for others."""
        kind, *others = {f"int{piece.num_bits}" for piece in codes}
        is_wanted = self._quantization in (None, kind) and not others
        if not is_wanted or not fits_kernels(*self._shape):
            return False
        if self._placement.kernels is not None:
            return True
        return kind == "int4" and can_multiply_int4(self._placement)

    def _of_codes(self, codes: GroupedCodes) -> Matrix:
        if self._placement.kernels is not None:
            return CodesMatrix(codes, self._placement.kernels, self._native_dtype)
        weight = codes.dequantize().to(self._placement.dtype)
        return Int4Matrix(codes, self._dense(nn.Parameter(weight, requires_grad=False)))

    def _dense(self, weight: nn.Parameter) -> Matrix:
        kernels = self._placement.kernels
        if weight.numel() and kernels is not None and weight.shape[1] % 2 == 0:
            return NativeMatrix(weight, kernels, self._native_dtype)
        if weight.numel() and can_pack(self._placement):
            return PackedMatrix(weight)
        self.weight = weight
        return PlainMatrix(weight)


def _parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    values = torch.empty(shape, device=placement.device, dtype=placement.dtype)
    return nn.Parameter(values, requires_grad=False)


def fill(parameter: Tensor, pieces: Sequence[Tensor]) -> None:
    """Copy *pieces* into *parameter*, one after the other; together they are exactly as long.

    A piece on the `meta` device has no values: what is there in its place stays.
    """
    assert sum(len(p) for p in pieces) == len(parameter), "pieces do not fill the parameter"
    start = 0
    for piece in pieces:
        if not piece.is_meta:
            parameter.data[start : start + len(piece)].copy_(piece)
        start += len(piece)
