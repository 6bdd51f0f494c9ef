"""The gated MLP, split over its intermediate columns."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from llmrt.model_config import ModelConfig
from llmrt.worker import shard
from llmrt.worker.device import Placement
from llmrt.worker.layers.linear import Linear
from llmrt.worker.layers.reading import read_checked, read_matrix
from llmrt.worker.tensor_parallel import TPGroup
from llmrt.worker.weights.reader import WeightReader


class GateUpProjection(nn.Module):
    """This rank's columns of gate and up, in one multiplication."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._shape = (model.intermediate_size, model.hidden_size)
        self._columns = shard.shard_intermediate(model.intermediate_size, group.rank, group.size)
        width = len(self._columns)
        self.linear = Linear(model.hidden_size, 2 * width, placement, bias=model.mlp_bias)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's rows of `prefix.gate_proj` and `prefix.up_proj`."""
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        rows = self._columns
        weights = [read_matrix(reader, f"{n}.weight", self._shape, rows) for n in names]
        biases = []
        if self.linear.bias is not None:
            biases = [read_checked(reader, f"{n}.bias", self._shape[:1], rows) for n in names]
        self.linear.load(weights, biases)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return gate_up_TI: the columns of gate, then those of up."""
        return self.linear(x_TD)


class DownProjection(nn.Module):
    """Back to the hidden size: each rank multiplies its columns, the sum is over all ranks."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._group = group
        self._shape = (model.hidden_size, model.intermediate_size)
        self._columns = shard.shard_intermediate(model.intermediate_size, group.rank, group.size)
        self._has_bias = model.mlp_bias
        # One rank adds the bias; added by all, it would count world_size times in the sum.
        adds_bias = self._has_bias and group.rank == 0
        self.linear = Linear(len(self._columns), model.hidden_size, placement, bias=adds_bias)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's columns of `prefix.weight`, and the bias, which only rank 0 keeps."""
        weight = read_matrix(reader, f"{prefix}.weight", self._shape, columns=self._columns)
        biases = []
        if self._has_bias:
            biases = [read_checked(reader, f"{prefix}.bias", self._shape[:1])]
        self.linear.load([weight], biases)

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return y_TD, the same on every rank."""
        return self._group.all_reduce_(self.linear(x_TI))


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._activation = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_pytorch_tanh": _gelu_tanh,
            "relu": F.relu,
        }[model.hidden_act]
        self._kernels = placement.kernels if model.hidden_act == "silu" else None
        self.gate_up_proj = GateUpProjection(model, group, placement)
        self.down_proj = DownProjection(model, group, placement)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read both projections."""
        self.gate_up_proj.load(reader, prefix)
        self.down_proj.load(reader, f"{prefix}.down_proj")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y_TD, the same on every rank."""
        gate_up_TI = self.gate_up_proj(x_TD)
        if self._kernels is not None:
            return self.down_proj(self._kernels.silu_and_mul(gate_up_TI))
        gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
        return self.down_proj(self._activation(gate_TI).mul_(up_TI))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
