"""Everything that changes logits before a token is chosen, in the order that the package describes.

R rows, V vocabulary, N cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llmrt.errors import RankFailure
from llmrt.worker.sampling.cells import cells
from llmrt.worker.sampling.penalties import penalise
from llmrt.worker.sampling.plan import SamplingPlan
from llmrt.worker.sampling.processors import run_processors


def edit_logits(logits_RV: torch.Tensor, plans: Sequence[SamplingPlan]) -> dict[int, RankFailure]:
    """Apply in place what each row's plan asks for; return by row what went wrong.

    The logits of a row that failed are of no use.
    """
    _keep_allowed(logits_RV, plans)
    _ban(logits_RV, plans)
    _add_bias(logits_RV, plans)
    failures = _run_processors(logits_RV, plans)
    penalise(logits_RV, [(r, p.params, p.counts) for r, p in enumerate(plans) if p.counts])
    # An infinite bias, or a processor's, wins over every number, but is not one to calculate with.
    logits_RV.clamp_(max=torch.finfo(logits_RV.dtype).max)
    return failures


def _keep_allowed(logits_RV: torch.Tensor, plans: Sequence[SamplingPlan]) -> None:
    parts = [(r, p.allowed_N) for r, p in enumerate(plans) if p.allowed_N is not None]
    if parts:
        row_N, id_N = cells(parts, logits_RV.device)
        kept_N = logits_RV[row_N, id_N]
        logits_RV[[row for row, _ in parts]] = -math.inf
        logits_RV[row_N, id_N] = kept_N


def _ban(logits_RV: torch.Tensor, plans: Sequence[SamplingPlan]) -> None:
    parts = [(r, p.banned_ids()) for r, p in enumerate(plans) if p.bans_any]
    if parts:
        logits_RV[cells(parts, logits_RV.device)] = -math.inf


def _add_bias(logits_RV: torch.Tensor, plans: Sequence[SamplingPlan]) -> None:
    biased = [(r, p) for r, p in enumerate(plans) if len(p.bias_ids_N)]
    if biased:
        row_N, id_N = cells([(r, p.bias_ids_N) for r, p in biased], logits_RV.device)
        bias_N = torch.cat([p.bias_N for _, p in biased]).to(logits_RV.device)
        logits_RV[row_N, id_N] += bias_N


def _run_processors(
    logits_RV: torch.Tensor, plans: Sequence[SamplingPlan]
) -> dict[int, RankFailure]:
    failures: dict[int, RankFailure] = {}
    for row, plan in enumerate(plans):
        if plan.processors:
            try:
                logits_RV[row] = run_processors(plan.processors, plan.sequence, logits_RV[row])
            except Exception as error:
                failures[row] = RankFailure.of(0, error)
    return failures
