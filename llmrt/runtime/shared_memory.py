"""One anonymous memory file per engine, mapped by every rank of a host.

Its first page is the runtime's: a 32-bit word at offset 0 that turns from 0 to 1 when the ranks
must stop waiting for one another. What the workers asked for begins at offset 4096.
"""

from __future__ import annotations

import mmap
import os

from llmrt.runtime import proc

HEADER_BYTES = 4096
_WORD = b"\x01\x00\x00\x00"


class SharedMemoryError(Exception):
    """The memory that the ranks were to share could not be had."""


def create(num_bytes: int) -> int:
    """Return the descriptor of a memory file with room for the header and `num_bytes`, allocated.

    Memory that is only promised would end a worker with SIGBUS at its first touch.
    """
    total = HEADER_BYTES + num_bytes
    available = proc.available_memory_bytes()
    if total > available:
        raise SharedMemoryError(_too_little(total, available, "that is more than there is"))
    fd = os.memfd_create("llmrt")
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        os.close(fd)
        raise SharedMemoryError(_too_little(total, available, str(error))) from error
    return fd


def _too_little(asked: int, available: int, why: str) -> str:
    return (
        f"Shared memory for the ranks could not be allocated: asked for {asked} bytes, "
        f"{available} are available ({why}). Free some memory, or start fewer ranks."
    )


class AbortWord:
    """The word in the first page: set once, read by whoever waits for a peer."""

    def __init__(self, memory_fd: int) -> None:
        self._page = mmap.mmap(memory_fd, HEADER_BYTES)

    def set(self) -> None:
        """Tell every rank to stop waiting."""
        self._page[: len(_WORD)] = _WORD

    def is_set(self) -> bool:
        """Return whether the ranks were told to stop waiting."""
        return self._page[0] != 0
