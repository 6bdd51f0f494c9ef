"""Attention in plain torch: right on every device.

Decodes of similar length share one call, over their contexts side by side; so do chunks of prompts
that have the same shape. What all of a call begin with, such as a system prompt, is read once. The
query heads of a KV head stand side by side as rows of queries, so that keys and values are not
repeated for them. On a CPU a long chunk is cut into blocks of queries, and keys that a whole block
cannot see are left out.

T tokens, Q query heads, K KV heads, G query heads of a KV head, N sequences, C tokens of a chunk,
E tokens of a block, R rows (G · C), S context, P tokens of a prefix that all share, D size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.attention.metadata import AttentionMetadata, DecodeGroup, PrefillGroup
from llmrt.worker.attention.scaled_dot_product import (
    attend,
    attend_after_prefix,
    has_fast_products,
)
from llmrt.worker.device import Placement
from llmrt.worker.layers.rotary import rotate_
from llmrt.worker.shard import HeadShard

QUERIES_PER_BLOCK = 128


class TorchAttention:
    """Scaled dot-product attention of one layer."""

    def __init__(
        self, heads: HeadShard, layer: int, window: int | None, placement: Placement
    ) -> None:
        self._layer = layer
        self._window = window
        self._num_heads = heads.num_heads
        self._num_kv_heads = heads.num_kv_heads
        self._groups = HeadGroups(heads, placement.device)
        self._by_products = has_fast_products(placement)

    def __call__(
        self, qkv_THD: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionMetadata
    ) -> Tensor:
        """Rotate, store keys and values, and attend."""
        rotate_(qkv_THD[:, : self._num_heads + self._num_kv_heads], *angles)
        attention.cache.write(self._layer, qkv_THD[:, self._num_heads :], attention.slot_mapping_T)
        plan = attention.plans[self._window]
        if not plan.prefills and len(plan.decodes) == 1:
            return self._decode(qkv_THD, plan.decodes[0], attention)
        q_TQD = qkv_THD[:, : self._num_heads]
        o_TQD = torch.empty_like(q_TQD, memory_format=torch.contiguous_format)
        for group in plan.decodes:
            o_TQD[group.rows_B] = self._decode(qkv_THD[group.rows_B], group, attention)
        for chunks in plan.prefills:
            self._prefill(qkv_THD[chunks.rows], chunks, attention, o_TQD[chunks.rows])
        return o_TQD

    def _decode(self, qkv_BHD: Tensor, group: DecodeGroup, attention: AttentionMetadata) -> Tensor:
        kv_BHD = qkv_BHD[:, self._num_heads :]
        keys_NKSD, values_NKSD = group.contexts.read(self._layer, kv_BHD)
        o_BKGD = self._attend(
            self._groups.pack(qkv_BHD[:, : self._num_heads]),
            self._prefix(group, attention),
            keys_NKSD,
            values_NKSD,
            group.mask_M1S,
        )
        return self._groups.unpack(o_BKGD)

    def _prefix(
        self, group: DecodeGroup | PrefillGroup, attention: AttentionMetadata
    ) -> Tensor | None:
        """Return prefix_2KPD, where the group shares one."""
        if group.prefix_places is None:
            return None
        return attention.cache.gather(self._layer, group.prefix_places, 1)[:, 0]

    def _attend(
        self,
        q_NKRD: Tensor,
        prefix_2KPD: Tensor | None,
        keys_NKSD: Tensor,
        values_NKSD: Tensor,
        mask: Tensor,
    ) -> Tensor:
        if prefix_2KPD is not None:
            return attend_after_prefix(q_NKRD, prefix_2KPD, keys_NKSD, values_NKSD, mask)
        return attend(q_NKRD, keys_NKSD, values_NKSD, mask, by_products=self._by_products)

    def _prefill(
        self, qkv_THD: Tensor, group: PrefillGroup, attention: AttentionMetadata, out_TQD: Tensor
    ) -> None:
        qkv_NCHD = qkv_THD.unflatten(0, (group.num_chunks, -1))
        q_NCQD = qkv_NCHD[:, :, : self._num_heads]
        if group.places is None:
            kv_NHCD = qkv_NCHD[:, :, self._num_heads :].transpose(1, 2)
            keys_NKSD, values_NKSD = kv_NHCD.split(self._num_kv_heads, dim=1)
        else:
            keys_NKSD, values_NKSD = attention.cache.gather(
                self._layer, group.places, group.num_chunks
            )
            keys_NKSD = keys_NKSD[:, :, : group.num_context]
            values_NKSD = values_NKSD[:, :, : group.num_context]
        out_NCQD = out_TQD.unflatten(0, (group.num_chunks, -1))
        if self._by_products:
            prefix_2KPD = self._prefix(group, attention)
            self._prefill_in_blocks(
                q_NCQD, prefix_2KPD, keys_NKSD, values_NKSD, group.mask_TS, out_NCQD
            )
        else:
            self._prefill_at_once(q_NCQD, keys_NKSD, values_NKSD, group.mask_TS, out_NCQD)

    def _prefill_at_once(
        self,
        q_NCQD: Tensor,
        keys_NKSD: Tensor,
        values_NKSD: Tensor,
        mask_CS: Tensor | None,
        out_NCQD: Tensor,
    ) -> None:
        o_NQCD = F.scaled_dot_product_attention(
            q_NCQD.transpose(1, 2),
            self._groups.repeat(keys_NKSD),
            self._groups.repeat(values_NKSD),
            attn_mask=mask_CS,
            is_causal=mask_CS is None,
        )
        out_NCQD.copy_(o_NQCD.transpose(1, 2))

    def _prefill_in_blocks(
        self,
        q_NCQD: Tensor,
        prefix_2KPD: Tensor | None,
        keys_NKSD: Tensor,
        values_NKSD: Tensor,
        mask_CS: Tensor | None,
        out_NCQD: Tensor,
    ) -> None:
        length = q_NCQD.shape[1]
        num_before = keys_NKSD.shape[2] - length
        # Copied once, so that no block has to: keys as columns, values as rows.
        keys_NKSD = keys_NKSD.contiguous()
        values_NKSD = values_NKSD.contiguous()
        for start in range(0, length, QUERIES_PER_BLOCK):
            end = min(start + QUERIES_PER_BLOCK, length)
            num_seen = num_before + end
            if mask_CS is None:
                mask_ES = _causal(end - start, num_seen, q_NCQD)
            else:
                mask_ES = mask_CS[start:end, :num_seen]
            out_NCQD[:, start:end] = self._attend_block(
                q_NCQD[:, start:end],
                prefix_2KPD,
                keys_NKSD[:, :, :num_seen],
                values_NKSD[:, :, :num_seen],
                mask_ES,
            )

    def _attend_block(
        self,
        q_NEQD: Tensor,
        prefix_2KPD: Tensor | None,
        keys_NKSD: Tensor,
        values_NKSD: Tensor,
        mask_ES: Tensor,
    ) -> Tensor:
        num_chunks, length = q_NEQD.shape[:2]
        q_NEKGD = self._groups.pack(q_NEQD.flatten(0, 1)).unflatten(0, (num_chunks, length))
        q_NKRD = q_NEKGD.permute(0, 2, 3, 1, 4).flatten(2, 3)
        # One row of the mask for each query head of a group.
        mask_RS = mask_ES.repeat(q_NEKGD.shape[3], 1)
        o_NKRD = self._attend(q_NKRD, prefix_2KPD, keys_NKSD, values_NKSD, mask_RS)
        o_NEKGD = o_NKRD.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4)
        return self._groups.unpack(o_NEKGD.flatten(0, 1)).unflatten(0, (num_chunks, length))


def _causal(num_queries: int, num_seen: int, like: Tensor) -> Tensor:
    """Return the mask of queries whose last one sees everything."""
    mask_ES = torch.full((num_queries, num_seen), float("-inf"), dtype=like.dtype)
    return mask_ES.triu_(num_seen - num_queries + 1)


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

    def repeat(self, x_NKSD: Tensor) -> Tensor:
        """Return x_NQSD: for each query head its KV head."""
        if len(self._kv_head_of_query_head) == self._num_kv_heads:
            return x_NKSD
        return x_NKSD.index_select(1, self._kv_head_of_query_head)
