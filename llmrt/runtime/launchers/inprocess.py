"""`backend="inprocess"`: one worker on a thread of this process, so that breakpoints in it work."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback

from llmrt.config import Timeouts, WorkerContext
from llmrt.errors import ConfigError, EngineDeadError
from llmrt.runtime import descriptors
from llmrt.runtime.channel import Pipe
from llmrt.runtime.child import Reporter, build_worker, serve
from llmrt.runtime.events import (
    ControlCommand,
    DumpStacks,
    Event,
    ForwardOutput,
    GuardExited,
    OutputForwarded,
    RankExited,
    RankStarted,
    Shutdown,
    Stacks,
)
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.start_method import StartMethod

_JOIN_SECONDS = 1.0


class InProcessLauncher:
    """Runs the worker's serve loop on a thread."""

    name = "inprocess"

    def launch(self, spec: GroupSpec, timeouts: Timeouts) -> WorkerThread:
        """Start the thread."""
        if spec.world_size != 1:
            raise ConfigError(
                f'backend="inprocess" runs one worker in this process: asked for '
                f'tp={spec.world_size}. Use tp=1, or backend="mp".'
            )
        return WorkerThread(spec)

    def distrust(self, spec: GroupSpec, reason: str) -> GroupSpec | None:
        """There is no other way to start a thread."""
        return None


def stack_of(thread: threading.Thread) -> str:
    """Return where a thread of this process is."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented
    frame = frames.get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(ended)"


class WorkerThread:
    """The owner's hold on the worker's thread. It can be asked to end, but not killed."""

    def __init__(self, spec: GroupSpec) -> None:
        self.start_method = StartMethod(name="spawn", reason="inprocess: a thread, not a process")
        self.host = socket.gethostname()
        self._spec = spec
        self._events: list[Event] = [RankStarted(rank=0, pid=os.getpid())]
        self._exit_code: int | None = None
        self._has_ended = False
        with contextlib.ExitStack() as undo:
            ours, self._theirs = descriptors.socket_pair()
            undo.callback(ours.close)
            undo.callback(self._theirs.close)
            self._bell, self._button = descriptors.socket_pair()
            undo.callback(self._bell.close)
            undo.callback(self._button.close)
            undo.pop_all()
        self.channels = (ours,)
        self.lifeline = ours
        self._button.send(b"\0")  # the event above
        self._thread = threading.Thread(target=self._run, name="llmrt-rank0", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        code = 1
        try:
            pipe = Pipe(self._theirs)
            report = Reporter(pipe)
            context = WorkerContext(rank=0, world_size=1, report=report)
            config = pickle.dumps(self._spec.configs[0], protocol=5)
            code = serve(pipe, report, 0, lambda: build_worker(self._spec.entry, config, context))
        except SystemExit:
            code = 1
        finally:
            self._exit_code = code
            self._theirs.close()
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self._button.send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""
        return self._bell.fileno()

    def events(self) -> list[Event]:
        """Return what has happened."""
        self._bell.recv(4096)
        events, self._events = self._events, []
        if self._exit_code is not None and not self._has_ended:
            self._has_ended = True
            events.append(RankExited(rank=0, pid=os.getpid(), exit_code=self._exit_code))
        return events

    def tell(self, command: ControlCommand) -> None:
        """Answer for a thread what a guard answers for a process."""
        match command:
            case DumpStacks():
                self._announce(Stacks(rank=0, text=stack_of(self._thread)))
            case ForwardOutput():
                self._announce(OutputForwarded(rank=0))  # a thread prints where its owner does
            case Shutdown():
                self._announce(GuardExited(pid=os.getpid(), exit_code=0))
            case _:
                return

    def _announce(self, event: Event) -> None:
        self._events.append(event)
        self._button.send(b"\0")

    def release(self) -> None:
        """Wait briefly for the thread, and close the sockets.

        Raises:
            EngineDeadError: the thread is still running; a thread cannot be ended from outside.
        """
        self.lifeline.close()
        self._thread.join(_JOIN_SECONDS)
        self._bell.close()
        self._button.close()
        if self._thread.is_alive():
            raise EngineDeadError(
                "The in-process worker is still running and a thread cannot be killed; it ends "
                "with its current command, or with this process. It is here:\n"
                + stack_of(self._thread)
            )
