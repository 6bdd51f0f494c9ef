"""ModelConfig: the shape of a model as plain data, from a `config.json` as transformers writes it.

No tensor, no torch: the driver checks requests against it, every rank builds its shard from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    kind: str = "default"
    """`default`, `linear`, `dynamic`, `yarn` or `llama3`, as transformers' `rope_type`."""
    parameters: Mapping[str, Any] | None = None
    """The scaling parameters of that kind, under transformers' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model of the Llama family."""

    architecture: str
    """The class name in transformers, as `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence, scaling included."""
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str
    """What the checkpoint says it is stored in: `float32`, `bfloat16` or `float16`."""
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """By layer: its sliding window in tokens, or None for full attention."""
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config.json and generation_config.json name; the tokenizer adds its own."""
