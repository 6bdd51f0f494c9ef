"""The cache folder, and how an entry gets into it: whole or not at all, made by one process.

An entry is built in a folder beside it, under a lock, and renamed into place. The lock is on an
open file, and subprocesses that help to build inherit it: it is free again when the last of them
has ended, however it ended, so whoever holds it may delete what an interrupted build has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmrt.errors import ConfigError

LOCK_POLL_SECONDS = 0.1
LOCK_WAIT_SECONDS = 1800.0
"""How long another process may take to build the same entry; the default model is 93 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The right to build one cache entry, and the room to do it."""

    folder: Path
    """Empty at the start, deleted at the end; on the same file system as the entry."""
    lock_fd: int
    """Pass it on to subprocesses that write into the folder."""


def cache_folder() -> Path:
    """Return llmrt's cache folder: $LLMRT_CACHE, else llmrt under the user's cache folder."""
    explicit = os.environ.get("LLMRT_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if user_cache and os.path.isabs(user_cache):
        return Path(user_cache) / "llmrt"
    return Path("~/.cache/llmrt").expanduser()


@contextmanager
def building(entry: Path, *, on_wait: Callable[[], None] = lambda: None) -> Generator[Build]:
    """Hold the lock of *entry* and an empty folder to build it in.

    Look again whether the entry exists: another process may have built it meanwhile.

    Raises:
        ConfigError: the cache folder cannot be written, or another process holds the lock too long.
    """
    lock_fd = _open_lock(entry)
    folder = entry.with_name(entry.name + ".partial")
    try:
        _wait_for_lock(lock_fd, entry, on_wait)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir()
            yield Build(folder=folder, lock_fd=lock_fd)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock_fd)


def _open_lock(entry: Path) -> int:
    path = entry.with_name(entry.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"The cache folder {path.parent} cannot be written ({error.strerror}). "
            "Name one that can be in the environment variable LLMRT_CACHE."
        ) from error


def _wait_for_lock(lock_fd: int, entry: Path, on_wait: Callable[[], None]) -> None:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while not _try_lock(lock_fd, entry):
        on_wait()
        if time.monotonic() > deadline:
            raise ConfigError(
                f"Another process has been building {entry} for {LOCK_WAIT_SECONDS:.0f} s. "
                f"Find it with `fuser {entry}.lock`, end it, and try again."
            )
        time.sleep(LOCK_POLL_SECONDS)


def _try_lock(lock_fd: int, entry: Path) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise ConfigError(
            f"The file system of {entry.parent} has no file locks ({error.strerror}). "
            "Name a cache folder on another one in the environment variable LLMRT_CACHE."
        ) from error
    return True
