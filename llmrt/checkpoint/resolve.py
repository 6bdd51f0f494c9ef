"""From what the user named to a model on this machine.

What exists here is taken from here and never touches the network.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.checkpoint.default_model import open_default_model
from llmrt.checkpoint.directory import open_directory
from llmrt.checkpoint.gguf_file import open_gguf
from llmrt.checkpoint.hub import open_hub_model
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def resolve(model: str | os.PathLike[str] | None, *, progress: Progress) -> Checkpoint:
    """Return the model that *model* names, downloading it if it must be.

    Args:
        model: None for the default model; a directory or a GGUF file; or a hub id.
        progress: Where downloads and waiting are shown.

    Raises:
        ConfigError: there is no such model, or it lacks something; the message says what to do.
    """
    if model is None:
        return open_default_model(progress)
    text = os.fspath(model)
    if not text.strip():
        raise ConfigError("model='' names no model. Give a path or a hub id, or leave it out.")
    path = Path(text).expanduser()
    if path.is_dir():
        return open_directory(path.absolute(), name=path.resolve().name)
    if path.exists():
        return _open_file(path.absolute(), progress)
    if isinstance(model, os.PathLike) or not _HUB_ID.fullmatch(text) or text.endswith(".gguf"):
        raise ConfigError(f"Model {text!r} does not exist{_place(path)}.{_suggestion(path)}")
    return open_hub_model(text, progress)


def _open_file(path: Path, progress: Progress) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"{path} is one file of a model. Give the directory: {str(path.parent)!r}."
        )
    return open_gguf(path, name=path.stem, progress=progress)


def _place(path: Path) -> str:
    return "" if path.is_absolute() else f" (looked for {path.absolute()})"


def _suggestion(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" There is no directory {parent} either. Check the path."
    near = get_close_matches(path.name, os.listdir(parent), n=1)
    if near:
        return f" Did you mean {str(path.with_name(near[0]))!r}?"
    return " Check the path; a hub id looks like 'organisation/name'."
