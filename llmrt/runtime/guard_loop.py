"""The guard's one loop: what it hears from its owner, from the kernel and from the ranks' pipes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from llmrt.runtime import descriptors, prctl, proc
from llmrt.runtime.channel import Channel, Note, describe_error, encode
from llmrt.runtime.events import (
    Abort,
    DumpStacks,
    Event,
    ForwardOutput,
    LaunchFailed,
    OutputForwarded,
    Phase,
    RankExited,
    RankStarted,
    RankState,
    Setup,
    Shutdown,
    SignalRank,
    Stacks,
)
from llmrt.runtime.line_buffer import decode
from llmrt.runtime.rank_launch import LaunchError, RankLauncher
from llmrt.runtime.rank_process import OutputPipe, RankProcess, ReadEnd
from llmrt.runtime.shared_memory import AbortWord
from llmrt.runtime.signals import STACK_DUMP_SIGNAL

MAX_RANKS = 250
"""As many descriptors as one message can carry."""

_MAX_UNSENT_BYTES = 1 << 20
_END_SECONDS = 10.0
_TURN_SECONDS = 0.02


class Guard:
    """Everything the guard process does, on one selector."""

    def __init__(self, control: socket.socket, owner_pid: int, is_fork: bool) -> None:
        self._control_socket = control
        self._control = Channel(control)
        self._is_fork = is_fork
        self._selector = selectors.EpollSelector()
        self._ranks: list[RankProcess] = []
        self._abort_word: AbortWord | None = None
        self._num_oom_kills = proc.num_oom_kills()
        self._is_over = False
        self._selector.register(self._control, selectors.EVENT_READ, self._on_command)
        self._owner_fd = self._watch_owner(owner_pid)
        self._woken, self._waker = self._watch_signals()

    def run(self) -> int:
        """Start the ranks and look after them until told to end; return the exit code."""
        code = 0
        try:
            channel_fds = self._receive_channels()
            setup = self._receive_setup()
            if setup is not None:
                self._launch(setup, channel_fds)
                self._look_after()
        except LaunchError as error:
            self._tell(LaunchFailed(what=str(error), failure=describe_error(-1, error.cause)))
            code = 1
        self._end()
        return code

    # ---- being told, and telling ----

    def _watch_owner(self, owner_pid: int) -> int | None:
        """Notice the owner's end also where a process that it forked keeps our socket open."""
        try:
            owner_fd = os.pidfd_open(owner_pid)
        except OSError:  # an old kernel: the parent-death signal stays on for good
            return None
        self._selector.register(owner_fd, selectors.EVENT_READ, self._be_over)
        return owner_fd

    def _watch_signals(self) -> tuple[int, int]:
        woken, waker = descriptors.pipe()
        for fd in (woken, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda _signum, _frame: self._be_over())
        self._selector.register(woken, selectors.EVENT_READ, self._on_signal)
        return woken, waker

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        self._reap()

    def _be_over(self) -> None:
        self._is_over = True

    def _tell(self, event: Event) -> None:
        self._control.send(encode(Note(0, event)))

    def _on_command(self) -> None:
        for frame in self._control.receive():
            self._obey(frame.body)
        self._notice_owners_end()

    def _notice_owners_end(self) -> None:
        if self._control.is_at_end:
            self._is_over = True
            with contextlib.suppress(KeyError):  # it would be readable for ever
                self._selector.unregister(self._control)

    def _obey(self, command: object) -> None:
        match command:
            case SignalRank(rank=rank, signum=signum):
                self._signal(self._ranks[rank], signum)
            case DumpStacks(ranks=ranks):
                for rank in ranks:
                    self._dump_stacks(self._ranks[rank])
            case ForwardOutput(ranks=ranks):
                for rank in ranks:
                    self._forward_output(self._ranks[rank])
            case Abort():
                self._abort()
            case Shutdown():
                self._is_over = True
            case _:
                raise AssertionError(f"The guard was told {command!r}")

    def _signal(self, rank: RankProcess, signum: int) -> None:
        if not rank.has_ended:
            os.kill(rank.pid, signum)

    def _dump_stacks(self, rank: RankProcess) -> None:
        self._tell(RankState(rank=rank.rank, state=proc.describe_state(rank.pid)))
        if proc.catches_signal(rank.pid, STACK_DUMP_SIGNAL):
            self._signal(rank, STACK_DUMP_SIGNAL)

    def _forward_output(self, rank: RankProcess) -> None:
        for output in (rank.stdout, rank.stderr):
            if output.end.is_open:
                self._read_output(output)
        self._tell(OutputForwarded(rank=rank.rank))

    def _abort(self) -> None:
        if self._abort_word is not None:
            self._abort_word.set()

    # ---- starting ----

    def _receive_channels(self) -> list[int]:
        self._control_socket.setblocking(True)
        _, received, _, _ = socket.recv_fds(
            self._control_socket, 1, MAX_RANKS, socket.MSG_CMSG_CLOEXEC
        )
        self._control_socket.setblocking(False)
        return [descriptors.move_up(fd) for fd in received]

    def _receive_setup(self) -> Setup | None:
        """Return what to run, or None where the owner is gone before it said so."""
        while not self._is_over:
            self._selector.select()
            for frame in self._control.receive():
                assert isinstance(frame.body, Setup)
                return frame.body
            self._notice_owners_end()
        return None

    def _launch(self, setup: Setup, channel_fds: list[int]) -> None:
        self._tell(Phase(rank=None, phase="spawned", detail=f"guard is process {os.getpid()}"))
        launcher = RankLauncher(
            setup,
            channel_fds,
            is_fork=self._is_fork,
            tell=self._tell,
            guard_fds=self._own_descriptors,
        )
        self._abort_word = launcher.prepare()
        if self._owner_fd is not None:
            # No longer deaf: the owner's pidfd is watched. The signal would also come when only the
            # thread that started us ends, as it may once the ranks serve.
            prctl.set_parent_death_signal(0)
        for process in launcher.start():
            self._ranks.append(process)
            self._watch_rank(process)
            self._tell(RankStarted(rank=process.rank, pid=process.pid))

    def _own_descriptors(self) -> set[int]:
        watched = {key.fd for key in self._selector.get_map().values()}
        return watched | {self._selector.fileno(), self._waker}

    def _watch_rank(self, process: RankProcess) -> None:
        self._watch_output(process.stdout)
        self._watch_output(process.stderr)
        self._selector.register(
            process.stacks, selectors.EVENT_READ, lambda: self._read_stacks(process)
        )

    def _watch_output(self, output: OutputPipe) -> None:
        self._selector.register(output.end, selectors.EVENT_READ, lambda: self._read_output(output))

    # ---- looking after them ----

    def _look_after(self) -> None:
        self._reap()
        while not self._is_over:
            self._turn(None)

    def _turn(self, timeout: float | None) -> None:
        self._update_interest()
        for key, ready in self._selector.select(timeout):
            if ready & selectors.EVENT_WRITE:
                self._control.flush()
            if ready & selectors.EVENT_READ:
                key.data()
        self._tell_of_drops()

    def _update_interest(self) -> None:
        if self._control.is_at_end:
            return
        wanted = selectors.EVENT_READ
        if self._control.num_unsent_bytes:
            wanted |= selectors.EVENT_WRITE
        self._selector.modify(self._control, wanted, self._on_command)

    def _read_output(self, output: OutputPipe) -> None:
        may_forward = self._control.num_unsent_bytes < _MAX_UNSENT_BYTES
        lines = output.read(may_forward=may_forward)
        self._forget_if_closed(output.end)
        if lines is not None:
            self._tell(lines)

    def _tell_of_drops(self) -> None:
        """Once the owner has caught up, tell it what it missed: no later line may do so."""
        if self._control.num_unsent_bytes:
            return
        for process in self._ranks:
            for output in (process.stdout, process.stderr):
                drops = output.take_drops()
                if drops is not None:
                    self._tell(drops)

    def _read_stacks(self, process: RankProcess) -> None:
        data = process.stacks.read()
        if data:
            self._tell(Stacks(rank=process.rank, text=decode(data)))
        self._forget_if_closed(process.stacks)

    def _forget_if_closed(self, end: ReadEnd) -> None:
        if not end.is_open:
            # It may have been forgotten earlier in the same turn: when its process was buried.
            with contextlib.suppress(KeyError):
                self._selector.unregister(end.fileno())

    def _reap(self) -> None:
        """Reap every child that has ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                for rank in self._ranks:
                    if rank.pid == ended[0] and not rank.has_ended:
                        self._bury(rank, os.waitstatus_to_exitcode(ended[1]))

    def _bury(self, process: RankProcess, exit_code: int) -> None:
        process.has_ended = True
        for output in (process.stdout, process.stderr):
            for lines in output.read_rest():
                self._tell(lines)
            self._forget_if_closed(output.end)
        self._tell(
            RankExited(
                rank=process.rank,
                pid=process.pid,
                exit_code=exit_code,
                stderr_tail=process.stderr.tail(),
                was_out_of_memory=self._was_out_of_memory(),
            )
        )
        # After the owner is told: what peers then raise must not look like the cause.
        self._abort()

    def _was_out_of_memory(self) -> bool | None:
        now = proc.num_oom_kills()
        if now is None or self._num_oom_kills is None:
            return None
        return now > self._num_oom_kills

    # ---- ending ----

    def _end(self) -> None:
        """Kill and reap every descendant: the children of a killed child come to us, and so on."""
        self._abort()
        deadline = time.monotonic() + _END_SECONDS
        self._until(deadline, self._kill_children)
        self._until(deadline, lambda: self._control.is_at_end or not self._control.num_unsent_bytes)

    def _kill_children(self) -> bool:
        """Kill all children; return whether none is left."""
        self._reap()
        children = proc.children_of(os.getpid())
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # ours and not reaped, so the pid is still its own
        return not children

    def _until(self, deadline: float, is_done: Callable[[], bool]) -> None:
        while not is_done() and time.monotonic() < deadline:
            self._turn(_TURN_SECONDS)
