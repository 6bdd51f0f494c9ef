"""Checkpoint: where the parts of one model lie on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model that is complete on this machine: nothing more has to be fetched."""

    name: str
    """What to call it: a hub id, or the name of its directory or file."""
    directory: Path
    """Holds config.json, the tokenizer's files, the chat template and generation_config.json."""
    weights: str
    """A directory of safetensors files, or a GGUF file."""
    gguf_index: str | None = None
    """The tensor index (JSON) of that GGUF file; None for safetensors."""
    config: dict[str, Any] = field(repr=False)
    """config.json, parsed."""
    generation_config: dict[str, Any] | None = field(default=None, repr=False)
    """generation_config.json, parsed; None where there is none."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether it can turn text into tokens; a model without can still be given token ids."""
        return (self.directory / "tokenizer.json").is_file()


def read_checkpoint(
    directory: Path, *, name: str, weights: str, gguf_index: str | None = None
) -> Checkpoint:
    """Read the configuration files of *directory*, which must hold a config.json.

    Raises:
        ConfigError: one of them is not a JSON object.
    """
    generation_path = directory / "generation_config.json"
    return Checkpoint(
        name=name,
        directory=directory,
        weights=weights,
        gguf_index=gguf_index,
        config=read_json_object(directory / "config.json"),
        generation_config=read_json_object(generation_path) if generation_path.is_file() else None,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in *path*.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Fetch this file again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object. Fetch this file again.")
    return content  # pyright: ignore[reportUnknownVariableType]
