"""Which attention a layer gets."""

from __future__ import annotations

from llmrt.worker.attention.native_attention import NativeAttention
from llmrt.worker.attention.protocol import Attention
from llmrt.worker.attention.torch_attention import TorchAttention
from llmrt.worker.device import Placement
from llmrt.worker.native.kernels import NativeKernels, can_attend
from llmrt.worker.shard import HeadShard


def attention_kernels(
    heads: HeadShard, head_dim: int, placement: Placement
) -> NativeKernels | None:
    """Return the kernels that attend, for which a step is then prepared; None for torch."""
    return placement.kernels if can_attend(heads, head_dim) else None


def attention_of_layer(
    heads: HeadShard, head_dim: int, layer: int, window: int | None, placement: Placement
) -> Attention:
    """Return the attention of one layer."""
    kernels = attention_kernels(heads, head_dim, placement)
    if kernels is None:
        return TorchAttention(heads, layer, window, placement)
    return NativeAttention(heads, layer, window, kernels)
