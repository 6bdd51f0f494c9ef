"""The safetensors files of a checkpoint: which there are, and whether each is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrt.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, little-endian."""
LFS_PREFIX = b"version https://git-lfs"


def find_shards(directory: Path) -> Mapping[Path, tuple[str, ...]]:
    """Return the files of a checkpoint, with the tensors that its index promises in each.

    Raises:
        ConfigError: there are none, or the index names one that is not there.
    """
    if (directory / SINGLE_FILE).exists():
        return {directory / SINGLE_FILE: ()}
    if not (directory / INDEX_FILE).exists():
        raise ConfigError(_explain_no_weights(directory))
    shards: dict[Path, tuple[str, ...]] = {}
    for name, file_name in _read_index(directory / INDEX_FILE).items():
        path = directory / file_name
        shards[path] = (*shards.get(path, ()), name)
    _require_present(directory, shards)
    return shards


def read_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor in a safetensors file, from its header.

    Raises:
        ConfigError: it is no safetensors file, or shorter than its header says.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(len(LFS_PREFIX))
        if first == LFS_PREFIX:
            raise ConfigError(
                f"{path} is a Git LFS pointer of {file_bytes} bytes, not the weights themselves. "
                f"Run `git lfs pull` in {path.parent}, or download the model again."
            )
        header_bytes = int.from_bytes(first[:LENGTH_BYTES], "little")
        if file_bytes < LENGTH_BYTES + header_bytes:
            raise ConfigError(
                f"{path} is not a safetensors file, or is damaged: its first bytes announce a "
                f"header of {header_bytes:,} bytes, and the file has {file_bytes:,}. Download it "
                "again."
            )
        file.seek(LENGTH_BYTES)
        spans = _parse_spans(path, file.read(header_bytes))
    announced = LENGTH_BYTES + header_bytes + max((end for _, end in spans.values()), default=0)
    if file_bytes < announced:
        raise ConfigError(
            f"{path} is cut short: its header describes {announced:,} bytes, and the file has "
            f"{file_bytes:,}. Download it again."
        )
    return {name: end - begin for name, (begin, end) in spans.items()}


def _parse_spans(path: Path, header: bytes) -> dict[str, tuple[int, int]]:
    try:
        entries: dict[str, Any] = json.loads(header)
        return {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not a safetensors file, or is damaged: its header cannot be read "
            f"({error}). Download it again."
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_bytes())["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not the index of a sharded checkpoint ({type(error).__name__}: {error}). "
            "Download it again."
        ) from error


def _require_present(directory: Path, shards: Mapping[Path, tuple[str, ...]]) -> None:
    missing = [path.name for path in shards if not path.exists()]
    if missing:
        raise ConfigError(
            f"{directory / INDEX_FILE} names {len(shards)} shard(s), and {len(missing)} of them "
            f"cannot be found: {', '.join(missing)}. Download the model again."
        )


def _explain_no_weights(directory: Path) -> str:
    pickled = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return (
            f"{directory} has its weights only as {pickled[0]}, a pickle: reading one can run any "
            "code, so llmrt does not. Convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(directory).save_pretrained(another_directory)."
        )
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    found = f" (it has {', '.join(others)})" if others else ""
    return (
        f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there{found}. "
        "Name the directory of a whole checkpoint."
    )
