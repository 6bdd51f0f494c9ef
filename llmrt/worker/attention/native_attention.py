"""Attention by compiled kernels, which read the paged cache where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from llmrt.worker.attention.metadata import AttentionMetadata
from llmrt.worker.native.kernels import HeadLayout, NativeKernels
from llmrt.worker.shard import HeadShard


class NativeAttention:
    """Scaled dot-product attention of one layer. T tokens, Q query heads, D size of a head."""

    def __init__(
        self, heads: HeadShard, layer: int, window: int | None, kernels: NativeKernels
    ) -> None:
        self._layout = HeadLayout(heads)
        self._layer = layer
        self._window = window
        self._kernels = kernels

    def __call__(
        self, qkv_THD: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionMetadata
    ) -> Tensor:
        """Rotate, store keys and values, and attend."""
        assert attention.paged is not None, "the step was prepared for other attention"
        num_tokens, _, head_dim = qkv_THD.shape
        heads_HNBD = attention.cache.heads(self._layer)
        self._kernels.rotate_and_store(
            qkv_THD, angles, heads_HNBD, attention.slot_mapping_T, self._layout.num_kv_heads
        )
        out_TQD = torch.empty(num_tokens, self._layout.num_heads, head_dim, dtype=qkv_THD.dtype)
        decodes, chunks = attention.paged.decodes, attention.paged.chunks
        if decodes is not None:
            self._kernels.attend_decodes(
                qkv_THD, heads_HNBD, decodes, self._layout, self._window, out_TQD
            )
        if chunks is not None:
            self._kernels.attend_chunks(
                qkv_THD, heads_HNBD, chunks, self._layout, self._window, out_TQD
            )
        return out_TQD
