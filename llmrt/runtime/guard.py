"""The small process that owns the workers of one engine: makes, watches, reaps and reports.

    owner ══ control socket ══ guard ──fork──► rank 0..N-1     (and owner ◄─socket pair─► rank)

Single-threaded. It imports the preloaded modules once and forks the ranks from that; it holds no
state of theirs, so it answers while a worker sits in a stuck kernel. It ends when its owner does,
and takes every descendant with it.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from typing import NoReturn

from llmrt.runtime import descriptors, prctl
from llmrt.runtime.child import replace_output_files
from llmrt.runtime.guard_loop import Guard
from llmrt.runtime.signals import reset_signals

CONTROL_FD = 3
"""Where a spawned guard finds its control socket."""


def main(control_fd: int, owner_pid: int, is_fork: bool = False) -> NoReturn:
    """Be the guard of one engine, to the end of this process; nothing is unwound."""
    code = 1
    try:
        _become_guard(owner_pid)
        os.set_inheritable(control_fd, False)
        _kept = _take_over(control_fd) if is_fork else []  # alive until the process ends
        guard = Guard(socket.socket(fileno=control_fd), owner_pid, is_fork)
        code = guard.run()
    except BaseException:
        # Not to sys.stderr: in a fork that is the user's own object until it is replaced.
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _become_guard(owner_pid: int) -> None:
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != owner_pid:  # it died before the line above
        os._exit(1)
    reset_signals()
    if os.getsid(0) != os.getpid():
        os.setsid()
    prctl.set_name("llmrt-guard")
    prctl.become_subreaper()


def _take_over(control_fd: int) -> list[object]:
    """Leave alone what a copy of the user's process inherited; return what nobody may collect."""
    descriptors.replace_inherited({0, 1, 2, control_fd})
    return replace_output_files()
