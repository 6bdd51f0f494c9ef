"""The rules of sampling, one row at a time in plain Python floats, to be checked by eye."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from llmrt.sampling import SamplingParams
from llmrt.worker.sequence import SequenceState


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What must be sampled."""

    token_id: int
    margin: float
    """How far the closest decision was from falling the other way."""


def expected_token(logits: list[float], sequence: SequenceState, uniform: float) -> Expected | None:
    """Return the token that a row of logits must give, or None where no token is left."""
    params = sequence.spec.params
    logits = edited_logits(logits, sequence)
    if max(logits) == -math.inf:
        return None
    best_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.is_greedy:
        return Expected(token_id=best_first[0], margin=math.inf)
    weights = [math.exp((x - logits[best_first[0]]) / params.temperature) for x in logits]
    margins = [_apply_min_p(weights, params.min_p)]
    _keep(weights, best_first[: params.top_k or None])
    margins.append(_apply_top_p(weights, best_first, params.top_p))
    token_id, margin = _draw(weights, _drawing_order(params, best_first), uniform)
    return Expected(token_id=token_id, margin=min(*margins, margin))


def edited_logits(logits: list[float], sequence: SequenceState) -> list[float]:
    """Return the logits after masks, bias and penalties."""
    params, spec = sequence.spec.params, sequence.spec
    prompt = sequence.token_ids[: spec.num_prompt_tokens]
    output = sequence.token_ids[spec.num_prompt_tokens :]
    logits = list(logits)
    excluded: set[int] = set()
    if params.allowed_token_ids is not None:
        excluded |= set(range(len(logits))) - set(params.allowed_token_ids)
    for word in spec.bad_word_ids:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
            excluded.add(word[-1])
    if len(output) < params.min_tokens:
        excluded |= {*spec.eos_token_ids, *(params.stop_token_ids or ())}
    for i in excluded & set(range(len(logits))):
        logits[i] = -math.inf
    for i, bias in (params.logit_bias or {}).items():
        if i < len(logits):
            logits[i] += bias
    for i in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[i] = logits[i] / factor if logits[i] > 0 else logits[i] * factor
    for i, count in Counter(output).items():
        logits[i] -= params.frequency_penalty * count
        logits[i] -= params.presence_penalty
    return logits


def _apply_min_p(weights: list[float], min_p: float) -> float:
    margin = min(abs(weight - min_p) for weight in weights) if min_p else math.inf
    _keep(weights, [i for i, weight in enumerate(weights) if weight >= min_p])
    return margin


def _apply_top_p(weights: list[float], best_first: list[int], top_p: float) -> float:
    if top_p == 1:
        return math.inf
    total, before, margin = sum(weights), 0.0, math.inf
    nucleus: list[int] = []
    for i in best_first:
        if before < top_p * total:
            nucleus.append(i)
        before += weights[i]
        margin = min(margin, abs(before - top_p * total) / total)
    _keep(weights, nucleus)
    return margin


def _keep(weights: list[float], kept: list[int]) -> None:
    for i in set(range(len(weights))) - set(kept):
        weights[i] = 0.0


def _drawing_order(params: SamplingParams, best_first: list[int]) -> list[int]:
    is_truncated = 0 < params.top_k < len(best_first) or params.top_p < 1
    return best_first if is_truncated else sorted(best_first)


def _draw(weights: list[float], order: list[int], uniform: float) -> tuple[int, float]:
    total, cumulated, margin = sum(weights), 0.0, math.inf
    chosen = None
    for i in order:
        cumulated += weights[i]
        if chosen is None and cumulated > uniform * total:
            chosen = i
        if cumulated < total:
            margin = min(margin, abs(cumulated - uniform * total) / total)
    assert chosen is not None
    return chosen, margin
