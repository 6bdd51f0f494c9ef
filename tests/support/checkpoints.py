"""Tiny random checkpoints, written by transformers, and transformers' own answers for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from llmrt.model_config import ModelConfig
from tests.support.dict_reader import DictReader

tqdm.monitor_interval = 0  # its monitor thread would stay, and count as left by a test

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIG_CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "smollm2": (
        "llama",
        {
            "tie_word_embeddings": True,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
"""By family: its configuration class, and what differs from the common sizes."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory that transformers wrote, and the model it was written from."""

    directory: Path
    reference: PreTrainedModel = field(repr=False)

    @property
    def config_dict(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.config_dict)

    def reader(self) -> DictReader:
        """Return a reader of the tensors as they are in the file."""
        from safetensors.torch import load_file

        return DictReader(load_file(self.directory / "model.safetensors"))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return transformers' logits_TV of one sequence."""
        return self.reference(torch.tensor([token_ids]), use_cache=False).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return what transformers generates greedily, EOS ignored."""
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
        )
        return out[0, len(prompt) :].tolist()


def write_checkpoint(directory: Path, model_type: str, **changes: Any) -> Checkpoint:
    """Write a random float32 model, its weights wide enough for logits that differ clearly."""
    config = _CONFIG_CLASSES[model_type](**{**_SIZES, **changes})
    generator = torch.Generator().manual_seed(sum(map(ord, model_type)) + len(changes))
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    reference.save_pretrained(directory)
    return Checkpoint(directory=directory, reference=reference)


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a family's checkpoint, without writing one."""
    model_type, differences = FAMILIES[family]
    config = _CONFIG_CLASSES[model_type](**{**_SIZES, **differences, **changes})
    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__
    return ModelConfig.from_dict({**config.to_dict(), "architectures": [architecture]})


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Return token ids that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
