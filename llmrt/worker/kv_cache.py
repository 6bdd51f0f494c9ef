"""KVCache: the tensors behind the block numbers of the scheduler.

K KV heads of this rank, N blocks, B block size, D size of a head. Each layer has one tensor
kv_2KNBD, the K key heads first, then the K value heads:

    head 0      block 0: token 0 … 15 │ block 1: … │ …
    head 1      block 0              │ …

A block of one head is contiguous, so a context is gathered in few long copies, and comes out as
(sequence, head, token, D), which is what attention multiplies with.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from llmrt.worker.device import Placement


class KVCache:
    """Keys and values of all layers of one rank."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        placement: Placement,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        shape = (num_layers, 2 * num_kv_heads, num_blocks, block_size, head_dim)
        self._layers = tuple(_zeros(shape, placement))

    def heads(self, layer: int) -> Tensor:
        """Return kv_HNBD of a layer: its key heads, then its value heads."""
        return self._layers[layer]

    def write(self, layer: int, kv_THD: Tensor, slots_T: Tensor) -> None:
        """Store the key heads, then value heads, of these tokens.

        Args:
            layer: number of the layer.
            kv_THD: 2 K heads of each token.
            slots_T: for each token block number x block size + place in the block.
        """
        self._layers[layer].flatten(1, 2).index_copy_(1, slots_T, kv_THD.transpose(0, 1))

    def places(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Return where the blocks of some sequences lie, for `gather`: the same in every layer.

        Args:
            tables: the block table of each sequence; all of one length.
        """
        table_N1M = torch.tensor(tables, device=self._layers[0].device)[:, None]
        head_21K1 = torch.arange(2 * self.num_kv_heads, device=table_N1M.device)
        head_21K1 = head_21K1.view(2, 1, self.num_kv_heads, 1)
        return (head_21K1 * self.num_blocks + table_N1M).flatten()

    def gather(self, layer: int, places: Tensor, num_sequences: int) -> Tensor:
        """Return kv_2NKSD of these sequences, keys before values, in one piece."""
        blocks = self._layers[layer].flatten(0, 1).index_select(0, places)
        return blocks.view(2, num_sequences, self.num_kv_heads, -1, blocks.shape[-1])


def _zeros(shape: tuple[int, ...], placement: Placement) -> Tensor:
    """Return zeros: what was never written is multiplied by weight 0, which NaN would survive.

    On a CPU they are anonymous pages: the kernel hands them out when first touched, and takes
    them back at once when the tensor is gone.
    """
    if placement.device.type != "cpu":
        return torch.zeros(shape, dtype=placement.dtype, device=placement.device)
    num_bytes = math.prod(shape) * placement.dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=placement.dtype).view(shape)
