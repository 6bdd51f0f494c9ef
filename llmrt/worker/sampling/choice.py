"""The choice of one token per row: the most likely one, or one drawn with the row's random number.

Rows that keep the whole vocabulary (but for min_p) are drawn in the order of ids, which needs no
sorting; rows with top_k or top_p from a list of their best tokens.

R rows, V vocabulary, K candidates, B blocks of E ids. A weight is a probability over that of the
row's most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from llmrt.sampling import SamplingParams
from llmrt.worker.sampling.ordering import top

NO_TOKEN = -1
"""Stands for the choice of a row that has no best logit: all are -inf, or one is NaN."""

NUCLEUS_SIZES = (64, 512, 8192)
"""A nucleus is looked for among so many tokens, then so many more, at last among all."""

BLOCK_IDS = 256
"""Sums run over blocks of so many ids, then inside one: 10 times faster than over all ids."""


_LEAST_BLOCK_IDS = 16
"""Where a vocabulary has no larger divisor, blocks gain nothing."""


def choose_tokens(
    logits_RV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """Return the token of each row, or NO_TOKEN.

    Args:
        logits_RV: float32; -inf excludes a token, +inf is not allowed.
        params: of each row.
        uniforms: of each row a number in [0, 1 - 2^-52]; not looked at where the row is greedy.
    """
    greedy, random = _split(len(params), lambda row: params[row].is_greedy)
    ids_R = torch.empty(len(params), dtype=torch.int64, device=logits_RV.device)
    if greedy:
        best_R, best_ids_R = _best(_rows(logits_RV, greedy))
        ids_R[greedy] = best_ids_R.where(best_R.isfinite(), NO_TOKEN)
    if random:
        ids_R[random] = _draw(
            _rows(logits_RV, random), [params[r] for r in random], [uniforms[r] for r in random]
        )
    return ids_R.tolist()


def _best(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best logit of each row and its first id, by blocks: ten times as fast as `max`."""
    size = math.gcd(logits_RV.shape[1], BLOCK_IDS)
    if size < _LEAST_BLOCK_IDS:
        return logits_RV.max(dim=-1)
    blocks_RBE = logits_RV.unflatten(1, (-1, size))
    best_RB = blocks_RBE.amax(dim=-1)
    block_R1 = best_RB.argmax(dim=-1, keepdim=True)
    inside_R1 = blocks_RBE.take_along_dim(block_R1[:, :, None], dim=1).argmax(dim=-1)
    return best_RB.gather(1, block_R1)[:, 0], (block_R1 * size + inside_R1)[:, 0]


