from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from llmrt.config import WorkerConfig
from llmrt.model_config import ModelConfig, RopeConfig
from llmrt.worker.weights.open_weights import open_weights
from tests.support.gguf_files import write_gguf_tensors

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=4,
    hidden_size=32,
    intermediate_size=32,
    num_layers=0,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=RopeConfig(),
    tie_word_embeddings=True,
    dtype="float32",
)


def silent(phase: str, done: int = 0, total: int = 0) -> None:
    pass


def worker_config(weights: Path, gguf_index: Path | None = None) -> WorkerConfig:
    return WorkerConfig(
        model=MODEL,
        weights=str(weights),
        gguf_index=str(gguf_index) if gguf_index else None,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
    )


def test_the_same_tensor_is_read_from_either_format(tmp_path: Path) -> None:
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    name = "model.embed_tokens.weight"
    save_file({name: torch.from_numpy(values)}, tmp_path / "model.safetensors")
    path, index_path = write_gguf_tensors(tmp_path, {"token_embd.weight": ("F32", values)})
    for config in (worker_config(tmp_path), worker_config(path, index_path)):
        reader = open_weights(config, silent)
        assert torch.equal(reader.read(name), torch.from_numpy(values))
        reader.check_all_read()
        reader.close()
