"""The small process that owns the workers of one engine: makes them, watches them, reaps them, reports.

    owner ══ control socket ══ guard ──fork──► rank 0..N-1      (and one socket pair owner ◄─► rank each)

Single-threaded. It imports the preloaded modules once and forks the ranks from that; it holds no state of theirs, so it
answers while a worker sits in a stuck kernel. It ends when its owner does, and takes every descendant with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NoReturn

from llmrt.runtime import command_line, descriptors, prctl, proc, shared_memory
from llmrt.runtime.channel import Channel, Note, describe_error, encode
from llmrt.runtime.child import SETUP_FD, RankSetup, replace_output_files, run_rank
from llmrt.runtime.events import (
    Abort,
    DumpStacks,
    EXECUTING,
    Event,
    LaunchFailed,
    Output,
    Phase,
    RankExited,
    RankStarted,
    RankState,
    Setup,
    Shutdown,
    SignalRank,
    Stacks,
    Stream,
)
from llmrt.runtime.line_buffer import LineBuffer, decode
from llmrt.runtime.signals import STACK_DUMP_SIGNAL, reset_signals

CONTROL_FD = 3
"""Where a spawned guard finds its control socket."""

MAX_DESCRIPTORS = 250
"""What one message can carry."""

_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 1 << 20
_END_SECONDS = 10.0


def main(control_fd: int, owner_pid: int, is_fork: bool = False) -> NoReturn:
    """Be the guard of one engine in this process, to its end; nothing of the caller's is unwound."""
    code = 1
    try:
        _become_guard(owner_pid)
        os.set_inheritable(control_fd, False)
        kept = _take_over(control_fd) if is_fork else []
        code = Guard(socket.socket(fileno=control_fd), owner_pid, is_fork).run()
        del kept
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_guard(owner_pid: int) -> None:
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != owner_pid:  # it died before the line above
        os._exit(1)
    reset_signals()
    if os.getsid(0) != os.getpid():
        os.setsid()
    prctl.set_name("llmrt-guard")
    prctl.become_subreaper()


def _take_over(control_fd: int) -> list[object]:
    """Leave alone what a copy of the user's process inherited; return what must not be collected."""
    gc.disable()
    gc.freeze()
    descriptors.replace_inherited({0, 1, 2, control_fd})
    return replace_output_files()


@dataclass(kw_only=True)
class _Stream:
    """One pipe from a rank."""

    rank: int
    name: Stream
    fd: int
    lines: LineBuffer = field(default_factory=LineBuffer)


@dataclass(kw_only=True)
class _Rank:
    """One worker process."""

    rank: int
    pid: int
    stdout: _Stream
    stderr: _Stream
    stacks_fd: int
    has_ended: bool = False


class _LaunchError(Exception):
    """The ranks could not be started; `__cause__` says why."""


