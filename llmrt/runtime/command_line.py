"""The command of a fresh interpreter that finds modules as here and runs nothing of the user's."""

from __future__ import annotations

import contextlib
import os
import sys


def run_function(python: tuple[str, ...], module: str, call: str) -> list[str]:
    """Return the command that imports a module of ours, found as here, and calls `call` from it.

    With `-c` the new process has an empty `__main__`: nothing of the user's program runs again.
    """
    name = call.partition("(")[0]
    code = f"import sys; sys.path[:] = {_absolute_path()}; from {module} import {name}; {call}"
    return [*python, "-c", code]


def _absolute_path() -> str:
    entries: list[str] = []
    for entry in sys.path:
        with contextlib.suppress(OSError):  # "" stands for a directory that may be gone
            entries.append(os.path.abspath(entry))
    return ascii(entries)  # escapes the undecodable bytes a path may hold
