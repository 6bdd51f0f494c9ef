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
        self._dtype = placement.dtype
        self.weight = nn.Parameter(
            torch.empty(size, device=placement.device, dtype=torch.float32), requires_grad=False
        )

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read `prefix.weight`."""
        fill(self.weight, [read_checked(reader, f"{prefix}.weight", tuple(self.weight.shape))])

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*, in float32 or the model's dtype, normalised, in the model's dtype."""
        y = F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)
        return y.to(self._dtype)
