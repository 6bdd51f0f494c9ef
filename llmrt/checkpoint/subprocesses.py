"""Running a Python module outside the user's process: it imports numpy, starts threads, or is pip.

The subprocess is this interpreter with this process's import path, so that it finds the same
packages. It never outlives the call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from llmrt.runtime.interpreter import find_executable

POLL_SECONDS = 0.1

_START = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""The path comes first: with `-c` the current folder would be searched before anything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a subprocess ended and what it said."""

    exit_code: int
    output: str
    errors: str

    @property
    def last_error_line(self) -> str:
        """The last line it wrote to stderr; what ended it, where there is none."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with code {self.exit_code}"


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    inherit_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    progress: Callable[[], int] = lambda: 0,
    stall_seconds: float,
    show_errors: bool = False,
) -> Finished:
    """Run `python -m module arguments` to its end.

    Args:
        module: A dotted name that this process could import.
        arguments: Its command line.
        inherit_fds: Descriptors it keeps open.
        env: Environment variables beside this process's own.
        progress: Called while it runs; a number that changes as long as it gets on.
        stall_seconds: How long that number may stay the same before the subprocess is ended.
        show_errors: Let its stderr through instead of keeping it.

    Raises:
        ConfigError: this program has no Python interpreter to run.
    """
    command = [find_executable(), "-c", _START, "\n".join(sys.path), module, *arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if show_errors else errors,
            env={**os.environ, **(env or {})},
            pass_fds=tuple(inherit_fds),
        )
        try:
            in_time = _wait(process, progress, stall_seconds)
        finally:
            process.kill()
            process.wait()
        said = _content(errors) if in_time else f"no progress for {stall_seconds:.0f} s"
        return Finished(exit_code=process.returncode, output=_content(output), errors=said)


def _wait(process: subprocess.Popen[bytes], progress: Callable[[], int], limit: float) -> bool:
    """Return whether the process ended before it stood still for *limit* seconds."""
    last, since = progress(), time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_SECONDS)
            return True
        now = progress()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            return False


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
