"""The repetition, frequency and presence penalties, by vLLM's definitions.

Repetition looks at prompt and output, the other two at the output only. Only the cells of tokens
that have occurred are touched.

R rows, V vocabulary, N cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from llmrt.sampling import SamplingParams
from llmrt.worker.sampling.cells import cells
from llmrt.worker.sequence import SequenceState


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output."""

    def __init__(self, sequence: SequenceState, vocab_size: int) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("f")
        counts_prompt = sequence.spec.params.repetition_penalty != 1.0
        self._num_counted = 0 if counts_prompt else sequence.num_prompt_tokens

    def catch_up(self) -> None:
        """Count the tokens that have come since the last call."""
        token_ids = self._sequence.token_ids
        num_prompt_tokens = self._sequence.num_prompt_tokens
        for position in range(self._num_counted, len(token_ids)):
            if token_ids[position] < self._vocab_size:
                self._count(token_ids[position], position >= num_prompt_tokens)
        self._num_counted = len(token_ids)

    @property
    def num_ids(self) -> int:
        """How many distinct tokens there are."""
        return len(self._ids)

    @property
    def ids_N(self) -> torch.Tensor:
        """The distinct tokens."""
        return _as_tensor(self._ids, torch.int64)

    @property
    def counts_N(self) -> torch.Tensor:
        """How often each of `ids_N` is in the output."""
        return _as_tensor(self._counts, torch.float32)

    def _count(self, token_id: int, is_output: bool) -> None:
        slot = self._slots.setdefault(token_id, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[slot] += is_output


def has_penalties(params: SamplingParams) -> bool:
    """Return whether any of the three is switched on."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def penalise(
    logits_RV: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, TokenCounts]]
) -> None:
    """Apply in place the penalties of these rows."""
    if not rows:
        return
    for _, _, counts in rows:
        counts.catch_up()
    row_N, id_N = cells([(row, counts.ids_N) for row, _, counts in rows], logits_RV.device)
    count_N = torch.cat([counts.counts_N for _, _, counts in rows]).to(logits_RV.device)
    repetition_N, frequency_N, presence_N = _strengths(rows).to(logits_RV.device)
    logit_N = logits_RV[row_N, id_N]
    logit_N = torch.where(logit_N > 0, logit_N / repetition_N, logit_N * repetition_N)
    logit_N -= frequency_N * count_N
    logit_N -= presence_N * (count_N > 0)
    logits_RV[row_N, id_N] = logit_N


def _strengths(rows: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> torch.Tensor:
    """Return the three penalties of each cell, one below the other."""
    by_row_R3 = torch.tensor(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for _, p, _ in rows]
    )
    num_cells = torch.tensor([counts.num_ids for _, _, counts in rows])
    return by_row_R3.repeat_interleave(num_cells, dim=0).T


def _as_tensor(values: array[int] | array[float], dtype: torch.dtype) -> torch.Tensor:
    # An array cannot grow while a tensor shares its memory, so callers hand the tensor on at once.
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
