"""What may run when nobody closed a group: at garbage collection and at interpreter exit."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable


def let_go(owner_pid: int, lifeline: socket.socket, sockets: Iterable[socket.socket]) -> None:
    """Let the guard read EOF, so that it ends everything and itself; release the sockets.

    Takes no lock, logs nothing and waits for nothing: it may run at any point of any thread. In a
    forked copy of the owner only the copies are released, which nobody notices.
    """
    if os.getpid() == owner_pid:
        with contextlib.suppress(OSError):
            lifeline.shutdown(socket.SHUT_RDWR)
    for sock in sockets:
        sock.close()
