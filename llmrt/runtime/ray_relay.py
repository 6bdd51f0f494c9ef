"""Relay: what an actor does while its rank runs. It stands between the engine and the guard."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Generator

from llmrt.runtime.channel import Call, Channel, Note, encode
from llmrt.runtime.events import Event, GuardExited, RankDoomed, Shutdown
from llmrt.runtime.launchers.mp import GuardHandle

_MAX_UNSENT_BYTES = 1 << 20
_END_SECONDS = 10.0
_FLUSH_SECONDS = 1.0


class Relay:
    """Carries a guard's events to the engine and its commands back, and ends when either does."""

    def __init__(self, control: socket.socket, raylet_pid: int | None) -> None:
        self._control = Channel(control)
        self._raylet_pid = raylet_pid
        self._is_over = False
        self._has_lost_ray = False

    def say(self, event: Event) -> None:
        """Send an event."""
        self._control.send(encode(Note(0, event)))

    def run(self, handle: GuardHandle) -> None:
        """Carry until the guard is gone; where the engine or Ray is gone, end the guard."""
        try:
            with selectors.EpollSelector() as selector, self._watch_ray(selector):
                selector.register(self._control, selectors.EVENT_READ)
                selector.register(handle.fileno(), selectors.EVENT_READ)
                while not (self._is_over or self._has_lost_ray or self._control.is_at_end):
                    self._turn(selector, handle)
            if not self._is_over:
                self._end(handle)
        finally:
            handle.release()
        self.flush()

    @contextlib.contextmanager
    def _watch_ray(self, selector: selectors.EpollSelector) -> Generator[None]:
        """Notice the end of this node's raylet, which Ray's own code may notice much later."""
        try:
            fd = None if self._raylet_pid is None else os.pidfd_open(self._raylet_pid)
        except OSError:  # an old kernel, or another process namespace
            fd = None
        if fd is None:
            yield
            return
        selector.register(fd, selectors.EVENT_READ, self._lose_ray)
        try:
            yield
        finally:
            os.close(fd)

    def _lose_ray(self) -> None:
        self._has_lost_ray = True
        # Said before anything is ended: Ray's own code may end this process at any moment.
        cause = "The raylet of its node has ended, and Ray's workers end with it."
        self.say(RankDoomed(rank=0, cause=cause))

    def _turn(self, selector: selectors.EpollSelector, handle: GuardHandle) -> None:
        num_unsent = self._control.num_unsent_bytes
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if num_unsent else 0)
        selector.modify(self._control, wanted)
        # A guard that is not read drops what its rank prints, and counts it.
        selector.modify(
            handle.fileno(), selectors.EVENT_READ if num_unsent < _MAX_UNSENT_BYTES else 0
        )
        keys = [key for key, _ in selector.select()]
        ready = {key.fd for key in keys}
        for notice in (key.data for key in keys if key.data is not None):
            notice()
        if self._control.fileno() in ready:
            self._control.flush()
            for frame in self._control.receive():
                if isinstance(frame, Call):
                    handle.tell(frame.body)
        if handle.fileno() in ready:
            self._pass_on(handle)

    def _pass_on(self, handle: GuardHandle) -> None:
        for event in handle.events():
            self._is_over = self._is_over or isinstance(event, GuardExited)
            self.say(event)

    def _end(self, handle: GuardHandle) -> None:
        """End the guard: nobody is left to do it."""
        handle.tell(Shutdown())
        deadline = time.monotonic() + _END_SECONDS
        with selectors.EpollSelector() as selector:
            selector.register(handle.fileno(), selectors.EVENT_READ)
            while not self._is_over and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self._pass_on(handle)

    def flush(self) -> None:
        """Send what is left, for a moment."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        with selectors.EpollSelector() as selector:
            selector.register(self._control, selectors.EVENT_WRITE)
            while self._control.num_unsent_bytes and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self._control.flush()
