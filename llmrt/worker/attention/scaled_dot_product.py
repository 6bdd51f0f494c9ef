"""softmax(q kᵀ / √D) v, by whichever of two ways is faster on the device.

torch's CPU kernel for it computes in float32; two plain multiplications with a softmax between use
the processor's bfloat16 units and are two to three times as fast, once there is enough to do.

N sequences, K KV heads, R rows of queries that share a KV head, S context, D size of a head, P
tokens of a prefix that all N sequences begin with, U = P + S.
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


def attend_after_prefix(
    q_NKRD: Tensor,
    prefix_2KPD: Tensor,
    keys_NKSD: Tensor,
    values_NKSD: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return o_NKRD, where all queries see one prefix before the keys of their own sequence.

    The rows of all sequences are multiplied with the prefix together, so that it is read once. One
    softmax goes over both parts.

    Args:
        q_NKRD: queries.
        prefix_2KPD: keys and values of the prefix.
        keys_NKSD: each sequence's keys behind the prefix.
        values_NKSD: its values.
        mask: 0 or -inf, broadcast over NKRS; None sees everything.
    """
    num_sequences, num_kv_heads, _, size = q_NKRD.shape
    num_shared = prefix_2KPD.shape[2]
    prefix_keys_KPD, prefix_values_KPD = prefix_2KPD
    q_NKRD = q_NKRD * (1 / math.sqrt(size))
    q_KLD = q_NKRD.transpose(0, 1).flatten(1, 2)  # L = N · R
    shared_KLP = torch.bmm(q_KLD, prefix_keys_KPD.transpose(1, 2))
    own_MRS = torch.bmm(q_NKRD.flatten(0, 1), keys_NKSD.flatten(0, 1).transpose(1, 2))
    own_NKRS = own_MRS.unflatten(0, (num_sequences, num_kv_heads))
    if mask is not None:
        own_NKRS.add_(mask)
    shared_KNRP = shared_KLP.unflatten(1, (num_sequences, -1))
    weights_KNRU = torch.cat((shared_KNRP, own_NKRS.transpose(0, 1)), dim=-1).softmax(dim=-1)
    shared_KLP = weights_KNRU[..., :num_shared].flatten(1, 2)
    own_MRS = weights_KNRU[..., num_shared:].transpose(0, 1).flatten(0, 1)
    o_KLD = torch.bmm(shared_KLP, prefix_values_KPD)
    o_MRD = torch.bmm(own_MRS, values_NKSD.flatten(0, 1))
    o_NKRD = o_MRD.unflatten(0, (num_sequences, num_kv_heads))
    return o_NKRD.add_(o_KLD.unflatten(1, (num_sequences, -1)).transpose(0, 1))
