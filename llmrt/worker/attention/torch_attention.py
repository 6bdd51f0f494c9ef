"""Attention in plain torch: right on every device.

Decodes of similar length share one padded gather and one call; the query heads of a KV head stand
in the place of query positions, so keys and values are not repeated for them. A prefill chunk is
one call.

T tokens, Q query heads, K KV heads, G query heads of a KV head, B sequences, S context, D size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.attention.metadata import AttentionMetadata, DecodeGroup, PrefillChunk
from llmrt.worker.shard import HeadShard


class TorchAttention:
    """Scaled dot-product attention of one layer."""

    def __init__(
        self, heads: HeadShard, layer: int, window: int | None, device: torch.device
    ) -> None:
        self._layer = layer
        self._window = window
        self._num_heads = heads.num_heads
        self._num_kv_heads = heads.num_kv_heads
        self._groups = HeadGroups(heads, device)

    def __call__(self, qkv_THD: Tensor, attention: AttentionMetadata) -> Tensor:
        """Store keys and values, and attend."""
        attention.cache.write(self._layer, qkv_THD[:, self._num_heads :], attention.slot_mapping_T)
        q_TQD = qkv_THD[:, : self._num_heads]
        o_TQD = torch.empty_like(q_TQD, memory_format=torch.contiguous_format)
        plan = attention.plans[self._window]
        for group in plan.decodes:
            o_TQD[group.rows_B] = self._decode(q_TQD[group.rows_B], group, attention)
        for chunk in plan.prefills:
            o_TQD[chunk.rows] = self._prefill(qkv_THD[chunk.rows], chunk, attention)
        return o_TQD

    def _decode(self, q_BQD: Tensor, group: DecodeGroup, attention: AttentionMetadata) -> Tensor:
        batch = len(q_BQD)
        keys_KSD, values_KSD = attention.cache.gather(self._layer, group.block_ids_M)
        o_BKGD = F.scaled_dot_product_attention(
            self._groups.pack(q_BQD),
            keys_KSD.unflatten(1, (batch, -1)).transpose(0, 1),
            values_KSD.unflatten(1, (batch, -1)).transpose(0, 1),
            attn_mask=group.mask_B11S,
        )
        return self._groups.unpack(o_BKGD)

    def _prefill(
        self, qkv_THD: Tensor, chunk: PrefillChunk, attention: AttentionMetadata
    ) -> Tensor:
        q_QTD = qkv_THD[:, : self._num_heads].transpose(0, 1)
        if chunk.block_ids_M is None:
            kv = qkv_THD[:, self._num_heads :].transpose(0, 1)
            keys_KSD, values_KSD = kv.split(self._num_kv_heads)
        else:
            keys_KSD, values_KSD = attention.cache.gather(self._layer, chunk.block_ids_M)
            keys_KSD = keys_KSD[:, : chunk.num_context]
            values_KSD = values_KSD[:, : chunk.num_context]
        o_1QTD = F.scaled_dot_product_attention(
            q_QTD[None],
            self._groups.repeat(keys_KSD)[None],
            self._groups.repeat(values_KSD)[None],
            attn_mask=chunk.mask_TS,
            is_causal=chunk.mask_TS is None,
        )
        return o_1QTD[0].transpose(0, 1)


class HeadGroups:
    """Which query heads share a KV head. Groups of different sizes are padded to the largest."""

    def __init__(self, heads: HeadShard, device: torch.device) -> None:
        groups: list[list[int]] = [[] for _ in heads.kv_heads]
        for query_head, kv_head in enumerate(heads.kv_head_of_query_head):
            groups[kv_head].append(query_head)
        width = max(map(len, groups))
        self._num_kv_heads = len(groups)
        self._is_even = all(len(g) == width for g in groups)
        padded = [head for g in groups for head in g + g[-1:] * (width - len(g))]
        places = [k * width + i for k, g in enumerate(groups) for i in range(len(g))]
        self._padded_heads = torch.tensor(padded, device=device)
        self._places = torch.tensor(places, device=device)
        self._kv_head_of_query_head = torch.tensor(heads.kv_head_of_query_head, device=device)

    def pack(self, q_BQD: Tensor) -> Tensor:
        """Return q_BKGD."""
        if not self._is_even:
            q_BQD = q_BQD.index_select(1, self._padded_heads)
        return q_BQD.unflatten(1, (self._num_kv_heads, -1))

    def unpack(self, o_BKGD: Tensor) -> Tensor:
        """Return o_BQD."""
        o_BQD = o_BKGD.flatten(1, 2)
        return o_BQD if self._is_even else o_BQD.index_select(1, self._places)

    def repeat(self, x_KSD: Tensor) -> Tensor:
        """Return x_QSD: for each query head its KV head."""
        if len(self._kv_head_of_query_head) == self._num_kv_heads:
            return x_KSD
        return x_KSD.index_select(0, self._kv_head_of_query_head)
