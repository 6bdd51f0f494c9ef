"""From a Batch to tensors: which tokens run, at which positions, against which blocks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmrt.messages import ScheduledSequence
from llmrt.model_config import ModelConfig
from llmrt.worker.attention.choice import attention_kernels
from llmrt.worker.attention.contexts import ContextKeeper
from llmrt.worker.attention.metadata import (
    AttentionMetadata,
    AttentionPlan,
    build_paged_step,
    build_plan,
)
from llmrt.worker.attention.spans import Span
from llmrt.worker.device import Placement
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.sequence import SequenceState
from llmrt.worker.shard import HeadShard


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Rows of a step whose logits score prompt tokens."""

    sequence: SequenceState
    rows: range
    start: int
    """Position of the first row's token; its logits score the token after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step, as tensors on the model's device."""

    input_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionMetadata
    sampling: tuple[SequenceState, ...]
    """Sequences whose next token is sampled."""
    sampling_rows_R: Tensor
    """The last row of each of them."""
    prompt_rows: tuple[PromptRows, ...]

    @property
    def used_rows_U(self) -> Tensor | None:
        """The rows that are used after the last layer; None for all.

        Those that are sampled, where no other is scored; and the first of a step that samples none.
        """
        if self.prompt_rows or len(self.sampling_rows_R) == len(self.input_ids_T):
            return None
        return self.sampling_rows_R if self.sampling else torch.zeros_like(self.input_ids_T[:1])


class InputBuilder:
    """Builds the tensors of a step."""

    def __init__(
        self, model: ModelConfig, heads: HeadShard, cache: KVCache, placement: Placement
    ) -> None:
        self._cache = cache
        self._placement = placement
        self._is_paged = attention_kernels(heads, model.head_dim, placement) is not None
        # Beside the cache: on a GPU that fills all memory.
        self._keeper = ContextKeeper(cache) if placement.device.type == "cpu" else None
        self._windows = frozenset(model.windows) or frozenset({None})
        self._needs_lengths = model.rope.depends_on_prompt_length

    def build(
        self, scheduled: Sequence[ScheduledSequence], sequences: Mapping[int, SequenceState]
    ) -> StepInputs:
        """Return the inputs of a step; decodes come first."""
        ordered = sorted(scheduled, key=lambda s: s.num_tokens > 1)
        states = [sequences[s.seq_id] for s in ordered]
        spans = _spans(ordered, states)
        positions = [p for span in spans for p in range(span.start, span.end)]
        return StepInputs(
            input_ids_T=self._tensor(
                [
                    token_id
                    for span, state in zip(spans, states, strict=True)
                    for token_id in state.token_ids[span.start : span.end]
                ]
            ),
            positions_T=self._tensor(positions),
            attention=self._attention(spans, states),
            sampling=tuple(state for s, state in zip(ordered, states, strict=True) if s.samples),
            sampling_rows_R=self._tensor(
                [
                    span.row + span.num_tokens - 1
                    for s, span in zip(ordered, spans, strict=True)
                    if s.samples
                ]
            ),
            prompt_rows=_prompt_rows(spans, states),
        )

    def _attention(
        self, spans: Sequence[Span], states: Sequence[SequenceState]
    ) -> AttentionMetadata:
        block_size = self._cache.block_size
        slots = [slot for span in spans for slot in _slots(span, block_size)]
        lengths = None
        if self._needs_lengths:
            lengths = self._tensor(
                [
                    max(state.num_prompt_tokens, position + 1)
                    for span, state in zip(spans, states, strict=True)
                    for position in range(span.start, span.end)
                ]
            )
        return AttentionMetadata(
            cache=self._cache,
            slot_mapping_T=self._tensor(slots),
            plans={} if self._is_paged else self._plans(spans),
            paged=build_paged_step(spans) if self._is_paged else None,
            lengths_T=lengths,
        )

    def _plans(self, spans: Sequence[Span]) -> Mapping[int | None, AttentionPlan]:
        plans = {
            window: build_plan(spans, window, self._cache, self._keeper, self._placement)
            for window in self._windows
        }
        if self._keeper is not None:
            self._keeper.forget_unused()
        return plans

    def _tensor(self, values: list[int]) -> Tensor:
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self._placement.device)
        # Seven times as fast as torch.tensor for a long list.
        return torch.frombuffer(array("q", values), dtype=torch.int64).to(self._placement.device)


def _spans(ordered: Sequence[ScheduledSequence], states: Sequence[SequenceState]) -> list[Span]:
    spans = []
    row = 0
    for scheduled, state in zip(ordered, states, strict=True):
        spans.append(
            Span(
                row=row,
                start=scheduled.start,
                num_tokens=scheduled.num_tokens,
                block_ids=state.block_ids,
            )
        )
        row += scheduled.num_tokens
    return spans


def _slots(span: Span, block_size: int) -> list[int]:
    return [
        span.block_ids[p // block_size] * block_size + p % block_size
        for p in range(span.start, span.end)
    ]


def _prompt_rows(spans: Sequence[Span], states: Sequence[SequenceState]) -> tuple[PromptRows, ...]:
    """Return the rows that predict prompt tokens, of the sequences that asked for them."""
    found = []
    for span, state in zip(spans, states, strict=True):
        start = max(span.start, state.spec.scores_from - 1)
        num_rows = min(span.end, state.num_prompt_tokens - 1) - start
        if state.spec.params.prompt_logprobs is not None and num_rows > 0:
            first_row = span.row + start - span.start
            rows = range(first_row, first_row + num_rows)
            found.append(PromptRows(sequence=state, rows=rows, start=start))
    return tuple(found)
