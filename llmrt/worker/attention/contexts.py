"""Contexts of decodes side by side, as attention multiplies with them.

In the cache a context lies in blocks; N of them in one tensor are a copy. Decodes that ran in the
step before, and only they, keep theirs: a step then adds one token to each instead of copying all,
which took up to a tenth of it.

N sequences, K KV heads, S context, D size of a head, H = 2 K: the key heads, then the value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmrt.worker.kv_cache import KVCache

_SHARE_TO_SPARE = 8
"""A kept copy has room for this part more, and a block, before it is made anew. All of it is
multiplied: oneDNN would first copy a part that is cut out."""
_SHARE_OF_CACHE = 8
"""Kept copies hold at most this part of the cache's blocks, beside the cache."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A sequence that runs one token."""

    position: int
    block_ids: Sequence[int]
    """Its block table: the same object as long as the sequence runs."""
    num_shared_blocks: int = 0
    """The first blocks, which are read elsewhere."""

    @property
    def own_block_ids(self) -> Sequence[int]:
        """Return the blocks of its context here."""
        return (
            self.block_ids[self.num_shared_blocks :] if self.num_shared_blocks else self.block_ids
        )


class Contexts(Protocol):
    """Contexts of one group of decodes."""

    num_blocks: int
    """Of each context, with what stands behind shorter ones and is not to be looked at."""

    def read(self, layer: int, kv_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys_NKSD and values_NKSD of a layer.

        Args:
            layer: number of the layer.
            kv_NHD: this step's, which is in the cache already.
        """
        ...


class CopiedContexts:
    """Copied out of the cache for this step."""

    def __init__(self, cache: KVCache, tables: Sequence[Sequence[int]]) -> None:
        self.num_blocks = max(map(len, tables))
        self._cache = cache
        self._places = cache.places(_padded(tables, self.num_blocks))
        self._num_sequences = len(tables)

    def read(self, layer: int, kv_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys_NKSD and values_NKSD."""
        keys_NKSD, values_NKSD = self._cache.gather(layer, self._places, self._num_sequences)
        return keys_NKSD, values_NKSD


class KeptContexts:
    """Copied when the group came together; from then on each step adds its tokens."""

    def __init__(self, cache: KVCache, decodes: Sequence[Decode], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._decodes = list(decodes)
        self._places = cache.places(_padded([d.own_block_ids for d in decodes], num_blocks))
        self._layers: dict[int, Tensor] = {}
        self._rows: Tensor | None = None  # of the tokens to add; None where all is copied anew

    @property
    def num_blocks_of_all(self) -> int:
        """How many blocks the copy holds."""
        return self.num_blocks * len(self._decodes)

    def goes_on_with(self, decodes: Sequence[Decode]) -> bool:
        """Return whether *decodes* are the same sequences, one token further, and there is room."""
        return len(decodes) == len(self._decodes) and all(
            new.block_ids is old.block_ids
            and new.num_shared_blocks == old.num_shared_blocks
            and new.position == old.position + 1
            and new.position < self._num_tokens_to(new)
            for new, old in zip(decodes, self._decodes, strict=True)
        )

    def advance(self, decodes: Sequence[Decode]) -> None:
        """Go on with the next step."""
        self._decodes = list(decodes)
        block_size = self._cache.block_size
        self._rows = self._rows_of([d.position - d.num_shared_blocks * block_size for d in decodes])

    def _num_tokens_to(self, decode: Decode) -> int:
        """Return the position in the sequence at which there is no more room."""
        return (decode.num_shared_blocks + self.num_blocks) * self._cache.block_size

    def _rows_of(self, places: Sequence[int]) -> Tensor:
        """Return where tokens at these places of their contexts go in a layer's copy.

        In the order kind, sequence, head.
        """
        device = self._places.device
        num_heads = self._cache.num_kv_heads
        context_2NK = torch.arange(2 * len(places) * num_heads, device=device)
        context_2NK = context_2NK.view(2, len(places), num_heads)
        place_N1 = torch.tensor(places, device=device)[:, None]
        num_tokens = self.num_blocks * self._cache.block_size
        return (context_2NK * num_tokens + place_N1).flatten()

    def read(self, layer: int, kv_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys_NKSD and values_NKSD."""
        if self._rows is None:
            self._layers[layer] = self._cache.gather(layer, self._places, len(self._decodes))
        else:
            new_2NKD = kv_NHD.unflatten(1, (2, -1)).transpose(0, 1)
            rows_RD = self._layers[layer].view(-1, kv_NHD.shape[-1])
            rows_RD.index_copy_(0, self._rows, new_2NKD.reshape(-1, kv_NHD.shape[-1]))
        keys_NKSD, values_NKSD = self._layers[layer]
        return keys_NKSD, values_NKSD


class ContextKeeper:
    """Finds the copies that the last step left, and makes those that it did not."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._most_blocks = cache.num_blocks // _SHARE_OF_CACHE
        self._last: list[KeptContexts] = []
        self._current: list[KeptContexts] = []

    def contexts(self, decodes: Sequence[Decode]) -> Contexts:
        """Return the contexts of these sequences."""
        kept = next((k for k in self._last if k.goes_on_with(decodes)), None)
        if kept is not None:
            self._last.remove(kept)
            kept.advance(decodes)
        else:
            tables = [d.own_block_ids for d in decodes]
            longest = max(map(len, tables))
            num_blocks = longest + longest // _SHARE_TO_SPARE + 1
            num_kept = sum(k.num_blocks_of_all for k in self._current)
            if num_kept + num_blocks * len(decodes) > self._most_blocks:
                return CopiedContexts(self._cache, tables)
            kept = KeptContexts(self._cache, decodes, num_blocks)
        self._current.append(kept)
        return kept

    def forget_unused(self) -> None:
        """Let go of the copies that this step, now planned, did not ask for."""
        self._last, self._current = self._current, []


def _padded(tables: Sequence[Sequence[int]], num_blocks: int) -> list[list[int]]:
    """Return *tables* with the last block repeated: it is in the processor's cache already."""
    return [[*table, *[table[-1]] * (num_blocks - len(table))] for table in tables]
