"""How to start an interpreter that sees what this one sees, without running the user's program again."""

from __future__ import annotations

import contextlib
import os
import sys

_FLAGS = (
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("safe_path", "-P"),
)


def default_python() -> tuple[str, ...]:
    """Return this interpreter with its own flags: `-I`, `-X dev`, `-W error` and the like."""
    flags = [option for name, option in _FLAGS if getattr(sys.flags, name, 0)]
    flags += ["-O"] * sys.flags.optimize
    flags += ["-b"] * sys.flags.bytes_warning
    flags += [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():  # documented, in spite of its name
        flags += ["-X", name if value is True else f"{name}={value}"]
    return (sys.executable, *flags)


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