class Guard:
    """Everything the guard process does, on one selector."""

    def __init__(self, control: socket.socket, owner_pid: int, is_fork: bool) -> None:
        self._control_socket = control
        self._control = Channel(control)
        self._is_fork = is_fork
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._abort_word: shared_memory.AbortWord | None = None
        self._num_oom_kills = proc.num_oom_kills()
        self._is_over = False
        self._own_fds: set[int] = {control.fileno(), self._selector_fd()}
        self._watch(control.fileno(), self._on_command)
        self._watch_owner(owner_pid)
        self._watch_signals()

    def run(self) -> int:
        """Start the ranks and look after them until told to end; return the exit code."""
        code = 0
        try:
            channel_fds = self._receive_channels()
            setup = self._receive_setup()
            if setup is not None:
                self._launch(setup, channel_fds)
                self._look_after()
        except _LaunchError as error:
            assert error.__cause__ is not None
            failure = describe_error(-1, error.__cause__)
            self._tell(LaunchFailed(what=str(error), failure=failure))
            code = 1
        self._end()
        return code

    # ---- being told, and telling ----

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._own_fds.add(fd)
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def _selector_fd(self) -> int:
        return (
            self._selector.fileno() if isinstance(self._selector, selectors.EpollSelector) else -1
        )

    def _watch_owner(self, owner_pid: int) -> None:
        """Notice the owner's end also where a process it forked keeps our socket open."""
        try:
            self._owner_fd = os.pidfd_open(owner_pid)
        except OSError:  # an old kernel: the parent-death signal stays on for good
            self._owner_fd = None
        else:
            self._watch(self._owner_fd, self._be_over)

    def _watch_signals(self) -> None:
        self._woken, waker = os.pipe()
        for fd in (self._woken, waker):
            os.set_blocking(fd, False)
        self._own_fds.add(waker)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: self._be_over())
        self._watch(self._woken, self._on_signal)

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
        if self._control.is_at_end:
            self._is_over = True

    def _obey(self, command: object) -> None:
        match command:
            case SignalRank(rank=rank, signum=signum):
                self._signal(self._ranks[rank], signum)
            case DumpStacks(ranks=ranks):
                for rank in ranks:
                    self._dump_stacks(self._ranks[rank])
            case Abort():
                self._abort()
            case Shutdown():
                self._is_over = True
            case _:
                raise AssertionError(f"The guard was told {command!r}")

    def _signal(self, rank: _Rank, signum: int) -> None:
        if not rank.has_ended:  # not reaped, so the pid is still its own
            os.kill(rank.pid, signum)

    def _dump_stacks(self, rank: _Rank) -> None:
        self._tell(RankState(rank=rank.rank, state=proc.describe_state(rank.pid)))
        if proc.catches_signal(rank.pid, STACK_DUMP_SIGNAL):
            self._signal(rank, STACK_DUMP_SIGNAL)

    def _abort(self) -> None:
        if self._abort_word is not None:
            self._abort_word.set()

    # ---- starting ----

    def _receive_channels(self) -> list[int]:
        self._control_socket.setblocking(True)
        _, received, _, _ = socket.recv_fds(
            self._control_socket, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self._control_socket.setblocking(False)
        fds = [descriptors.move_up(fd) for fd in received]
        self._own_fds.update(fds)
        return fds

    def _receive_setup(self) -> Setup | None:
        """Return what to run, or None where the owner is gone before it said so."""
        while not self._is_over:
            self._selector.select()
            for frame in self._control.receive():
                assert isinstance(frame.body, Setup)
                return frame.body
            self._is_over = self._is_over or self._control.is_at_end
        return None

    def _launch(self, setup: Setup, channel_fds: list[int]) -> None:
        self._tell(Phase(rank=None, phase="spawned", detail=f"guard is process {os.getpid()}"))
        os.environ.update(setup.env)
        _preload(setup, self._tell)
        with _explained("allocating shared memory"):
            memory_fd = descriptors.move_up(shared_memory.create(setup.shared_memory_bytes))
            self._abort_word = shared_memory.AbortWord(memory_fd)
        self._own_fds.add(memory_fd)
        listener = _listen() if setup.rendezvous else None
        if listener is not None:
            self._own_fds.add(listener.fileno())
        gc.freeze()  # pages that the collector would touch stay shared with the ranks
        with _explained("starting the ranks"):
            for rank, channel_fd in enumerate(channel_fds):
                self._start_rank(setup, rank, channel_fd, memory_fd, listener)
        os.close(memory_fd)
        self._own_fds.discard(memory_fd)
        if listener is not None:
            self._own_fds.discard(listener.fileno())
            listener.close()

    def _start_rank(
        self,
        setup: Setup,
        rank: int,
        channel_fd: int,
        memory_fd: int,
        listener: socket.socket | None,
    ) -> None:
        pipes = [descriptors.pipe() for _ in range(3)]
        for read_end, _ in pipes:
            os.set_blocking(read_end, False)
        self._own_fds.update(fd for pair in pipes for fd in pair)
        rank_setup = RankSetup(
            rank=rank,
            world_size=len(setup.configs),
            entry=setup.entry,
            config=setup.configs[rank],
            guard_pid=os.getpid(),
            channel_fd=channel_fd,
            stdout_fd=pipes[0][1],
            stderr_fd=pipes[1][1],
            stacks_fd=pipes[2][1],
            memory_fd=memory_fd,
            has_shared_memory=setup.shared_memory_bytes > 0,
            rendezvous_port=None if listener is None else listener.getsockname()[1],
            listen_fd=listener.fileno() if listener is not None and rank == 0 else None,
            proves_threads=self._is_fork,
        )
        obstacle = _why_not_fork()
        if obstacle is None:
            pid = self._fork(rank_setup)
        else:
            self._tell(Phase(rank=rank, phase=EXECUTING, detail=f"not forked: {obstacle}"))
            pid = _execute(rank_setup, setup.python)
        for fd in (channel_fd, *(write_end for _, write_end in pipes)):
            os.close(fd)
            self._own_fds.discard(fd)
        self._look_at(rank, pid, [read_end for read_end, _ in pipes])

    def _fork(self, setup: RankSetup) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            try:
                for fd in self._own_fds - setup.descriptors - {-1}:
                    os.close(fd)
                run_rank(setup)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        return pid

    def _look_at(self, rank: int, pid: int, fds: list[int]) -> None:
        stdout = _Stream(rank=rank, name="stdout", fd=fds[0])
        stderr = _Stream(rank=rank, name="stderr", fd=fds[1])
        worker = _Rank(rank=rank, pid=pid, stdout=stdout, stderr=stderr, stacks_fd=fds[2])
        self._ranks.append(worker)
        self._watch(stdout.fd, lambda: self._read_output(stdout))
        self._watch(stderr.fd, lambda: self._read_output(stderr))
        self._watch(worker.stacks_fd, lambda: self._read_stacks(worker))
        self._tell(RankStarted(rank=rank, pid=pid))

    # ---- looking after them ----

    def _look_after(self) -> None:
        if self._owner_fd is not None:
            # The owner's pidfd is watched from here on. The signal would also fire when only the
            # thread that started us ends.
            prctl.set_parent_death_signal(0)
        self._reap()
        while not self._is_over:
            self._turn(None)

    def _turn(self, timeout: float | None) -> None:
        wanted = selectors.EVENT_READ
        if self._control.num_unsent_bytes:
            wanted |= selectors.EVENT_WRITE
        self._selector.modify(self._control.fileno(), wanted, self._on_command)
        for key, ready in self._selector.select(timeout):
            if ready & selectors.EVENT_WRITE:
                self._control.flush()
            if ready & selectors.EVENT_READ:
                key.data()

    def _read_output(self, stream: _Stream) -> bool:
        """Read what is there, once; return whether there may be more."""
        data = self._read(stream.fd)
        if data:
            self._forward(stream, stream.lines.feed(data))
        return bool(data)

    def _forward(self, stream: _Stream, lines: bytes) -> None:
        if not lines:
            return
        if self._control.num_unsent_bytes > _MAX_UNSENT_BYTES:
            stream.lines.drop(lines)
            return
        self._tell(
            Output(
                rank=stream.rank,
                stream=stream.name,
                text=decode(lines),
                num_dropped_lines=stream.lines.take_num_dropped(),
            )
        )

    def _read_stacks(self, rank: _Rank) -> None:
        if data := self._read(rank.stacks_fd):
            self._tell(Stacks(rank=rank.rank, text=decode(data)))

    def _read(self, fd: int) -> bytes:
        """Return what can be read now; stop watching at the end of the stream."""
        if fd not in self._own_fds:
            return b""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._selector.unregister(fd)
            self._own_fds.discard(fd)
            os.close(fd)
        return data

    def _reap(self) -> None:
        """Reap every child that has ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                for rank in self._ranks:
                    if rank.pid == ended[0] and not rank.has_ended:
                        self._bury(rank, os.waitstatus_to_exitcode(ended[1]))

    def _bury(self, rank: _Rank, exit_code: int) -> None:
        rank.has_ended = True
        self._abort()
        for stream in (rank.stdout, rank.stderr):
            for _ in range(16):  # a pipe holds 64 KiB; more comes only from a surviving grandchild
                if not self._read_output(stream):
                    break
            self._forward(stream, stream.lines.finish())
        num_oom_kills = proc.num_oom_kills()
        was_oom = None
        if num_oom_kills is not None and self._num_oom_kills is not None:
            was_oom = num_oom_kills > self._num_oom_kills
        self._tell(
            RankExited(
                rank=rank.rank,
                pid=rank.pid,
                exit_code=exit_code,
                stderr_tail=rank.stderr.lines.tail(),
                was_out_of_memory=was_oom,
            )
        )

    # ---- ending ----

    def _end(self) -> None:
        """Kill and reap every descendant: those of a killed child come to us, again and again."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            self._reap()
            children = proc.children_of(os.getpid())
            if not children:
                break
            for pid in children:
                os.kill(pid, signal.SIGKILL)  # ours and not reaped, so the pid is still its own
            self._turn(0.02)
        while self._control.num_unsent_bytes and time.monotonic() < deadline:
            if self._control.is_at_end:
                break
            self._turn(0.02)


def _preload(setup: Setup, tell: Callable[[Event], None]) -> None:
    """Import what every rank will need, once, without the threads that numpy's BLAS starts at import."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    if name not in setup.env:
        os.environ[name] = "1"
    for module in setup.preload:
        tell(Phase(rank=None, phase="importing", detail=module))
        with _explained(f"importing {module}"):
            import_module(module)
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


class _explained(contextlib.AbstractContextManager["_explained"]):  # noqa: N801
    """Turns whatever is raised inside into a _LaunchError that says what was being done."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, _type: object, error: BaseException | None, _traceback: Any) -> None:
        if error is not None:
            raise _LaunchError(self._what) from error


def _listen() -> socket.socket:
    """Return a socket bound to a port of this host alone, chosen and held, so that nobody can take it."""
    with _explained("binding the rendezvous socket"), socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(128)
        return socket.socket(fileno=descriptors.move_up(bound.detach()))


def _why_not_fork() -> str | None:
    """Return what makes a fork of this process unsafe, or None."""
    num_threads = proc.num_native_threads()
    if num_threads > 1:
        return f"the guard has {num_threads} native threads after its imports"
    if descriptors.has_accelerator_open():
        return "an import opened an accelerator's driver"
    return None


def _execute(setup: RankSetup, python: tuple[str, ...]) -> int:
    """Start a rank in a fresh interpreter; return its pid."""
    layout = {"channel_fd": 4, "stacks_fd": 5, "memory_fd": 6, "stdout_fd": 8, "stderr_fd": 9}
    if setup.listen_fd is not None:
        layout["listen_fd"] = 7
    moved = replace(setup, **layout, proves_threads=False)
    setup_fd = descriptors.move_up(os.memfd_create("llmrt-setup"))
    try:
        with open(setup_fd, "wb", closefd=False) as file:
            pickle.dump(moved, file)
        os.lseek(setup_fd, 0, os.SEEK_SET)
        actions = [(os.POSIX_SPAWN_DUP2, setup_fd, SETUP_FD)]
        for name, fd in layout.items():
            actions.append((os.POSIX_SPAWN_DUP2, getattr(setup, name), fd))
        for fd, source in ((1, setup.stdout_fd), (2, setup.stderr_fd)):
            actions.append((os.POSIX_SPAWN_DUP2, source, fd))
        command = command_line.run_function(python, "llmrt.runtime.child", "main()")
        return os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    finally:
        os.close(setup_fd)
