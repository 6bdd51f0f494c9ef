"""config.json as transformers 4 and 5 write it, and everything in it that cannot be served."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig, check_tp

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}


def read(base: dict[str, Any] = LLAMA, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**base, **changes})


def test_the_two_formats_of_transformers_differ() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = read(
        torch_dtype="bfloat16",
        rope_theta=500000.0,
        rope_scaling={"type": "llama3", "original_max_position_embeddings": 32, **scaling},
    )
    new = read(
        dtype="bfloat16",
        rope_parameters={
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 32,
            **scaling,
        },
    )
    assert old == new
    assert old.dtype == "bfloat16"
    assert old.rope.kind == "llama3"
    assert old.rope.theta == 500000.0


def test_a_config_cannot_cross_to_a_worker() -> None:
    config = read(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_unsupported_architecture_is_not_named() -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        read(architectures=["GPT2LMHeadModel"])


@pytest.mark.parametrize("architectures", [None, []])
def test_a_config_without_architecture_is_read(architectures: object) -> None:
    with pytest.raises(ConfigError, match="no 'architectures'"):
        read(architectures=architectures)


def test_eos_ids_replace_each_other() -> None:
    config = ModelConfig.from_dict({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (2, 7, 9)
    assert ModelConfig.from_dict(LLAMA, {"eos_token_id": 5}).eos_token_ids == (5,)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_qwen2_without_the_flag_has_no_bias() -> None:
    assert read(QWEN2).qkv_bias
    assert not read(QWEN2).o_bias
    assert not read(LLAMA).qkv_bias


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 256),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            128,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                }
            },
            256,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            128,
        ),
    ],
)
def test_scaling_is_left_out_of_the_context_limit(changes: dict[str, Any], limit: int) -> None:
    assert read(**changes).max_position_embeddings == limit


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            (None,) * 4,
        ),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8, 8, 8),
        ),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 4,
            },
            (None,) * 4,
        ),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"sliding_window": None, "use_sliding_window": True}, (None,) * 4),
    ],
)
def test_a_window_is_used_though_switched_off(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(QWEN2, **changes).windows == windows


def test_mistral_loses_its_window_and_llama_gets_one() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert read(mistral).windows == (8,) * 4
    assert read(mistral, sliding_window=None).windows == (None,) * 4
    assert read(LLAMA, sliding_window=8).windows == (None,) * 4


def test_head_dim_is_not_derived() -> None:
    derived = {k: v for k, v in LLAMA.items() if k != "head_dim"}
    assert read(derived, hidden_size=60).head_dim == 10
    with pytest.raises(ConfigError, match=r"hidden_size=64.*num_attention_heads=6"):
        read(derived)


def test_kv_heads_default_to_something_else_than_query_heads() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"hidden_act": "swiglu"}, "hidden_act"),
        ({"torch_dtype": "float64"}, "torch_dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": 4}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_a_value_that_cannot_be_is_not_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**changes)


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["chunked_attention"] * 4, "full"])
def test_layer_types_that_do_not_fit_are_read(kinds: object) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        read(QWEN2, use_sliding_window=True, sliding_window=8, layer_types=kinds)


def test_more_ranks_than_heads_are_accepted() -> None:
    check_tp(read(), 6)
    with pytest.raises(ConfigError, match=r"tp=7.*6 attention heads.*1 to 6"):
        check_tp(read(), 7)
