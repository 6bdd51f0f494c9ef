"""`backend="mp"`: worker processes on this machine, owned by a guard process."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time
from dataclasses import dataclass, replace

from llmrt.config import Timeouts
from llmrt.runtime import birth, descriptors, proc
from llmrt.runtime.channel import Call, Channel, Note, encode
from llmrt.runtime.events import (
    ControlCommand,
    Event,
    GuardExited,
    Membership,
    RankExited,
    RankStarted,
    Setup,
    Shutdown,
    SignalRank,
    Stream,
)
from llmrt.runtime.fork_history import FORK_HISTORY, ForkHistory
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.rank_process import OutputPipe
from llmrt.runtime.start_method import StartMethod

_KILL_SECONDS = 5.0


class MpLauncher:
    """Starts a guard, which starts the workers."""

    name = "mp"

    def __init__(self, history: ForkHistory = FORK_HISTORY) -> None:
        self._history = history

    def launch(self, spec: GroupSpec, timeouts: Timeouts) -> GuardHandle:
        """Start the guard of a group and tell it what to run."""
        reason = self._history.why_not()
        method = spec.start_method
        if method.name == "fork" and reason is not None:
            method = StartMethod(name="spawn", reason=reason)
        return GuardHandle(spec, method)

    def distrust(self, spec: GroupSpec, reason: str) -> GroupSpec | None:
        """Fork no more in this process, and spawn this group."""
        if spec.start_method.name != "fork":
            return None
        self._history.forbid(f"an earlier fork of this process did not work: {reason}")
        method = StartMethod(name="spawn", reason=f"the fork did not work: {reason}")
        return replace(spec, start_method=method)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What the one rank of a guard is handed that belongs to a group of several guards."""

    membership: Membership
    channel: socket.socket
    """Connected to the engine already."""
    memory_fd: int | None = None
    listener: socket.socket | None = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptors for the guard, in the order in which it expects them."""
        fds = [self.channel.fileno()]
        if self.memory_fd is not None:
            fds.append(self.memory_fd)
        if self.listener is not None:
            fds.append(self.listener.fileno())
        return fds


class GuardHandle:
    """The owner's hold on one guard: its control socket, its pidfd, what it prints.

    With a seat the channel of its rank is somebody else's, and `channels` is empty.
    """

    def __init__(self, spec: GroupSpec, method: StartMethod, seat: Seat | None = None) -> None:
        self.start_method = method
        self.host = socket.gethostname()
        self._owner_pid = os.getpid()
        self._spec = spec
        self._ranks: dict[int, int] = {}
        self._has_exited = False
        self._pid = 0
        with contextlib.ExitStack() as undo:
            self._open(spec, undo, seat)
            self._resources = undo.pop_all()

    def _open(self, spec: GroupSpec, undo: contextlib.ExitStack, seat: Seat | None) -> None:
        setup = encode(Call(0, _setup(spec, seat)))
        self._selector = selectors.EpollSelector()
        undo.callback(self._selector.close)
        theirs: list[socket.socket] = []
        channels: list[socket.socket] = []
        with contextlib.ExitStack() as lent:
            for _ in range(1 if seat is not None else 1 + spec.world_size):
                ours, other = descriptors.socket_pair()
                lent.callback(other.close)
                undo.callback(ours.close)
                channels.append(ours)
                theirs.append(other)
            self.lifeline, self.channels = channels[0], tuple(channels[1:])
            self._outputs, write_ends = self._open_outputs(undo, lent)
            self._pid = self._bear(theirs[0], *write_ends)
            undo.callback(self._destroy)
            self._pidfd = _open_pidfd(self._pid)
            if self._pidfd is not None:
                undo.callback(os.close, self._pidfd)
            fds = [s.fileno() for s in theirs[1:]] if seat is None else seat.descriptors
            socket.send_fds(self.lifeline, [b"F"], fds)
        self._control = Channel(self.lifeline)
        self._control.send(setup)
        self._watch()

    def _open_outputs(
        self, undo: contextlib.ExitStack, lent: contextlib.ExitStack
    ) -> tuple[list[OutputPipe], list[int]]:
        """Return what reads the guard's own output, and the ends that it writes to."""
        outputs: list[OutputPipe] = []
        write_ends: list[int] = []
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            read_end, write_end = descriptors.pipe()
            lent.callback(os.close, write_end)
            outputs.append(OutputPipe(None, stream, read_end))
            undo.callback(outputs[-1].end.close)
            write_ends.append(write_end)
        return outputs, write_ends

    def _bear(self, control: socket.socket, stdout_fd: int, stderr_fd: int) -> int:
        if self.start_method.name == "fork":
            return birth.fork_guard(control, stdout_fd, stderr_fd)
        return birth.spawn_guard(control, stdout_fd, stderr_fd, self._spec.python, self._spec.env)

    def _watch(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        for output in self._outputs:
            self._selector.register(output.end, selectors.EVENT_READ)
        if self._pidfd is not None:
            self._selector.register(self._pidfd, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""
        return self._selector.fileno()

    # ---- events ----

    def events(self) -> list[Event]:
        """Return what the guard said and did since the last time."""
        if self._has_exited:
            return []
        events: list[Event] = []
        has_ended = self._pidfd in {key.fd for key, _ in self._selector.select(0)}
        self._control.flush()
        while frames := self._control.receive():
            events.extend(frame.body for frame in frames if isinstance(frame, Note))
        for event in events:
            self._note(event)
        self._update_interest()
        events += self._read_outputs()
        if has_ended or (self._pidfd is None and self._control.is_at_end):
            events.append(self._exited())
        return events

    def _read_outputs(self) -> list[Event]:
        events: list[Event] = []
        for output in self._outputs:
            fd, was_open = output.end.fileno(), output.end.is_open
            lines = output.read()
            if was_open and not output.end.is_open:
                self._selector.unregister(fd)
            if lines is not None:
                events.append(lines)
        return events

    def _note(self, event: Event) -> None:
        match event:
            case RankStarted(rank=rank, pid=pid):
                self._ranks[rank] = pid
            case RankExited(rank=rank):
                self._ranks.pop(rank, None)
            case _:
                pass

    def _update_interest(self) -> None:
        if self._control.is_at_end:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._control)
            return
        wanted = selectors.EVENT_READ
        if self._control.num_unsent_bytes:
            wanted |= selectors.EVENT_WRITE
        self._selector.modify(self._control, wanted)

    def _is_gone(self) -> bool:
        """Return whether the guard has ended; it may not be reaped yet."""
        return proc.state_code(self._pid) in "ZX"

    def _exited(self) -> GuardExited:
        """Say that the guard is gone, when everything of it is."""
        self._has_exited = True
        self._kill_session()
        for fd in list(self._selector.get_map()):
            self._selector.unregister(fd)
        tail = tuple(line for output in self._outputs for line in output.tail())
        return GuardExited(pid=self._pid, exit_code=self._reap(), output_tail=tail)

    # ---- commands ----

    def tell(self, command: ControlCommand) -> None:
        """Pass a command on; do what a guard that cannot hear would have done."""
        if self._has_exited:
            return
        is_kill = isinstance(command, Shutdown) and command.force
        if isinstance(command, SignalRank):
            is_kill = command.signum == signal.SIGKILL and proc.state_code(self._pid) in "Tt"
        if is_kill:
            self._kill_guard()  # its ranks follow: that is their parent-death signal
        elif isinstance(command, Shutdown):
            self._control.shut_down()
        else:
            self._control.send(encode(Call(0, command)))
            self._update_interest()

    def _kill_guard(self) -> None:
        """SIGKILL the guard. It is not reaped, so its pid is still its own."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)

    def _kill_session(self) -> None:
        """SIGKILL what is left of the guard's session, until nothing is.

        The guard is reaped after this: as long as it is a zombie, its session's number is taken.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := proc.living_in_session(self._pid)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def _reap(self) -> int | None:
        try:
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:  # the user ignores SIGCHLD, or waits for any child
            return None
        return os.waitstatus_to_exitcode(status)

    def release(self) -> None:
        """End the guard, if it has not ended, and close every descriptor."""
        if os.getpid() == self._owner_pid:
            self._resources.close()

    def _destroy(self) -> None:
        if self._has_exited:
            return
        self._kill_guard()
        deadline = time.monotonic() + _KILL_SECONDS
        while not self._is_gone() and time.monotonic() < deadline:
            time.sleep(0.002)
        self._has_exited = True
        self._kill_session()
        if self._is_gone():
            self._reap()


def _setup(spec: GroupSpec, seat: Seat | None) -> Setup:
    return Setup(
        entry=spec.entry,
        configs=tuple(pickle.dumps(config, protocol=5) for config in spec.configs),
        preload=spec.preload,
        env=dict(spec.env),
        shared_memory_bytes=spec.shared_memory_bytes,
        rendezvous=spec.rendezvous,
        python=spec.python,
        membership=None if seat is None else seat.membership,
    )


def _open_pidfd(pid: int) -> int | None:
    try:
        return descriptors.move_up(os.pidfd_open(pid))
    except OSError:  # an old kernel, or it ended and was reaped by somebody else
        return None
