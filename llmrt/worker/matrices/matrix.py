"""Matrix: what Linear needs of a weight matrix, and the two forms that keep every bit of it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.native.kernels import NativeKernels
from llmrt.worker.native.packing import pack, unpack


class Matrix(Protocol):
    """A weight matrix in the form that its kernel reads."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes beside the module's own parameters."""
        ...

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO = x Wᵀ + b."""
        ...

    def dense(self) -> Tensor:
        """Return the matrix as weight_OI; it may be the matrix's own memory."""
        ...


class PlainMatrix:
    """The matrix as the checkpoint stores it; runs everywhere."""

    num_bytes = 0

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        return F.linear(x_TI, self._weight_OI, bias_O)

    def dense(self) -> Tensor:
        """Return weight_OI."""
        return self._weight_OI


class PackedMatrix:
    """The matrix reordered for oneDNN's kernels: twice as fast for a few rows of bfloat16."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.num_bytes = weight_OI.numel() * weight_OI.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 1)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        return self._multiply(x_TI, self._packed, bias_O, "none", [], "")

    def dense(self) -> Tensor:
        """Return weight_OI, in its first order."""
        return self._packed.to_dense()


class NativeMatrix:
    """The matrix packed for our own kernel: up to twice as fast as oneDNN for a few rows.

    Results are in bfloat16, or in float32 where they are not to be rounded.
    """

    def __init__(
        self, weight_OI: Tensor, kernels: NativeKernels, out_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._out_dtype = out_dtype
        self._num_outputs = len(weight_OI)
        self._packed = pack(weight_OI.detach())
        self.num_bytes = self._packed.nbytes
        self._multiply = kernels.multiply_packed

    def multiply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return y_TO."""
        return self._multiply(
            x_TI.contiguous(), self._packed, bias_O, self._num_outputs, self._out_dtype
        )

    def dense(self) -> Tensor:
        """Return weight_OI, in its first order."""
        return unpack(self._packed, self._num_outputs)
