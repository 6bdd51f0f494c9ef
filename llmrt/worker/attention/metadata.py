"""What attention has to know of a step: built once, read by every layer.

A step runs T tokens. Those of sequences that run one token (decodes) come first, then the prefill
chunks one after the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from llmrt.worker.attention.contexts import ContextKeeper, Contexts, CopiedContexts, Decode
from llmrt.worker.attention.scaled_dot_product import has_fast_products
from llmrt.worker.attention.spans import Span, by_prefix, num_shared_blocks
from llmrt.worker.device import Placement
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.native.kernels import PagedSpans

_ROWS_TOGETHER = 512
"""Tokens of prompts that are attended to in one call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Decodes with contexts of similar length, padded to one number of blocks."""

    rows_B: Tensor
    prefix_places: Tensor | None
    """Where the blocks lie that all begin with; `contexts` then holds what follows them."""
    contexts: Contexts
    mask_M1S: Tensor
    """0 where a token is seen, -inf elsewhere; for each KV head of each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillGroup:
    """Chunks of prompts that have the same length and the same place in their sequences."""

    rows: slice
    """Their tokens, one chunk after the other."""
    num_chunks: int
    prefix_places: Tensor | None
    """Where the blocks lie that all begin with; `places` are then of those that follow."""
    places: Tensor | None
    """Where the blocks of their contexts lie. None where a chunk sees only itself: its keys need
    not be read back."""
    num_context: int
    """Tokens in the blocks of one chunk, up to its end."""
    mask_TS: Tensor | None
    """None for plain causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """The work of one layer."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedStep:
    """The work of every layer, over the cache as it lies."""

    decodes: PagedSpans | None
    chunks: PagedSpans | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """All that a model needs of a step beside ids and positions."""

    cache: KVCache
    slot_mapping_T: Tensor
    """Where each token's key and value are stored."""
    plans: Mapping[int | None, AttentionPlan]
    """By sliding window; None is full attention. Empty where `paged` is used instead."""
    paged: PagedStep | None = None
    """The step as compiled kernels take it."""
    lengths_T: Tensor | None = None
    """For RoPE that depends on it: the larger of prompt length and position + 1."""


def build_plan(
    spans: Sequence[Span],
    window: int | None,
    cache: KVCache,
    keeper: ContextKeeper | None,
    placement: Placement,
) -> AttentionPlan:
    """Return the work of the layers with this window.

    Args:
        spans: what each sequence runs.
        window: how many tokens back a token sees; None for all.
        cache: where keys and values lie.
        keeper: keeps contexts from one step to the next; None copies them in each.
        placement: where tensors are made.
    """
    shares = window is None and has_fast_products(placement)
    decodes = [s for s in spans if s.num_tokens == 1]
    families = by_prefix(decodes, cache.block_size) if shares else [(0, decodes)]
    prefills = _alike([s for s in spans if s.num_tokens > 1])
    return AttentionPlan(
        decodes=tuple(
            _decode_group(group, num_shared, window, cache, keeper, placement)
            for num_shared, family in families
            for group in _similar(family, num_shared, window, cache.block_size)
        ),
        prefills=tuple(
            _prefill_group(
                group,
                num_shared_blocks(group, cache.block_size) if shares else 0,
                window,
                cache,
                placement,
            )
            for group in prefills
        ),
    )


def build_paged_step(spans: Sequence[Span]) -> PagedStep:
    """Return the work of every layer for compiled kernels.

    Args:
        spans: what each sequence runs, decodes first.
    """
    return PagedStep(
        decodes=_paged([s for s in spans if s.num_tokens == 1]),
        chunks=_paged([s for s in spans if s.num_tokens > 1]),
    )


def _paged(spans: Sequence[Span]) -> PagedSpans | None:
    if not spans:
        return None
    width = max(len(s.block_ids) for s in spans)
    flat = array("i")
    for span in spans:
        flat.extend(span.block_ids)
        flat.extend((0,) * (width - len(span.block_ids)))
    ends = [s.end for s in spans]
    return PagedSpans(
        tables_NM=torch.frombuffer(flat, dtype=torch.int32).view(len(spans), width),
        rows_N=torch.tensor([s.row for s in spans]),
        starts_N=torch.tensor([s.start for s in spans]),
        lengths_N=torch.tensor([s.num_tokens for s in spans]),
        ends_N=torch.tensor(ends),
        longest=max(ends),
    )


