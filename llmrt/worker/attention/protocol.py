"""Attention: what a layer asks for, whatever computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from llmrt.worker.attention.metadata import AttentionMetadata


class Attention(Protocol):
    """Attention of one layer over the paged cache."""

    def __call__(
        self, qkv_THD: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionMetadata
    ) -> Tensor:
        """Rotate queries and keys, store this step's keys and values, and attend.

        Args:
            qkv_THD: by token: query heads, key heads, value heads of this rank; rotated in place.
            angles: cos and sin by token.
            attention: the step.

        Returns:
            o_TQD: one vector for each query head.
        """
        ...
