"""Sampler: chooses the tokens of one step, on rank 0; `llmrt.worker.sampling` says how.

R rows (sequences), V vocabulary, T tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llmrt.errors import RankFailure
from llmrt.messages import (
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    TokenLogprobs,
    new_sampled_token,
)
from llmrt.worker.sampling.choice import NO_TOKEN, choose_tokens
from llmrt.worker.sampling.edits import edit_logits
from llmrt.worker.sampling.grammars import Grammars, GrammarState
from llmrt.worker.sampling.logprobs import prompt_logprobs, token_logprobs
from llmrt.worker.sampling.plan import SamplingPlan
from llmrt.worker.sequence import SequenceState


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What one step sampled."""

    token_ids: list[int]
    """One for every sequence, in their order; 0 for one that failed and runs no further."""
    tokens: tuple[SampledToken, ...]
    """The same for the driver, without those that failed."""
    failures: tuple[SequenceFailure, ...]


class Sampler:
    """Keeps only what follows from a SequenceState; one that comes back anew starts afresh."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._begun: dict[int, GrammarState] = {}
        self._plans: dict[int, SamplingPlan] = {}

    def begin(self, sequence: SequenceState) -> None:
        """Prepare, while its prompt runs, what sampling a new sequence will need."""
        if sequence.spec.grammar:
            assert self._grammars is not None, "a grammar came to a sampler without tokenizer"
            self._begun[sequence.spec.seq_id] = self._grammars.begin(sequence)

    def sample(self, logits_RV: torch.Tensor, sequences: Sequence[SequenceState]) -> Sampled:
        """Choose the next token of each sequence.

        Args:
            logits_RV: of the last token of each sequence; left as they are.
            sequences: in the order of the rows, without the token to come.
        """
        if not sequences:
            return Sampled(token_ids=[], tokens=(), failures=())
        logits_RV = logits_RV.float()
        plans = [self._plan_for(sequence, logits_RV.shape[1]) for sequence in sequences]
        chosen, failures = _choose(logits_RV, sequences, plans)
        for row, (plan, token_id) in enumerate(zip(plans, chosen, strict=True)):
            if plan.grammar is not None and row not in failures:
                plan.grammar.advance(token_id)
        logprobs = _logprobs(logits_RV, chosen, plans)
        return Sampled(
            token_ids=chosen,
            tokens=tuple(
                _sampled(sequence, token_id, logprobs.get(row))
                for row, (sequence, token_id) in enumerate(zip(sequences, chosen, strict=True))
                if row not in failures
            ),
            failures=tuple(failure for _, failure in sorted(failures.items())),
        )

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, sequence: SequenceState, start: int
    ) -> PromptLogprobs:
        """Return the log-probabilities of prompt tokens, from the logits of [start, start + T).

        Row t predicts the token at start + t + 1: the result begins with token start + 1, and
        ends with the prompt.
        """
        return prompt_logprobs(logits_TV, sequence, start)

    def forget(self, seq_id: int) -> None:
        """Let go of what was kept for a sequence, if anything."""
        self._plans.pop(seq_id, None)
        self._begun.pop(seq_id, None)

    def close(self) -> None:
        """End the thread that follows grammars, if there is one."""
        if self._grammars is not None:
            self._grammars.close()

    def _plan_for(self, sequence: SequenceState, vocab_size: int) -> SamplingPlan:
        plan = self._plans.get(sequence.spec.seq_id)
        if plan is None or plan.sequence is not sequence:
            grammar = self._begun.pop(sequence.spec.seq_id, None)
            plan = SamplingPlan(sequence, vocab_size, grammar)
            self._plans[sequence.spec.seq_id] = plan
        return plan


def _choose(
    logits_RV: torch.Tensor, sequences: Sequence[SequenceState], plans: Sequence[SamplingPlan]
) -> tuple[list[int], dict[int, SequenceFailure]]:
    raised: dict[int, RankFailure] = {}
    edited_RV = logits_RV
    if any(plan.edits for plan in plans):
        edited_RV = logits_RV.clone()
        raised = edit_logits(edited_RV, plans)
    raised |= {row: plan.failure for row, plan in enumerate(plans) if plan.failure}
    failures = {
        row: SequenceFailure(seq_id=sequences[row].spec.seq_id, failure=failure)
        for row, failure in raised.items()
    }
    failures |= _keep_to_grammars(edited_RV, sequences, plans)
    chosen = choose_tokens(
        edited_RV,
        [plan.params for plan in plans],
        [0.0 if plan.params.is_greedy else plan.next_uniform() for plan in plans],
    )
    for row, token_id in enumerate(chosen):
        if token_id == NO_TOKEN and row not in failures:
            failures[row] = SequenceFailure(
                seq_id=sequences[row].spec.seq_id,
                failure=_explain_no_token(logits_RV[row]),
                by_user_code=False,
            )
    return [0 if row in failures else token_id for row, token_id in enumerate(chosen)], failures


def _keep_to_grammars(
    logits_RV: torch.Tensor, sequences: Sequence[SequenceState], plans: Sequence[SamplingPlan]
) -> dict[int, SequenceFailure]:
    """Exclude in place what the form of an answer does not allow."""
    failures: dict[int, SequenceFailure] = {}
    for row, plan in enumerate(plans):
        if plan.grammar is None:
            continue
        try:
            allowed_V = plan.grammar.allowed_V().to(logits_RV.device)
            logits_RV[row].masked_fill_(~allowed_V, -math.inf)
        except ValueError as error:
            failures[row] = SequenceFailure(
                seq_id=sequences[row].spec.seq_id,
                failure=RankFailure.of(0, error),
                by_user_code=False,
            )
    return failures


def _explain_no_token(logits_V: torch.Tensor) -> RankFailure:
    if not logits_V.amax().isfinite():
        message = (
            "The model's logits are not finite numbers: its weights are damaged, or its numbers "
            "overflow in this dtype. Try dtype='float32' or 'bfloat16'."
        )
    else:
        message = (
            "No token is left to sample: allowed_token_ids, bad_words, min_tokens, logit_bias, "
            "logits_processors and structured_output together exclude all of them, or make a "
            "logit NaN."
        )
    return RankFailure.of(0, ValueError(message))


def _logprobs(
    logits_RV: torch.Tensor, chosen: Sequence[int], plans: Sequence[SamplingPlan]
) -> Mapping[int, TokenLogprobs]:
    rows_by_num_top: dict[int, list[int]] = {}
    for row, plan in enumerate(plans):
        if plan.params.logprobs is not None:
            rows_by_num_top.setdefault(plan.params.logprobs, []).append(row)
    found: dict[int, TokenLogprobs] = {}
    for num_top, rows in rows_by_num_top.items():
        entries = token_logprobs(logits_RV[rows], [chosen[row] for row in rows], num_top)
        found.update(zip(rows, entries, strict=True))
    return found


def _sampled(sequence: SequenceState, token_id: int, top: TokenLogprobs | None) -> SampledToken:
    logprob = top.logprobs[top.token_ids.index(token_id)] if top else None
    return new_sampled_token((sequence.spec.seq_id, token_id, logprob, top))
