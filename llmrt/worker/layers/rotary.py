"""Rotary position embedding, with the scaling rules of transformers.

T tokens, H heads, D size of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmrt.model_config import RopeConfig
from llmrt.worker.device import Placement


class RotaryEmbedding(nn.Module):
    """Angles by position, computed for the tokens of each step: no table, no length limit."""

    def __init__(self, rope: RopeConfig, head_dim: int, placement: Placement) -> None:
        super().__init__()
        self._rope = rope
        self._head_dim = head_dim
        self._dtype = placement.dtype
        self._device = placement.device
        inverse_F, self._attention_factor = inverse_frequencies(rope, head_dim)
        self._inverse_F = inverse_F.to(placement.device)

    def forward(self, positions_T: Tensor, lengths_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cos_T1D and sin_T1D, in the model's dtype; sin is negative in its first half.

        Args:
            positions_T: place of each token in its sequence.
            lengths_T: for `dynamic` only: the length that sets each token's frequencies.
        """
        inverse = self._inverse_F
        if self._rope.kind == "dynamic" and lengths_T is not None:
            inverse = dynamic_inverse_frequencies(self._rope, self._head_dim, lengths_T)
        angles_TF = positions_T[:, None].float() * inverse
        cos_TF = angles_TF.cos() * self._attention_factor
        sin_TF = angles_TF.sin() * self._attention_factor
        return (
            torch.cat((cos_TF, cos_TF), dim=-1)[:, None].to(self._dtype),
            torch.cat((-sin_TF, sin_TF), dim=-1)[:, None].to(self._dtype),
        )


def rotate_(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotate each head in place; the first half of a head pairs with its second half."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    x_THD.mul_(cos_T1D).addcmul_(swapped_THD, sin_T1D)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, and the factor on cos and sin."""
    parameters = rope.parameters or {}
    inverse_F = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        return inverse_F / parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse_F, parameters), 1.0
    if rope.kind == "yarn":
        inverse_F = _yarn(rope.theta, head_dim, parameters)
        return inverse_F, _yarn_attention_factor(parameters)
    return inverse_F, 1.0


def dynamic_inverse_frequencies(rope: RopeConfig, head_dim: int, lengths_T: Tensor) -> Tensor:
    """Return inverse_TF of dynamic NTK scaling: the base grows with the length."""
    parameters = rope.parameters or {}
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    lengths_T = lengths_T.clamp(min=original).float()
    stretch_T = (factor * lengths_T / original) - (factor - 1)
    base_T = rope.theta * stretch_T ** (head_dim / (head_dim - 2))
    return 1.0 / base_T[:, None] ** _exponents(head_dim).to(lengths_T.device)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(head_dim)


def _llama3(inverse_F: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    wavelength_F = 2 * math.pi / inverse_F
    share_F = ((original / wavelength_F - low) / (high - low)).clamp(0, 1)
    return (1 - share_F) * inverse_F / factor + share_F * inverse_F


def _yarn(theta: float, head_dim: int, parameters: Mapping[str, Any]) -> Tensor:
    """Interpolate slow pairs, keep fast ones, blend by how often a pair turns in the original."""
    first, last = _yarn_range(theta, head_dim, parameters)
    steps_F = torch.arange(head_dim // 2, dtype=torch.float32)
    slow_F = ((steps_F - first) / (last - first)).clamp(0, 1)
    inverse_F = _plain(theta, head_dim)
    return inverse_F / parameters["factor"] * slow_F + inverse_F * (1 - slow_F)


def _yarn_range(theta: float, head_dim: int, parameters: Mapping[str, Any]) -> tuple[float, float]:
    """Return the pairs between which yarn blends."""
    original = parameters["original_max_position_embeddings"]

    def pair_of(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_of(parameters.get("beta_fast") or 32)
    last = pair_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = parameters["factor"]
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
