"""The engines that are open in this process: closed when the interpreter exits.

The one piece of module state in llmrt: nobody else is there to ask at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

CLOSE_AT_EXIT_SECONDS = 3.0


class Closeable(Protocol):
    """What `track` keeps an eye on."""

    owner_pid: int

    def ask_to_close(self) -> None:
        """Begin to close, without waiting."""
        ...

    def close(self, timeout: float) -> object:
        """Close within *timeout* seconds."""
        ...


_live: weakref.WeakSet[Closeable] = weakref.WeakSet()


def track(session: Closeable) -> None:
    """Close *session* when the interpreter exits, unless it is closed by then."""
    if not _live:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _live.add(session)


def _close_all() -> None:
    own = [session for session in list(_live) if session.owner_pid == os.getpid()]
    for session in own:
        session.ask_to_close()
    for session in own:
        with contextlib.suppress(Exception):  # nobody is there any more to be told
            session.close(CLOSE_AT_EXIT_SECONDS)
