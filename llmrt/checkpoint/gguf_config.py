"""From the metadata of a GGUF file to config.json and generation_config.json of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmrt.errors import ConfigError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""By GGUF's name (Mistral's is `llama`): the class in transformers and its model_type."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Llama 3.1 and later: a GGUF file keeps only the resulting factors; these are always the same.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Sequence[Mapping[str, Any]],
    rope_factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return config.json for a file with this metadata and these tensors.

    Args:
        metadata: By GGUF's key.
        tensors: Name, type and shape of each, as in tensors.json.
        rope_factors: The content of `rope_freqs.weight`, where the file has it.

    Raises:
        ConfigError: the architecture, or something it does, is not supported.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}."
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise ConfigError("Mixture-of-experts models are not supported.")
    class_name, model_type = ARCHITECTURES[architecture]
    config: dict[str, Any] = {"architectures": [class_name], "model_type": model_type}
    config |= _shape(metadata, architecture, tensors)
    config |= _rope(metadata, architecture, rope_factors, config["head_dim"])
    config |= _biases({tensor["name"] for tensor in tensors}, architecture)
    config |= {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": _dtype(tensors),
        "use_sliding_window": False,
    }
    return config


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: every token that ends a text or a turn."""
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _shape(
    metadata: Mapping[str, Any], architecture: str, tensors: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    def required(key: str) -> Any:
        value = metadata.get(f"{architecture}.{key}")
        if value is None:
            raise ConfigError(f"The GGUF header lacks {architecture}.{key}. Fetch the file again.")
        return value

    shapes = {tensor["name"]: tensor["shape"] for tensor in tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigError("The GGUF file lacks the tensor token_embd.weight: it is no whole model.")
    hidden_size, num_heads = required("embedding_length"), required("attention.head_count")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": metadata.get(f"{architecture}.attention.key_length", hidden_size // num_heads),
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": required("context_length"),
        "hidden_act": "silu",
        # The output projection is written only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _biases(names: set[str], architecture: str) -> dict[str, Any]:
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }
    if architecture == "qwen2":
        del biases["attention_bias"]  # Qwen2 always has them
    return biases


def _dtype(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return the type of the matrices; bfloat16 for quantised ones, whose precision it exceeds."""
    types = {tensor["type"] for tensor in tensors if len(tensor["shape"]) > 1}
    return _DTYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


# ---- rotary embedding ----


def _rope(
    metadata: Mapping[str, Any],
    architecture: str,
    factors: Sequence[float] | None,
    head_dim: int,
) -> dict[str, Any]:
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    num_rotated = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        raise ConfigError(
            f"Rotary embedding of {num_rotated} of {head_dim} dimensions is not supported."
        )
    scaling = _scaling(metadata, f"{architecture}.rope.scaling")
    if factors is not None:
        scaling = _llama3_scaling(factors, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"Rotary scaling {kind!r} in a GGUF file is not supported.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(metadata[f"{prefix}.factor"])}
    original = metadata.get(f"{prefix}.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Recognise Llama 3's scaling by its factors; the largest is the one the release names."""
    factor = max(factors)
    if factor == 1.0:
        return None
    expected = [_llama3_factor(i, factor, theta, head_dim) for i in range(head_dim // 2)]
    same = len(expected) == len(factors) and all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, factors, strict=True)
    )
    if not same:
        raise ConfigError("The rotary factors in rope_freqs.weight follow no rule llmrt supports.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _llama3_factor(index: int, factor: float, theta: float, head_dim: int) -> float:
    """Return by what frequency number *index* is divided (the formula of Llama 3.1's release)."""
    wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
    if wavelength < _LLAMA3_ORIGINAL / _LLAMA3_HIGH:
        return 1.0
    if wavelength > _LLAMA3_ORIGINAL / _LLAMA3_LOW:
        return factor
    smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)
