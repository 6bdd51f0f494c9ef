"""How a guard comes into the world: a fresh interpreter, or a copy of this process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Generator, Mapping

from llmrt.runtime import command_line, descriptors, guard, openmp
from llmrt.runtime.library_settings import library_settings


def spawn_guard(
    control: socket.socket,
    stdout_fd: int,
    stderr_fd: int,
    python: tuple[str, ...],
    env: Mapping[str, str],
) -> int:
    """Start a guard in a fresh interpreter; return its pid."""
    call = f"main({guard.CONTROL_FD}, {os.getpid()})"
    command = command_line.run_function(python, "llmrt.runtime.guard", call)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_CLOSE, fd) for fd in descriptors.inheritable_descriptors()
    ]
    actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    for source, fd in ((stdout_fd, 1), (stderr_fd, 2), (control.fileno(), guard.CONTROL_FD)):
        actions.append((os.POSIX_SPAWN_DUP2, source, fd))
    return os.posix_spawn(
        command[0],
        command,
        {**os.environ, **env, **library_settings({**os.environ, **env})},
        file_actions=actions,
        setsid=True,  # out of reach of the terminal's signals from the first moment
        setsigmask=[signal.SIGINT],
        setsigdef=[s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)],
    )


def fork_guard(control: socket.socket, stdout_fd: int, stderr_fd: int) -> int:
    """Start a guard as a copy of this process; return its pid."""
    owner_pid = os.getpid()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    was_collecting = gc.isenabled()
    try:
        gc.disable()  # garbage of the user's is finalised here, not in the copy
        with openmp.released_pools(), _unwarned():
            pid = os.fork()
            if pid == 0:
                _be_guard(control.fileno(), stdout_fd, stderr_fd, owner_pid)
    finally:
        if was_collecting:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return pid


def _be_guard(control_fd: int, stdout_fd: int, stderr_fd: int, owner_pid: int) -> None:
    try:
        gc.freeze()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, fd in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
            if source != fd:
                os.dup2(source, fd)
        guard.main(control_fd, owner_pid, is_fork=True)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


@contextlib.contextmanager
def _unwarned() -> Generator[None]:
    """Silence Python's warning about forks of processes with threads: that is dealt with here.

    One entry goes in and the same comes out; `catch_warnings` would undo what other threads do
    meanwhile.
    """
    if sys.version_info < (3, 12):
        yield
        return
    warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\(\)", DeprecationWarning)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
