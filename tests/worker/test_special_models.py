"""Shapes and options that are easy to get wrong, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrt.errors import ConfigError
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.tensor_parallel import SingleGroup, TPGroup
from tests.support.checkpoints import Checkpoint, random_prompt, write_checkpoint
from tests.support.dict_reader import DictReader
from tests.support.rank_threads import on_every_rank, thread_groups
from tests.support.tiny_driver import (
    FLOAT32_CPU,
    TinyDriver,
    logits_at_every_position,
)

pytestmark = pytest.mark.slow

ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def assert_equals_transformers(checkpoint: Checkpoint, tp: int, length: int = 40) -> None:
    prompt = random_prompt(length, checkpoint.config.vocab_size)
    prompt[-1] = checkpoint.config.vocab_size - 1
    expected_TV = checkpoint.logits(prompt)
    found_TV = logits_at_every_position(checkpoint, tp, prompt)
    torch.testing.assert_close(found_TV, expected_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("rope", ROPE)
def test_scaled_rope_differs_from_transformers(tmp_path: Path, rope: str, length: int) -> None:
    checkpoint = write_checkpoint(
        tmp_path,
        "llama",
        max_position_embeddings=32,
        rope_parameters={"rope_theta": 10000.0, **ROPE[rope]},
    )
    assert_equals_transformers(checkpoint, tp=1, length=length)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_dynamic_rope_depends_on_how_a_prompt_was_cut(tmp_path: Path, chunk: int) -> None:
    checkpoint = write_checkpoint(
        tmp_path,
        "llama",
        max_position_embeddings=32,
        rope_parameters={"rope_theta": 10000.0, **ROPE["dynamic"]},
    )
    prompts = [random_prompt(n, 320, seed=n) for n in (20, 50)]
    found = TinyDriver(checkpoint).generate(prompts, num_tokens=30, chunk=chunk)
    # transformers keeps what the longest prompt so far did to its frequencies: shortest first.
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == checkpoint.greedy(prompt, 30)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_biases_are_dropped_or_added_more_than_once(tmp_path: Path, tp: int) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert checkpoint.config.o_bias
    assert checkpoint.config.mlp_bias
    assert_equals_transformers(checkpoint, tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_attention_bias_of_qwen3_is_dropped(tmp_path: Path, tp: int) -> None:
    assert_equals_transformers(write_checkpoint(tmp_path, "qwen3", attention_bias=True), tp)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_last_tokens_of_an_odd_vocabulary_are_lost(
    tmp_path: Path, tp: int, is_tied: bool
) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", vocab_size=257, tie_word_embeddings=is_tied)
    assert_equals_transformers(checkpoint, tp)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp"),
    [(8, 2, 3), (8, 1, 2), (8, 2, 4), (10, 2, 4), (6, 6, 5), (5, 1, 5), (9, 3, 9)],
)
def test_heads_that_do_not_divide_give_other_logits(
    tmp_path: Path, num_heads: int, num_kv_heads: int, tp: int
) -> None:
    checkpoint = write_checkpoint(
        tmp_path,
        "llama",
        hidden_size=8 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
    )
    assert_equals_transformers(checkpoint, tp)


def test_an_mlp_narrower_than_the_ranks_fails(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", intermediate_size=3)
    assert_equals_transformers(checkpoint, tp=4)


@pytest.mark.parametrize("head_dim", [8, 48])
def test_an_explicit_head_dim_is_overlooked(tmp_path: Path, head_dim: int) -> None:
    checkpoint = write_checkpoint(tmp_path, "mistral", head_dim=head_dim, sliding_window=None)
    assert_equals_transformers(checkpoint, tp=2)


@pytest.mark.parametrize(
    "options",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "full_attention", "full_attention"],
        },
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_is_in_the_wrong_layers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    checkpoint = write_checkpoint(tmp_path, family, **options)
    assert_equals_transformers(checkpoint, tp=1)
    prompts = [random_prompt(n, 320, seed=n) for n in (3, 30)]
    found = TinyDriver(checkpoint).generate(prompts, num_tokens=24, chunk=9)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == checkpoint.greedy(prompt, 24)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_is_overlooked(tmp_path: Path, activation: str) -> None:
    assert_equals_transformers(write_checkpoint(tmp_path, "llama", hidden_act=activation), tp=1)


def test_an_untied_model_without_head_is_loaded(checkpoints: dict[str, Checkpoint]) -> None:
    tensors = _tensors(checkpoints["llama"])
    del tensors["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"'lm_head\.weight'.*tie_word_embeddings"):
        _load(checkpoints["llama"], tensors)


def test_a_tied_model_that_stores_its_head_is_refused(checkpoints: dict[str, Checkpoint]) -> None:
    tensors = _tensors(checkpoints["smollm2"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _load(checkpoints["smollm2"], tensors)


def test_a_missing_tensor_is_not_named(checkpoints: dict[str, Checkpoint]) -> None:
    tensors = _tensors(checkpoints["qwen2"])
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias"):
        _load(checkpoints["qwen2"], tensors)


def test_a_tensor_of_another_shape_is_loaded(checkpoints: dict[str, Checkpoint]) -> None:
    tensors = _tensors(checkpoints["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ConfigError, match=r"up_proj\.weight.*\(159, 64\).*\(160, 64\)"):
        _load(checkpoints["llama"], tensors)


def test_a_rank_reads_the_whole_checkpoint(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["llama"]
    whole = sum(t.numel() for t in _tensors(checkpoint).values())
    items = on_every_rank(thread_groups(4), lambda g: _items_read(checkpoint, g))
    assert all(n < 0.4 * whole for n in items)


def _items_read(checkpoint: Checkpoint, group: TPGroup) -> int:
    reader = checkpoint.reader()
    Decoder(checkpoint.config, group, FLOAT32_CPU).load(reader)
    return reader.num_items_read


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return dict(checkpoint.reader()._tensors)


def _load(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    reader = DictReader(tensors)
    Decoder(checkpoint.config, SingleGroup(), FLOAT32_CPU).load(reader)
    reader.check_all_read()