def _draw(
    logits_RV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    best_R1 = logits_RV.amax(-1, keepdim=True)
    # The best logit becomes 0 before it is divided: a tiny temperature cannot overflow.
    scaled_RV = logits_RV - best_R1
    scaled_RV /= _column(logits_RV, [p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        least_R1 = _column(logits_RV, [math.log(p.min_p) if p.min_p else -math.inf for p in params])
        scaled_RV.masked_fill_(scaled_RV < least_R1, -math.inf)
    vocab_size = logits_RV.shape[1]
    uniform_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)[:, None]
    ids_R = torch.empty(len(params), dtype=torch.int64, device=logits_RV.device)
    by_k, rest = _split(len(params), lambda row: 0 < params[row].top_k < vocab_size)
    by_p = [row for row in rest if params[row].top_p < 1]
    free = [row for row in rest if params[row].top_p >= 1]
    if by_k:
        ids_R[by_k] = _draw_top_k(
            _rows(scaled_RV, by_k), [params[r] for r in by_k], uniform_R1[by_k]
        )
    if by_p:
        top_p_R1 = _column(uniform_R1, [params[r].top_p for r in by_p])
        ids_R[by_p] = _draw_nucleus(_rows(scaled_RV, by_p).exp_(), top_p_R1, uniform_R1[by_p])
    if free:
        ids_R[free] = _draw_any(_rows(scaled_RV, free).exp_(), uniform_R1[free])
    return ids_R.where(best_R1[:, 0].isfinite(), NO_TOKEN)


def _draw_top_k(
    scaled_RV: torch.Tensor, params: Sequence[SamplingParams], uniform_R1: torch.Tensor
) -> torch.Tensor:
    """Draw from the top_k best of each row, of these only their top_p nucleus."""
    most = max(p.top_k for p in params)
    values_RK, ids_RK = top(scaled_RV, most)
    top_k_R1 = torch.tensor([p.top_k for p in params], device=scaled_RV.device)[:, None]
    is_kept_RK = torch.arange(most, device=scaled_RV.device) < top_k_R1
    weights_RK = values_RK.double().exp() * is_kept_RK
    mass_R1 = weights_RK.cumsum(-1)[:, -1:]
    top_p_R1 = _column(uniform_R1, [p.top_p for p in params])
    return _draw_listed(weights_RK, ids_RK, top_p_R1 * mass_R1, uniform_R1)


def _draw_nucleus(
    weights_RV: torch.Tensor, top_p_R1: torch.Tensor, uniform_R1: torch.Tensor
) -> torch.Tensor:
    """Draw from the smallest set of best tokens that holds top_p of the probability."""
    needed_R1 = top_p_R1 * _cumulate(_blocks(weights_RV))[:, -1:]
    ids_R = torch.empty(len(weights_RV), dtype=torch.int64, device=weights_RV.device)
    pending_R = torch.arange(len(weights_RV), device=weights_RV.device)
    for size in (*NUCLEUS_SIZES, weights_RV.shape[1]):
        weights_RK, ids_RK = top(weights_RV[pending_R], size)
        weights_RK = weights_RK.double()
        ids_R[pending_R] = _draw_listed(
            weights_RK, ids_RK, needed_R1[pending_R], uniform_R1[pending_R]
        )
        pending_R = pending_R[weights_RK.cumsum(-1)[:, -1] < needed_R1[pending_R, 0]]
        if len(pending_R) == 0:
            break
    return ids_R


def _draw_listed(
    weights_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    needed_R1: torch.Tensor,
    uniform_R1: torch.Tensor,
) -> torch.Tensor:
    """Draw from the head of a list, best first: as many as it takes to hold the needed weight."""
    ends_RK = weights_RK.cumsum(-1)
    is_kept_RK = ends_RK - weights_RK < needed_R1
    kept_weight_R1 = torch.where(is_kept_RK, ends_RK, 0).amax(-1, keepdim=True)
    return ids_RK.gather(1, _first_above(ends_RK, uniform_R1 * kept_weight_R1))[:, 0]


def _draw_any(weights_RV: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Draw from all tokens, in the order of ids: first a block, then a token in it."""
    blocks_RBE = _blocks(weights_RV)
    ends_RB = _cumulate(blocks_RBE)
    target_R1 = uniform_R1 * ends_RB[:, -1:]
    block_R1 = _first_above(ends_RB, target_R1)
    before_R1 = torch.where(block_R1 > 0, ends_RB.gather(1, (block_R1 - 1).clamp(min=0)), 0)
    weights_RE = blocks_RBE.take_along_dim(block_R1[:, :, None], dim=1)[:, 0]
    ends_RE = weights_RE.double().cumsum(-1)
    # The block's sum above and this one differ in their last bits: stay below the end of this one.
    below_R1 = torch.nextafter(ends_RE[:, -1:], torch.zeros_like(before_R1))
    inner_R1 = _first_above(ends_RE, torch.minimum(target_R1 - before_R1, below_R1))
    return (block_R1 * BLOCK_IDS + inner_R1)[:, 0]


def _blocks(weights_RV: torch.Tensor) -> torch.Tensor:
    padding = -weights_RV.shape[1] % BLOCK_IDS
    padded_RV = F.pad(weights_RV, (0, padding)) if padding else weights_RV
    return padded_RV.unflatten(1, (-1, BLOCK_IDS))


def _cumulate(blocks_RBE: torch.Tensor) -> torch.Tensor:
    """Return the weight up to the end of each block, the same in a batch of any size."""
    return blocks_RBE.sum(-1).double().cumsum(-1)


def _first_above(ends_RK: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulated weight exceeds the target: never one of weight 0.

    A row of NaN has none; its last index stands in, and is thrown away later.
    """
    index_R1 = torch.searchsorted(ends_RK, target_R1, right=True)
    return index_R1.clamp_(max=ends_RK.shape[1] - 1)


def _split(num_rows: int, belongs: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    rows = [row for row in range(num_rows) if belongs(row)]
    return rows, [row for row in range(num_rows) if not belongs(row)]


def _rows(matrix_RV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return matrix_RV if len(rows) == len(matrix_RV) else matrix_RV[rows]


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
