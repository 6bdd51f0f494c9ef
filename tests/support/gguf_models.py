"""Whole little GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.support.tokenizers import SPECIALS, byte_level_backend, llama_backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 1


def write_gguf_model(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Write a model with random weights and one of the small tokenizers.

    Args:
        path: Where to.
        architecture: GGUF's name.
        tokenizer: `gpt2` (byte-level) or `llama` (SentencePiece).
        metadata: More keys, or other values; strings, numbers and booleans.
        tensors: More tensors.
        without: Keys to leave out.
    """
    writer = GGUFWriter(path, architecture)
    entries = _shape(architecture) | _vocabulary(tokenizer) | dict(metadata or {})
    for key, value in entries.items():
        if key not in without:
            _add(writer, key, value)
    for name, tensor in (
        _weights(len(entries["tokenizer.ggml.tokens"])) | dict(tensors or {})
    ).items():
        if name not in without:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shape(architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
    }


def _vocabulary(kind: str) -> dict[str, Any]:
    backend = byte_level_backend() if kind == "gpt2" else llama_backend()
    ids = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_type(token) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    if kind == "gpt2":
        entries["tokenizer.ggml.pre"] = "gpt-2"
        entries["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(backend)]
    else:
        # A longer piece is a better one, as in a trained vocabulary.
        entries["tokenizer.ggml.scores"] = [float(len(token)) for token in tokens]
    return entries


def _merges(backend: Any) -> list[list[str]]:
    return json.loads(backend.to_str())["model"]["merges"]


def _type(token: str) -> int:
    if token in SPECIALS:
        return CONTROL
    if token == "<tool>":
        return USER_DEFINED
    return BYTE if token.startswith("<0x") else NORMAL


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