def _similar(
    spans: Sequence[Span], num_shared: int, window: int | None, block_size: int
) -> Iterable[Sequence[Span]]:
    """Return together those whose contexts have a similar length behind what they share."""
    buckets: dict[int, list[Span]] = {}
    for span in spans:
        num_blocks = len(_visible_blocks(span, window, block_size)) - num_shared
        buckets.setdefault(_bucket(num_blocks), []).append(span)
    return buckets.values()


def _alike(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Yield neighbours of one shape together, of long ones only so many that caches hold them."""
    for (_, num_tokens), group in groupby(spans, key=lambda s: (s.start, s.num_tokens)):
        rest = list(group)
        most = max(1, _ROWS_TOGETHER // num_tokens)
        while rest:
            yield rest[:most]
            rest = rest[most:]


def _bucket(num_blocks: int) -> int:
    """Return the size class of a context: padding to its longest at most doubles the copy."""
    return max(3, (num_blocks - 1).bit_length())


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _visible_blocks(span: Span, window: int | None, block_size: int) -> Sequence[int]:
    """Return the blocks that hold what the span's tokens see, themselves included."""
    first = _first_visible(span.start, window) // block_size
    return span.block_ids[first : (span.end - 1) // block_size + 1]


def _decode_group(
    spans: Sequence[Span],
    num_shared: int,
    window: int | None,
    cache: KVCache,
    keeper: ContextKeeper | None,
    placement: Placement,
) -> DecodeGroup:
    block_size = cache.block_size
    if keeper is None or window is not None:
        tables = [_visible_blocks(s, window, block_size)[num_shared:] for s in spans]
        contexts = CopiedContexts(cache, tables)
    else:
        contexts = keeper.contexts([Decode(s.start, s.block_ids, num_shared) for s in spans])
    firsts = [_first_visible(s.start, window) for s in spans]
    offsets = [(first // block_size + num_shared) * block_size for first in firsts]
    seen_from_B = torch.tensor([f - o for f, o in zip(firsts, offsets, strict=True)])
    seen_to_B = torch.tensor([s.start - o for s, o in zip(spans, offsets, strict=True)])
    token_S = torch.arange(contexts.num_blocks * block_size)
    is_seen_BS = (token_S >= seen_from_B[:, None]) & (token_S <= seen_to_B[:, None])
    return DecodeGroup(
        rows_B=torch.tensor([s.row for s in spans], device=placement.device),
        prefix_places=_prefix_places(spans, num_shared, cache),
        contexts=contexts,
        mask_M1S=_additive(is_seen_BS, placement).repeat_interleave(cache.num_kv_heads, 0)[:, None],
    )


def _prefill_group(
    spans: Sequence[Span],
    num_shared: int,
    window: int | None,
    cache: KVCache,
    placement: Placement,
) -> PrefillGroup:
    block_size = cache.block_size
    first = spans[0]
    places = None
    base = 0
    if first.start > 0:
        base = (_first_visible(first.start, window) // block_size + num_shared) * block_size
        places = cache.places([_visible_blocks(s, window, block_size)[num_shared:] for s in spans])
    is_plain = first.start == 0 and (window is None or window >= first.num_tokens)
    return PrefillGroup(
        rows=slice(first.row, spans[-1].row + first.num_tokens),
        num_chunks=len(spans),
        prefix_places=_prefix_places(spans, num_shared, cache),
        places=places,
        num_context=first.end - base,
        mask_TS=None if is_plain else _additive(_is_seen_TS(first, base, window), placement),
    )


def _prefix_places(spans: Sequence[Span], num_shared: int, cache: KVCache) -> Tensor | None:
    return cache.places([spans[0].block_ids[:num_shared]]) if num_shared else None


def _is_seen_TS(span: Span, base: int, window: int | None) -> Tensor:
    query_T1 = torch.arange(span.start, span.end)[:, None]
    key_S = torch.arange(base, span.end)
    is_seen_TS = key_S <= query_T1
    return is_seen_TS if window is None else is_seen_TS & (key_S > query_T1 - window)


def _additive(is_seen: Tensor, placement: Placement) -> Tensor:
    mask = torch.zeros(is_seen.shape, dtype=placement.dtype)
    return mask.masked_fill_(~is_seen, float("-inf")).to(placement.device)
