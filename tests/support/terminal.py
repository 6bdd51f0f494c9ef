"""A program at a terminal of its own, typed to as a person would."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Terminal:
    """The user's end of a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._screen = b""

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Return what was written up to this text, which counts as read from now on."""
        deadline = time.monotonic() + seconds
        while text.encode() not in self._screen:
            chunk = self._read(deadline)
            if not chunk:
                raise AssertionError(f"no {text!r} on the terminal, only: {self._screen!r}")
            self._screen += chunk
        before, _, self._screen = self._screen.partition(text.encode())
        return before.decode(errors="replace")

    def type(self, line: str) -> None:
        """Type a line and press Enter."""
        os.write(self._master, line.encode() + b"\r")

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C: the terminal interrupts all its foreground processes."""
        os.write(self._master, b"\x03")

    def wait_for_exit(self, seconds: float = 60.0) -> int:
        """Return the exit code; what is still written is read, or the program could hang."""
        deadline = time.monotonic() + seconds
        while chunk := self._read(deadline):
            self._screen += chunk
        return self.process.wait(max(1.0, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bytes:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        try:
            return os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody holds the other end any more
            return b""


@contextlib.contextmanager
def open_terminal(
    command: Sequence[str], cwd: Path, environ: Mapping[str, str] = os.environ
) -> Iterator[Terminal]:
    """Run a program at a new terminal; it is killed if it still runs at the end."""
    master, slave = pty.openpty()
    # A leader of a session gets the first terminal it opens as its own, and Ctrl-C from it.
    opening = f'exec "$0" "$@" <>{os.ttyname(slave)} >&0 2>&0'
    process = subprocess.Popen(
        ["sh", "-c", opening, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=cwd,
        env={**environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
