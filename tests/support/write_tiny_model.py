"""Write a tiny random Llama checkpoint with a byte-level tokenizer; run as a program.

A process of its own, so that the tests' process imports no torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_tokenizer(directory: Path) -> int:
    """Write a tokenizer of one token per byte, after the special ones; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def write_model(directory: Path, seed: int, sizes: dict[str, Any]) -> None:
    """Write random weights and their config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "model_type": "llama",
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
        **sizes,
    }
    config = AutoConfig.for_model(**options)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def main() -> None:
    """Write to the directory given, with the seed, number of heads and further options given."""
    directory, seed, num_heads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    directory.mkdir(parents=True)
    sizes = {
        "vocab_size": write_tokenizer(directory),
        "hidden_size": 16 * num_heads,
        "num_attention_heads": num_heads,
        **json.loads(sys.argv[4]),
    }
    write_model(directory, seed, sizes)


if __name__ == "__main__":
    main()
