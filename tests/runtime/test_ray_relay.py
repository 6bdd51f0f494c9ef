"""What an actor of Ray's tells the engine of its rank, while it still can."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from llmrt.runtime.channel import Channel
from llmrt.runtime.events import ControlCommand, Event, GuardExited, RankDoomed, Shutdown
from llmrt.runtime.launchers.mp import GuardHandle
from llmrt.runtime.ray_relay import Relay


class Guard:
    """A guard that ends when it is told to; it notes what the engine knew by then."""

    def __init__(self, engine: Channel) -> None:
        self._engine = engine
        self._bell, self._button = socket.socketpair()
        self._events: list[Event] = []
        self.known_at_end: list[object] = []

    def fileno(self) -> int:
        return self._bell.fileno()

    def events(self) -> list[Event]:
        self._bell.recv(64)
        events, self._events = self._events, []
        return events

    def tell(self, command: ControlCommand) -> None:
        assert isinstance(command, Shutdown)
        self.known_at_end = [frame.body for frame in self._engine.receive()]
        self._events.append(GuardExited(pid=1, exit_code=0))
        self._button.send(b"\0")

    def release(self) -> None:
        self._bell.close()
        self._button.close()


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_engine_knows_of_the_raylets_end_before_anything_else_is_ended(
    raylet: subprocess.Popen[bytes],
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = Channel(ours)
        guard = Guard(engine)
        relay = Relay(theirs, raylet.pid)
        raylet.kill()
        relay.run(cast("GuardHandle", guard))
        (doomed,) = guard.known_at_end
        assert isinstance(doomed, RankDoomed)
        assert "raylet" in doomed.cause
        assert [type(frame.body) for frame in engine.receive()] == [GuardExited]
