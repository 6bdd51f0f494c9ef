"""Log-probabilities of the raw logits: what the model said, before penalties, masks, temperature.

R rows, V vocabulary, K most likely, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmrt.messages import PromptLogprobs, TokenLogprobs
from llmrt.worker.sampling.ordering import rank_of, top
from llmrt.worker.sequence import SequenceState

ROWS_AT_ONCE = 64
"""Bounds the memory that a long prompt's log-probabilities take beside its logits."""


def token_logprobs(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return of each row its *num_top* best tokens (-1: all), then its own if not among them."""
    vocab_size = logits_RV.shape[1]
    num_top = vocab_size if num_top == -1 else min(num_top, vocab_size)
    logprobs_RV = logits_RV.log_softmax(-1)
    own_R = torch.tensor(token_ids, device=logits_RV.device)
    own = zip(
        token_ids,
        logprobs_RV.gather(1, own_R[:, None])[:, 0].tolist(),
        rank_of(logits_RV, own_R).tolist(),
        strict=True,
    )
    top_ids_RK = top(logits_RV, num_top)[1] if num_top else own_R[:, None][:, :0]
    top_logprobs_RK = logprobs_RV.gather(1, top_ids_RK)
    rows = zip(own, top_ids_RK.tolist(), top_logprobs_RK.tolist(), strict=True)
    return [_join(*entry) for entry in rows]


def prompt_logprobs(logits_TV: torch.Tensor, sequence: SequenceState, start: int) -> PromptLogprobs:
    """Return the log-probabilities of the prompt tokens that these rows predict.

    Row t holds the logits *at* position start + t: they predict token start + t + 1. So the
    result begins with token start + 1, and rows that predict past the prompt are left out. The first
    token of a prompt has no log-probability.
    """
    first = start + 1
    token_ids = sequence.token_ids[first : min(first + len(logits_TV), sequence.num_prompt_tokens)]
    num_top = sequence.spec.params.prompt_logprobs or 0
    positions: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), ROWS_AT_ONCE):
        some_ids = token_ids[begin : begin + ROWS_AT_ONCE]
        some_logits_RV = logits_TV[begin : begin + len(some_ids)].float()
        positions += token_logprobs(some_logits_RV, some_ids, num_top)
    return PromptLogprobs(seq_id=sequence.spec.seq_id, start=first, positions=tuple(positions))


def _join(
    own: tuple[int, float, int], top_ids: list[int], top_logprobs: list[float]
) -> TokenLogprobs:
    token_id, logprob, rank = own
    ranks = tuple(range(1, len(top_ids) + 1))
    if rank <= len(top_ids):
        return TokenLogprobs(token_ids=tuple(top_ids), logprobs=tuple(top_logprobs), ranks=ranks)
    return TokenLogprobs(
        token_ids=(*top_ids, token_id), logprobs=(*top_logprobs, logprob), ranks=(*ranks, rank)
    )
