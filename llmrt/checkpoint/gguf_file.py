"""A model in a GGUF file. Its header is read once, in a subprocess, and kept in the cache.

The entry holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
tensors.json. Its key is the file's path, size and time of change: another file, another entry.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from llmrt.cache_entries import Build, building, cache_folder
from llmrt.checkpoint.checkpoint import Checkpoint, read_checkpoint
from llmrt.checkpoint.subprocesses import run_module
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError

FORMAT_VERSION = 1
"""Of the files in an entry. Raise it when their content changes: older entries go unused."""
HEADER_SECONDS = 120.0
MAGIC = b"GGUF"


def open_gguf(path: Path, *, name: str, progress: Progress) -> Checkpoint:
    """Return the model in the GGUF file *path*.

    Raises:
        ConfigError: it is no GGUF file, is damaged, or describes something llmrt does not support.
    """
    _check_magic(path)
    entry = cache_folder() / "gguf" / f"{path.stem[:48]}-{_key(path)}"
    if not entry.is_dir():
        progress.phase(f"reading the header of {path.name}")
        with building(entry) as build:
            if not entry.is_dir():
                _read_header(path, build)
                os.rename(build.folder / "entry", entry)
    return read_checkpoint(
        entry, name=name, weights=str(path), gguf_index=str(entry / "tensors.json")
    )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(128)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull`.")
    if not start.startswith(MAGIC):
        raise ConfigError(
            f"{path} is not a GGUF file (it begins with {start[:4]!r}). "
            "Give a GGUF file, a directory with safetensors files, or a hub id."
        )


def _key(path: Path) -> str:
    status = path.stat()
    identity = f"{FORMAT_VERSION}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:20]


def _read_header(path: Path, build: Build) -> None:
    target = build.folder / "entry"
    target.mkdir()
    finished = run_module(
        "llmrt.checkpoint.gguf_header",
        [str(path), str(target)],
        inherit_fds=(build.lock_fd,),
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stall_seconds=HEADER_SECONDS,
    )
    if finished.exit_code != 0:
        said = finished.output.strip()
        reason = said or f"Its header could not be read: {finished.last_error_line}."
        raise ConfigError(f"{path}: {reason}")
