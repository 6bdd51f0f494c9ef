"""The signal state of llmrt's own processes, whatever the process that made them had."""

from __future__ import annotations

import contextlib
import signal

STACK_DUMP_SIGNAL = int(signal.SIGRTMIN) + 9
"""Makes a worker write its stacks; a real-time signal, as libraries use those with names."""

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""What every fresh interpreter ignores, so that a write to a closed pipe is an OSError."""


def reset_signals() -> None:
    """Set every disposition to its default and block SIGINT alone.

    Ignored and blocked signals survive fork and exec: an ignored SIGCHLD would lose every exit
    status. Ctrl-C goes to a whole terminal group and is meant for the user's process.
    """
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        wanted = signal.SIG_IGN if signum in _IGNORED_BY_PYTHON else signal.SIG_DFL
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
            signal.signal(signum, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
