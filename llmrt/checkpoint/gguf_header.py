"""The subprocess that reads a GGUF header: `python -m llmrt.checkpoint.gguf_header FILE FOLDER`.

It writes what llmrt needs of it into the folder, as JSON files. If that cannot be, it prints one
sentence and exits with 1. The user's process never imports this module: it loads numpy.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from llmrt.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf
from llmrt.checkpoint.gguf_tokenizer import tokenizer_config_from_gguf, tokenizer_from_gguf
from llmrt.errors import ConfigError

MEMORY_BEYOND_FILE = 2 << 30
"""A damaged header can claim arrays of any length: the reader stops at this much memory."""


def write_entry(path: Path, folder: Path) -> None:
    """Read the header of *path* and write the JSON files of a cache entry.

    Raises:
        ConfigError: the file is damaged or not supported.
    """
    reader = _read(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = _tensors(reader, path)
    rope_factors = _rope_factors(reader)
    config = config_from_gguf(metadata, tensors, rope_factors)
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": generation_config_from_gguf(metadata),
        "tensors.json": {
            # What config.json expresses as rope_scaling is not a weight.
            "data": [t for t in tensors if t["name"] != "rope_freqs.weight"],
            "head_dim": config["head_dim"],
            "num_heads": config["num_attention_heads"],
            "num_kv_heads": config["num_key_value_heads"],
            "architecture": metadata["general.architecture"],
        },
    }
    if "tokenizer.ggml.tokens" in metadata:
        files["tokenizer.json"] = tokenizer_from_gguf(metadata)
        files["tokenizer_config.json"] = tokenizer_config_from_gguf(metadata)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        return GGUFReader(path)
    except MemoryError:
        raise
    except Exception as error:
        # The reader trusts its input: where that is damaged it fails in any way there is.
        raise ConfigError(
            f"The file is damaged or cut short ({type(error).__name__}: {error}). Fetch it again."
        ) from error


def _tensors(reader: Any, path: Path) -> list[dict[str, Any]]:
    size = path.stat().st_size
    tensors: list[dict[str, Any]] = []
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ConfigError(
                f"The file is cut short: tensor {tensor.name} ends at byte "
                f"{tensor.data_offset + tensor.n_bytes} of {size}. Fetch it again."
            )
        tensors.append(
            {
                "name": tensor.name,
                "type": tensor.tensor_type.name,
                "shape": [int(size) for size in reversed(tensor.shape)],
                "offset": int(tensor.data_offset),
                "nbytes": int(tensor.n_bytes),
            }
        )
    return tensors


def _rope_factors(reader: Any) -> list[float] | None:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return [float(factor) for factor in tensor.data]
    return None


def main() -> int:
    """Run the command line of this module."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    _limit_memory(path.stat().st_size + MEMORY_BEYOND_FILE)
    problem = ""
    try:
        write_entry(path, folder)
    except ConfigError as error:
        problem = str(error)
    except MemoryError:
        problem = "The file is damaged: its header claims more than memory holds. Fetch it again."
    # Out here the memory is free again that the failed reading held.
    if problem:
        print(problem)
    return 1 if problem else 0


def _limit_memory(num_bytes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [num_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))


if __name__ == "__main__":
    sys.exit(main())
