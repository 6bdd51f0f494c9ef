from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmrt.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf

TENSORS = [
    {"name": "token_embd.weight", "type": "Q8_0", "shape": [320, 64]},
    {"name": "blk.0.attn_q.weight", "type": "Q4_1", "shape": [64, 64]},
    {"name": "blk.0.attn_norm.weight", "type": "F32", "shape": [64]},
]


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    own = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
    } | changes
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in own.items()
    }


def tensors_with(*names: str) -> list[dict[str, Any]]:
    return [*TENSORS, *({"name": name, "type": "F32", "shape": [64]} for name in names)]


def test_the_shape_is_that_of_transformers_config() -> None:
    config = config_from_gguf(metadata(), TENSORS)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert config | expected == config


@pytest.mark.parametrize(
    ("architecture", "class_name"),
    [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_other_architectures_have_their_class(architecture: str, class_name: str) -> None:
    changes = {"attention.key_length": 32}
    config = config_from_gguf(metadata(architecture, **changes), TENSORS)
    assert config["architectures"] == [class_name]
    assert config["head_dim"] == 32


def test_biases_and_an_own_output_matrix_are_seen_by_their_tensors() -> None:
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias")
    config = config_from_gguf(metadata(), tensors_with(*names))
    assert not config["tie_word_embeddings"]
    assert config["attention_bias"]
    assert config["mlp_bias"]


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", "float16"), ("F32", "float32")])
def test_the_dtype_is_that_of_the_matrices(type_name: str, dtype: str) -> None:
    tensors = [{"name": "token_embd.weight", "type": type_name, "shape": [320, 64]}]
    assert config_from_gguf(metadata(), tensors)["torch_dtype"] == dtype
    assert config_from_gguf(metadata(), TENSORS)["torch_dtype"] == "bfloat16"


def test_yarn_and_linear_scaling_keep_their_factor() -> None:
    scaled = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    assert config_from_gguf(metadata(**scaled), TENSORS)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_the_scaling_of_llama_3_is_recognised_by_its_factors() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    changes = {"attention.key_length": 64, "rope.freq_base": 500000.0}

    config = config_from_gguf(metadata(**changes), TENSORS, (plain / scaled).tolist())

    found = config["rope_scaling"]
    assert found.pop("factor") == pytest.approx(32.0)
    assert found.items() <= scaling.items()


def test_every_end_is_in_the_generation_config() -> None:
    ends = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
    }
    assert generation_config_from_gguf(ends)["eos_token_id"] == [2, 7]
