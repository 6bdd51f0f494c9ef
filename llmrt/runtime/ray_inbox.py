"""What the thread that talks to Ray, and Ray's own, have to say to the engine's thread."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from dataclasses import dataclass

from llmrt.runtime import descriptors
from llmrt.runtime.doorway import Doorway
from llmrt.runtime.events import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorPlaced:
    """Ray has started an actor for a rank."""

    rank: int
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorLost:
    """Ray says that an actor has ended, and why."""

    rank: int
    cause: str


News = Event | Doorway | ActorPlaced | ActorLost


class Inbox:
    """What other threads have to say to the engine's; its descriptor is readable while there is."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._bell, self._button = descriptors.socket_pair()
        for sock in (self._bell, self._button):
            sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._bell.fileno()

    def post(self, news: News) -> None:
        """Leave a message. Any thread, also after the end."""
        self._news.append(news)
        self.ring()

    def ring(self) -> None:
        """Have `take` called."""
        with contextlib.suppress(OSError):  # full, so it rings; or closed, so nobody listens
            self._button.send(b"\0", socket.MSG_NOSIGNAL)

    def take(self) -> list[News]:
        """Return the messages so far."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        news: list[News] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def close(self) -> None:
        """Release the descriptors."""
        self._bell.close()
        self._button.close()
