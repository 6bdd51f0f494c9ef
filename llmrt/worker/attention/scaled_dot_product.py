"""softmax(q kᵀ / √D) v, by whichever of two ways is faster on the device.

torch's CPU kernel for it computes in float32; two plain multiplications with a softmax between use
the processor's bfloat16 units and are two to three times as fast, once there is enough to do.

N sequences, K KV heads, R rows of queries that share a KV head, S context, D size of a head, P
tokens of a prefix that all N sequences begin with, U = P + S, L = N · R, M = N · K.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from llmrt.worker.device import Placement
from llmrt.worker.matrices.kernels import has_fast_bfloat16

LEAST_SCORES = 4096
"""Below so many (R · S for all heads and sequences) a call costs more than its arithmetic."""


def has_fast_products(placement: Placement) -> bool:
    """Return whether plain multiplications beat torch's kernel for attention."""
    is_fast_dtype = placement.dtype == torch.float32 or (
        placement.dtype == torch.bfloat16 and has_fast_bfloat16()
    )
    return placement.device.type == "cpu" and is_fast_dtype


def attend(
    q_NKRD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    mask: Tensor,
    *,
    by_products: bool,
) -> Tensor:
    """Return o_NKRD.

    Args:
        q_NKRD: queries.
        keys_NKSD: keys.
        values_NKSD: values.
        mask: 0 or -inf, mask_M1S or mask_RS.
        by_products: whether plain multiplications are fast here.
    """
    by_sequence = (len(q_NKRD), -1)
    num_scores = q_NKRD[..., 0].numel() * keys_NKSD.shape[2]
    if by_products and num_scores >= LEAST_SCORES:
        weights_MRS = _scores(q_NKRD, keys_NKSD, mask).softmax(dim=-1)
        return torch.bmm(weights_MRS, values_NKSD.flatten(0, 1)).unflatten(0, by_sequence)
    if mask.dim() == 3:
        mask = mask.unflatten(0, by_sequence)
    return F.scaled_dot_product_attention(q_NKRD, keys_NKSD, values_NKSD, attn_mask=mask)


def attend_after_prefix(
    q_NKRD: Tensor,
    prefix_2KPD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return o_NKRD, where all queries see one prefix before the keys of their own sequence.

    The rows of all sequences are multiplied with the prefix together, so that it is read once. One
    softmax goes over both parts.

    Args:
        q_NKRD: queries.
        prefix_2KPD: keys and values of the prefix.
        keys_NKSD: each sequence's keys behind the prefix.
        values_NKSD: its values.
        mask: over those keys, 0 or -inf, mask_M1S or mask_RS.
    """
    by_sequence = (len(q_NKRD), -1)
    num_shared = prefix_2KPD.shape[2]
    prefix_keys_KPD, prefix_values_KPD = prefix_2KPD
    q_KLD = q_NKRD.transpose(0, 1).flatten(1, 2) * _scale(q_NKRD)
    scores_KLP = torch.bmm(q_KLD, prefix_keys_KPD.transpose(1, 2))
    scores_NKRS = _scores(q_NKRD, keys_NKSD, mask).unflatten(0, by_sequence)
    scores_KNRU = torch.cat(
        (scores_KLP.unflatten(1, by_sequence), scores_NKRS.transpose(0, 1)), dim=-1
    )
    weights_KNRP, weights_KNRS = scores_KNRU.softmax(dim=-1).tensor_split((num_shared,), dim=-1)
    o_KLD = torch.bmm(weights_KNRP.flatten(1, 2), prefix_values_KPD)
    o_MRD = torch.bmm(weights_KNRS.transpose(0, 1).flatten(0, 1), values_NKSD.flatten(0, 1))
    return o_MRD.unflatten(0, by_sequence) + o_KLD.unflatten(1, by_sequence).transpose(0, 1)


def _scores(q_NKRD: Tensor, keys_NKSD: Tensor, mask: Tensor) -> Tensor:
    """Return scores_MRS."""
    keys_MDS = keys_NKSD.flatten(0, 1).transpose(1, 2)
    return torch.baddbmm(mask, q_NKRD.flatten(0, 1), keys_MDS, alpha=_scale(q_NKRD))


def _scale(q_NKRD: Tensor) -> float:
    return 1 / math.sqrt(q_NKRD.shape[-1])
