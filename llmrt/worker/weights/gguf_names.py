"""The names of tensors in a GGUF file, as those of transformers' state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_MODEL_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
)
_LAYER_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def transformers_name(gguf_name: str) -> str:
    """Return what transformers calls a tensor; a name that is not known comes back as it is."""
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"
    part, _, kind = gguf_name.rpartition(".")
    return f"{_MODEL_PARTS[part]}.{kind}" if part in _MODEL_PARTS else gguf_name
