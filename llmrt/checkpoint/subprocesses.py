"""Running a Python module outside the user's process: one that imports numpy, or starts threads, or is pip.

The subprocess is this interpreter with this process's import path, so that it finds the same packages. It never
outlives the call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from llmrt.errors import ConfigError

POLL_SECONDS = 0.1

_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import runpy; " + (
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


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


class StalledError(Exception):
    """A subprocess made no progress for too long and was ended."""


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
        stall_seconds: How long that number may stay the same.
        show_errors: Let its stderr through instead of keeping it.

    Raises:
        StalledError: it was ended because it did not get on.
        ConfigError: this program has no Python interpreter to run.
    """
    command = [_interpreter(), "-c", _START, json.dumps(sys.path), module, *arguments]
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
            _wait(process, progress, stall_seconds)
        finally:
            process.kill()
            process.wait()
        return Finished(
            exit_code=process.returncode, output=_content(output), errors=_content(errors)
        )


def _wait(process: subprocess.Popen[bytes], progress: Callable[[], int], limit: float) -> None:
    last, since = progress(), time.monotonic()
    while True:
        try:
            process.wait(timeout=POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass
        now = progress()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            raise StalledError(f"no progress for {limit:.0f} s")


def _interpreter() -> str:
    # In a frozen program sys.executable is the program itself: running it would start it all over again.
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ConfigError(
            "This program is frozen or embedded and has no Python interpreter to prepare the model with. "
            "Give it a directory with safetensors files, which needs no preparation."
        )
    return sys.executable


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
