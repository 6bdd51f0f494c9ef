"""softmax(q kᵀ / √D) v, by whichever of two ways is faster on the device.

torch's CPU kernel for it computes in float32; two plain multiplications with a softmax between use
the processor's bfloat16 units and are two to three times as fast, once there is enough to do.

N sequences, K KV heads, R rows of queries that share a KV head, S context, D size of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_SCORES = 1024
"""Below so many (R · S for all heads and sequences) a call costs more than its arithmetic."""


def attend(
    q_NKRD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    mask: Tensor | None,
    *,
    by_products: bool,
) -> Tensor:
    """Return o_NKRD.

    Args:
        q_NKRD: queries.
        keys_NKSD: keys.
        values_NKSD: values.
        mask: 0 or -inf, broadcast over NKRS; None sees everything.
        by_products: whether plain multiplications are fast here.
    """
    num_scores = q_NKRD[..., 0].numel() * keys_NKSD.shape[2]
    if by_products and num_scores >= LEAST_SCORES:
        return _by_products(q_NKRD, keys_NKSD, values_NKSD, mask)
    return F.scaled_dot_product_attention(q_NKRD, keys_NKSD, values_NKSD, attn_mask=mask)


def _by_products(
    q_NKRD: Tensor, keys_NKSD: Tensor, values_NKSD: Tensor, mask: Tensor | None
) -> Tensor:
    num_sequences = len(q_NKRD)
    q_MRD = q_NKRD.flatten(0, 1) * (1 / math.sqrt(q_NKRD.shape[-1]))
    scores_MRS = torch.bmm(q_MRD, keys_NKSD.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        scores_MRS.unflatten(0, (num_sequences, -1)).add_(mask)
    weights_MRS = torch.softmax(scores_MRS, dim=-1)
    return torch.bmm(weights_MRS, values_NKSD.flatten(0, 1)).unflatten(0, (num_sequences, -1))
