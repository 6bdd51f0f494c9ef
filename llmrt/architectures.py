"""The architectures that llmrt runs, and what is peculiar to the configuration of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What transformers takes where a `config.json` is silent, and which of its fields count."""

    max_position_embeddings: int
    num_kv_heads: int | None = None
    """None is as many as there are query heads."""
    head_dim: int | None = None
    """None is hidden_size / num_heads."""
    qkv_bias: bool = False
    has_o_bias: bool = False
    """Whether `attention_bias` covers the output projection, too."""
    reads_biases: bool = True
    qk_norm: bool = False
    window: int | None = None
    """Default of `sliding_window`."""
    has_windows: bool = False
    use_window: bool = True
    """Default of `use_sliding_window`."""
    max_window_layers: int = 0
    """Default of `max_window_layers`: layers from there on have the window."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(max_position_embeddings=2048, has_o_bias=True),
    "MistralForCausalLM": Architecture(
        max_position_embeddings=131072,
        num_kv_heads=8,
        reads_biases=False,
        window=4096,
        has_windows=True,
    ),
    "Qwen2ForCausalLM": Architecture(
        max_position_embeddings=32768,
        num_kv_heads=32,
        qkv_bias=True,
        window=4096,
        has_windows=True,
        use_window=False,
        max_window_layers=28,
    ),
    "Qwen3ForCausalLM": Architecture(
        max_position_embeddings=32768,
        num_kv_heads=32,
        head_dim=128,
        has_o_bias=True,
        qk_norm=True,
        window=4096,
        has_windows=True,
        use_window=False,
        max_window_layers=28,
    ),
}
"""By class name in transformers."""
