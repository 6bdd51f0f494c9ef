"""The projections around attention, split by heads."""

from __future__ import annotations

from torch import Tensor, nn

from llmrt.model_config import ModelConfig
from llmrt.worker.device import Placement
from llmrt.worker.layers.linear import Linear
from llmrt.worker.layers.reading import read_checked, read_matrix
from llmrt.worker.shard import HeadShard, shard_heads
from llmrt.worker.tensor_parallel import TPGroup
from llmrt.worker.weights.reader import WeightReader


class QKVProjection(nn.Module):
    """q, k and v of this rank's heads, in one multiplication."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._model = model
        self.heads = shard_heads(model.num_heads, model.num_kv_heads, group.rank, group.size)
        num_outputs = (self.heads.num_heads + 2 * self.heads.num_kv_heads) * model.head_dim
        self.linear = Linear(model.hidden_size, num_outputs, placement, bias=model.qkv_bias)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's rows of `prefix.q_proj`, `.k_proj` and `.v_proj`."""
        parts = (
            (f"{prefix}.q_proj", self._model.num_heads, self.heads.query_heads),
            (f"{prefix}.k_proj", self._model.num_kv_heads, self.heads.kv_heads),
            (f"{prefix}.v_proj", self._model.num_kv_heads, self.heads.kv_heads),
        )
        weights, biases = [], []
        for name, num_heads, heads in parts:
            rows = _rows(heads, self._model.head_dim)
            shape = (num_heads * self._model.head_dim, self._model.hidden_size)
            weights.append(read_matrix(reader, f"{name}.weight", shape, rows))
            if self.linear.bias is not None:
                biases.append(read_checked(reader, f"{name}.bias", shape[:1], rows))
        self.linear.load(weights, biases)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return qkv_THD: the query heads, then the key heads, then the value heads."""
        return self.linear(x_TD).view(len(x_TD), -1, self._model.head_dim)


class OutputProjection(nn.Module):
    """Back to the hidden size: each rank multiplies its heads, the sum is over all ranks."""

    def __init__(
        self, model: ModelConfig, heads: HeadShard, group: TPGroup, placement: Placement
    ) -> None:
        super().__init__()
        self._group = group
        self._shape = (model.hidden_size, model.num_heads * model.head_dim)
        self._columns = _rows(heads.query_heads, model.head_dim)
        self._has_bias = model.o_bias
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

    def forward(self, o_TH: Tensor) -> Tensor:
        """Return y_TD, the same on every rank."""
        return self._group.all_reduce_(self.linear(o_TH))


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
