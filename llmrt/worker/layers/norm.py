"""RMSNorm: the same on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmrt.worker.device import Placement
from llmrt.worker.layers.linear import fill
from llmrt.worker.layers.reading import read_checked
from llmrt.worker.weights.reader import WeightReader


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension; computed in float32.

    The weight is a vector: float32 costs nothing, and saves a conversion in each call.
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self._eps = eps
        self._eps_scalar = torch.tensor(eps)
        self._dtype = placement.dtype
        self._has_fused_kernel = placement.device.type == "cuda"
        self._kernels = placement.kernels
        self.weight = nn.Parameter(
            torch.empty(size, device=placement.device, dtype=torch.float32), requires_grad=False
        )

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read `prefix.weight`."""
        fill(self.weight, [read_checked(reader, f"{prefix}.weight", tuple(self.weight.shape))])

    def add_and_normalize(self, x_TD: Tensor, y_TD: Tensor | None) -> Tensor:
        """Add *y_TD*, if there is one, to *x_TD* in place; return that normalised.

        Args:
            x_TD: the residual stream, in float32.
            y_TD: what a layer adds to it.
        """
        if self._kernels is not None:
            return self._kernels.add_rms_norm(x_TD, y_TD, self.weight, self._eps)
        if y_TD is not None:
            x_TD += y_TD
        return self(x_TD)

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*, in float32 or the model's dtype, normalised, in the model's dtype."""
        x = x.float()
        if self._has_fused_kernel:
            y = F.rms_norm(x, self.weight.shape, self.weight, self._eps)
        else:
            y = self._by_vector_norm(x)
        return y.to(self._dtype)

    def _by_vector_norm(self, x: Tensor) -> Tensor:
        """Do it in two passes over *x*: F.rms_norm is six operations on a CPU, and slower."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = torch.addcmul(self._eps_scalar, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * factor).mul_(self.weight)
