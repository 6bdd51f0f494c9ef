"""Linear: the one place where activations meet a weight matrix, whatever kernel multiplies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmrt.worker.device import Placement


class Linear(nn.Module):
    """y = x Wᵀ + b, with the rows of W (one per output) in one piece.

    T tokens, I inputs, O outputs.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, placement: Placement, *, bias: bool = False
    ) -> None:
        super().__init__()
        shape = {"device": placement.device, "dtype": placement.dtype}
        self.weight = nn.Parameter(
            torch.empty(num_outputs, num_inputs, **shape), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(num_outputs, **shape), requires_grad=False) if bias else None
        )

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Fill the matrix with these pieces, one under the other, and the bias likewise."""
        fill(self.weight, weights)
        if self.bias is not None:
            fill(self.bias, biases)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return y_TO."""
        return F.linear(x_TI, self.weight, self.bias)


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
