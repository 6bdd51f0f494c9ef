"""What a worker sees of a GGUF file: tensors at offsets, and the index that lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

ALIGNMENT = 32


def write_gguf_tensors(
    directory: Path,
    tensors: Mapping[str, tuple[str, np.ndarray]],
    *,
    architecture: str = "llama",
    head_dim: int = 4,
) -> tuple[Path, Path]:
    """Write tensors (name: type, float32 values); return the path of the file and its index."""
    path, index_path = directory / "model.gguf", directory / "model.index.json"
    entries: list[dict[str, object]] = []
    content = bytearray(b"GGUF".ljust(ALIGNMENT, b"\0"))
    for name, (type_name, values) in tensors.items():
        stored = quantize(values, GGMLQuantizationType[type_name]).tobytes()
        entries.append(
            {
                "name": name,
                "type": type_name,
                "shape": list(values.shape),
                "offset": len(content),
                "nbytes": len(stored),
            }
        )
        content += stored + b"\0" * (-len(stored) % ALIGNMENT)
    path.write_bytes(content)
    index = {"data": entries, "architecture": architecture, "head_dim": head_dim}
    index_path.write_text(json.dumps(index | {"num_heads": 4, "num_kv_heads": 2}))
    return path, index_path
