"""Whose an engine is: the process that opened it, never a fork of that process."""

from __future__ import annotations

import os

from llmrt.errors import EngineClosedError


def check_owner(owner_pid: int) -> None:
    """Refuse what a fork of the owner asks for.

    Raises:
        EngineClosedError: this is another process.
    """
    if owner_pid != os.getpid():
        raise EngineClosedError(
            f"this engine belongs to process {owner_pid}; this is a fork of it (process "
            f"{os.getpid()}), which can neither use nor close it. Open an engine of its own here."
        )
