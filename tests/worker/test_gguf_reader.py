from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from llmrt.errors import ConfigError
from llmrt.worker.weights.gguf_names import transformers_name
from llmrt.worker.weights.gguf_reader import GgufReader, open_gguf
from tests.support.gguf_files import write_gguf_tensors

ALL_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]
UP = "model.layers.0.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def silent(phase: str, done: int = 0, total: int = 0) -> None:
    pass


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def permute_as_llama_cpp(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def open_one(directory: Path, name: str, type_name: str, values: np.ndarray) -> GgufReader:
    return open_gguf(*write_gguf_tensors(directory, {name: (type_name, values)}), silent)


@pytest.mark.parametrize("type_name", ALL_TYPES)
def test_decoded_values_are_those_of_the_gguf_package(tmp_path: Path, type_name: str) -> None:
    values = normal(6, 96) * 3
    stored = quantize(values, GGMLQuantizationType[type_name])
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType[type_name]).copy())
    reader = open_one(tmp_path, "blk.0.ffn_up.weight", type_name, values)
    assert torch.equal(reader.read(UP).float(), expected.float())
    assert reader.shape(UP) == (6, 96)


@pytest.mark.parametrize("type_name", ALL_TYPES)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(1, 3), None),
        (None, slice(32, 64)),
        (None, slice(33, 95)),
        (slice(2, 5), slice(5, 7)),
        (slice(2, 2), None),
    ],
)
def test_a_part_is_that_part_of_the_whole(
    tmp_path: Path, type_name: str, rows: slice | None, columns: slice | None
) -> None:
    reader = open_one(tmp_path, "blk.0.ffn_up.weight", type_name, normal(6, 96))
    whole, part = reader.read(UP), reader.read(UP, rows, columns)
    assert torch.equal(part, whole[rows or slice(None), columns or slice(None)])


@pytest.mark.parametrize(
    ("type_name", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.float32),
    ],
)
def test_stored_dtypes_are_kept_and_quantised_ones_become_float32(
    tmp_path: Path, type_name: str, dtype: torch.dtype
) -> None:
    reader = open_one(tmp_path, "blk.0.ffn_up.weight", type_name, normal(2, 32))
    assert reader.read(UP).dtype == dtype


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("rows", [None, slice(0, 8), slice(8, 16), slice(3, 14), slice(5, 6)])
def test_rows_of_q_come_in_the_order_of_transformers(
    tmp_path: Path, type_name: str, rows: slice | None
) -> None:
    values = normal(16, 32)
    stored = quantize(values, GGMLQuantizationType[type_name])
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType[type_name]).copy())
    tensors = {"blk.0.attn_q.weight": (type_name, permute_as_llama_cpp(values, 2))}
    reader = open_gguf(*write_gguf_tensors(tmp_path, tensors, head_dim=8), silent)
    assert torch.equal(reader.read(Q, rows), expected[rows or slice(None)])


def test_biases_of_q_and_k_are_put_in_order_too(tmp_path: Path) -> None:
    bias = normal(16)
    tensors = {
        "blk.0.attn_k.bias": ("F32", permute_as_llama_cpp(bias, 2)),
        "blk.0.attn_v.bias": ("F32", bias),
    }
    reader = open_gguf(*write_gguf_tensors(tmp_path, tensors, head_dim=8), silent)
    for part in "kv":
        read = reader.read(f"model.layers.0.self_attn.{part}_proj.bias", slice(8, 16))
        assert torch.equal(read, torch.from_numpy(bias[8:]))


def test_only_llama_files_have_their_q_rows_reordered(tmp_path: Path) -> None:
    values = normal(16, 32)
    tensors = {"blk.0.attn_q.weight": ("F32", values)}
    paths = write_gguf_tensors(tmp_path, tensors, architecture="qwen2", head_dim=8)
    assert torch.equal(open_gguf(*paths, silent).read(Q), torch.from_numpy(values))


def test_raw_rows_decode_to_what_read_returns(tmp_path: Path) -> None:
    reader = open_one(tmp_path, "blk.0.ffn_up.weight", "Q4_1", normal(4, 64))
    raw = reader.read_raw(UP, slice(1, 3))
    assert (raw.type_name, raw.num_columns, raw.data.shape) == ("Q4_1", 64, (2, 40))
    decoded = dequantize(raw.data.numpy(), GGMLQuantizationType.Q4_1)
    assert torch.equal(torch.from_numpy(decoded), reader.read(UP, slice(1, 3)))


def test_a_type_that_cannot_be_decoded_is_named_with_what_can(tmp_path: Path) -> None:
    path, index_path = write_gguf_tensors(tmp_path, {"blk.0.ffn_up.weight": ("F32", normal(2, 32))})
    index = json.loads(index_path.read_text())
    index["data"][0]["type"] = "Q6_K"
    index_path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"up_proj.* is stored as Q6_K; llmrt reads F32, F16"):
        open_gguf(path, index_path, silent)


def test_a_file_shorter_than_its_index_is_an_error(tmp_path: Path) -> None:
    path, index_path = write_gguf_tensors(tmp_path, {"blk.0.ffn_up.weight": ("F32", normal(2, 32))})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"cut short: tensor .*up_proj.* byte 288.*has 287"):
        open_gguf(path, index_path, silent)


def test_a_shape_that_does_not_fit_its_bytes_is_an_error(tmp_path: Path) -> None:
    path, index_path = write_gguf_tensors(tmp_path, {"blk.0.ffn_up.weight": ("F32", normal(2, 32))})
    index = json.loads(index_path.read_text())
    index["data"][0]["shape"] = [2, 31]
    index_path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"\[2, 31\].*cannot be 256 bytes"):
        open_gguf(path, index_path, silent)


def test_a_tensor_listed_twice_is_an_error(tmp_path: Path) -> None:
    path, index_path = write_gguf_tensors(tmp_path, {"output.weight": ("F32", normal(2, 32))})
    index = json.loads(index_path.read_text())
    index["data"] *= 2
    index_path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"'output\.weight' twice"):
        open_gguf(path, index_path, silent)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf is not a file"):
        open_gguf(tmp_path / "gone.gguf", tmp_path / "index.json", silent)


def test_tensors_outlive_the_reader(tmp_path: Path) -> None:
    reader = open_one(tmp_path, "blk.0.ffn_up.weight", "F32", normal(2, 32))
    read = reader.read(UP)
    reader.close()
    assert torch.equal(read, torch.from_numpy(normal(2, 32)))


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_norm.weight", "model.layers.12.input_layernorm.weight"),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_inp.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
    ],
)
def test_names_are_those_of_transformers(gguf_name: str, expected: str) -> None:
    assert transformers_name(gguf_name) == expected
