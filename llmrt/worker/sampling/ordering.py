"""The most likely tokens in one definite order: by logit, and equal logits by id, the lowest first.

`torch.topk` takes any of equal values; with bfloat16 models equal logits are common.

R rows, V vocabulary, K wanted.
"""

from __future__ import annotations

import torch


def top(logits_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and ids of the *k* largest logits of each row, the largest first."""
    if k >= logits_RV.shape[1]:
        return logits_RV.sort(dim=-1, descending=True, stable=True)
    values_RK, ids_RK = logits_RV.topk(k + 1)
    last_R, next_R = values_RK[:, -2], values_RK[:, -1]
    undecided_R = (last_R == next_R) & last_R.isfinite()
    values_RK, ids_RK = values_RK[:, :-1], ids_RK[:, :-1]
    for row in undecided_R.nonzero().flatten().tolist():
        _take_lowest_ids(logits_RV[row], values_RK[row], ids_RK[row])
    ids_RK = ids_RK.sort(dim=-1).values
    values_RK, order_RK = logits_RV.gather(1, ids_RK).sort(dim=-1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


def rank_of(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
    """Return the place of one token of each row in that order; 1 is the most likely."""
    own_R1 = logits_RV.gather(1, ids_R[:, None])
    lower_id_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) < ids_R[:, None]
    ahead_RV = (logits_RV > own_R1) | ((logits_RV == own_R1) & lower_id_RV)
    return ahead_RV.sum(-1) + 1


def _take_lowest_ids(logits_V: torch.Tensor, values_K: torch.Tensor, ids_K: torch.Tensor) -> None:
    """Replace, in place, the ids of the last value by the lowest that have it."""
    num_above = int((values_K > values_K[-1]).sum())
    equal_N = (logits_V == values_K[-1]).nonzero().flatten()
    ids_K[num_above:] = equal_N[: ids_K.shape[0] - num_above]
