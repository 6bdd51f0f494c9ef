"""The C compiler of this machine."""

from __future__ import annotations

import os
import shlex
import shutil


def compiler_command() -> list[str] | None:
    """Return the command of the C compiler: $CC, else gcc or cc; None where there is none."""
    try:
        command = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quotation without its end
        return None
    if command:
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("gcc", "cc") if shutil.which(name)), None)
