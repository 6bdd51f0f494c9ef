"""What a `backend=` is to the runtime: something that starts workers and reports on them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from llmrt.config import Timeouts
from llmrt.runtime.events import ControlCommand, Event
from llmrt.runtime.start_method import StartMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """The workers of one engine, before they exist."""

    entry: str
    """The worker's class, as "package.module:Class"."""
    configs: tuple[object, ...]
    """One per rank: the first argument of the worker's constructor."""
    start_method: StartMethod
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before the ranks part."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables for the workers, beside those they inherit."""
    shared_memory_bytes: int = 0
    """Memory that the ranks share, from offset 4096 of `WorkerContext.shared_memory_fd`."""
    rendezvous: bool = False
    """Whether the ranks are given a bound socket to meet at."""
    python: tuple[str, ...] = (sys.executable,)
    """How to start an interpreter, with its flags."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.configs)


class Launched(Protocol):
    """Workers that were told to start. Used by one thread."""

    start_method: StartMethod
    host: str
    channels: tuple[socket.socket, ...]
    """Our end of each rank's channel."""
    lifeline: socket.socket
    """Shutting it down ends every worker, sooner or later; all a finalizer may do."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""
        ...

    def events(self) -> list[Event]:
        """Return what has happened, without waiting."""
        ...

    def tell(self, command: ControlCommand) -> None:
        """Pass a command on, without waiting."""
        ...

    def release(self) -> None:
        """Kill whatever is left and give back every descriptor and process entry."""
        ...


class Launcher(Protocol):
    """One way to start workers."""

    name: str
    """Its `backend=` name."""

    def launch(self, spec: GroupSpec, timeouts: Timeouts) -> Launched:
        """Start the workers without waiting for them; on an error nothing is left."""
        ...

    def distrust(self, spec: GroupSpec, reason: str) -> GroupSpec | None:
        """Return what to launch instead of workers that did not prove themselves, or None."""
        ...
