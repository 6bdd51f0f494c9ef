"""How a guard makes its ranks: one import for all, then a fork each (an exec if unsafe)."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from llmrt.config import Rendezvous
from llmrt.runtime import command_line, descriptors, proc, shared_memory
from llmrt.runtime.child import SETUP_FD, RankSetup, run_rank
from llmrt.runtime.events import EXECUTING, Event, Phase, Setup
from llmrt.runtime.rank_process import OutputPipe, RankProcess, ReadEnd

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_LAYOUT = {
    "channel_fd": 4,
    "stacks_fd": 5,
    "memory_fd": 6,
    "stdout_fd": 7,
    "stderr_fd": 8,
    "listen_fd": 9,
}
"""Where a rank in a fresh interpreter finds its descriptors."""


class LaunchError(Exception):
    """The ranks could not be started: its message says at what, its cause why."""

    def __init__(self, what: str, cause: BaseException) -> None:
        super().__init__(what)
        self.cause = cause


class launching(contextlib.AbstractContextManager["launching"]):  # noqa: N801 - reads as a verb
    """Turns whatever is raised inside into a LaunchError that says what was being done."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, _type: object, error: BaseException | None, _traceback: Any) -> None:
        if error is not None:
            raise LaunchError(self._what, error) from error


class RankLauncher:
    """Starts the ranks of one guard. Used once."""

    def __init__(
        self,
        setup: Setup,
        fds: list[int],
        *,
        is_fork: bool,
        tell: Callable[[Event], None],
        guard_fds: Callable[[], set[int]],
    ) -> None:
        self._setup = setup
        num_ranks = len(setup.configs)
        self._channel_fds, self._group_fds = fds[:num_ranks], fds[num_ranks:]
        self._is_fork = is_fork
        self._tell = tell
        self._guard_fds = guard_fds
        self._memory_fd = -1
        self._listener: socket.socket | None = None

    def prepare(self) -> shared_memory.AbortWord:
        """Import what the ranks need and make what they share."""
        os.environ.update(self._setup.env)
        self._preload()
        member = self._setup.membership
        with launching("allocating shared memory"):
            if member is not None and member.shares_memory:
                self._memory_fd = self._group_fds.pop(0)
            else:
                memory_fd = shared_memory.create(self._setup.shared_memory_bytes)
                self._memory_fd = descriptors.move_up(memory_fd)
            word = shared_memory.AbortWord(self._memory_fd)
        if member is not None and member.listens:
            self._listener = socket.socket(fileno=self._group_fds.pop(0))
        elif self._setup.rendezvous:
            with launching("binding the rendezvous socket"):
                self._listener = _listen()
        gc.freeze()  # pages that the collector would touch stay shared with the ranks
        return word

    def _preload(self) -> None:
        """Import once for all, without the threads that numpy's BLAS would start at import."""
        before = os.environ.get(_BLAS_THREADS)
        if _BLAS_THREADS not in self._setup.env:
            os.environ[_BLAS_THREADS] = "1"
        for module in self._setup.preload:
            self._tell(Phase(rank=None, phase="importing", detail=module))
            with launching(f"importing {module}"):
                import_module(module)
        if before is None:
            os.environ.pop(_BLAS_THREADS, None)
        else:
            os.environ[_BLAS_THREADS] = before

    def start(self) -> Iterator[RankProcess]:
        """Start one rank after the other; keep nothing of theirs."""
        for rank in range(len(self._channel_fds)):
            with launching(f"starting rank {rank}"):
                process = self._start_rank(rank)
            yield process
        os.close(self._memory_fd)
        if self._listener is not None:
            self._listener.close()

    def _start_rank(self, rank: int) -> RankProcess:
        pipes = [descriptors.pipe() for _ in range(3)]
        read_ends = [read_end for read_end, _ in pipes]
        setup = self._rank_setup(rank, [write_end for _, write_end in pipes])
        obstacle = _why_not_fork()
        if obstacle is None:
            pid = self._fork(setup, read_ends)
        else:
            self._tell(Phase(rank=rank, phase=EXECUTING, detail=f"not forked: {obstacle}"))
            pid = _execute(setup, self._setup.python)
        for fd in (setup.channel_fd, *(write_end for _, write_end in pipes)):
            os.close(fd)
        return RankProcess(
            rank=rank,
            pid=pid,
            stdout=OutputPipe(rank, "stdout", read_ends[0]),
            stderr=OutputPipe(rank, "stderr", read_ends[1]),
            stacks=ReadEnd(read_ends[2]),
        )

    def _rank_setup(self, rank: int, write_ends: list[int]) -> RankSetup:
        listener, member = self._listener, self._setup.membership
        return RankSetup(
            rank=rank if member is None else member.rank,
            world_size=len(self._setup.configs) if member is None else member.world_size,
            entry=self._setup.entry,
            config=self._setup.configs[rank],
            guard_pid=os.getpid(),
            channel_fd=self._channel_fds[rank],
            stdout_fd=write_ends[0],
            stderr_fd=write_ends[1],
            stacks_fd=write_ends[2],
            memory_fd=self._memory_fd,
            has_shared_memory=self._setup.shared_memory_bytes > 0
            or (member is not None and member.shares_memory),
            device_index=None if member is None else member.device_index,
            rendezvous=self._rendezvous() if member is None else member.rendezvous,
            listen_fd=listener.fileno() if listener is not None and rank == 0 else None,
            proves_threads=self._is_fork,
        )

    def _rendezvous(self) -> Rendezvous | None:
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()
        return Rendezvous(host=host, port=port, listen_fd=None)

    def _fork(self, setup: RankSetup, read_ends: list[int]) -> int:
        sys.stdout.flush()  # or the rank would print it again
        sys.stderr.flush()
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            try:
                for fd in self._not_for(setup, read_ends):
                    os.close(fd)
                run_rank(setup)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        return pid

    def _not_for(self, setup: RankSetup, read_ends: list[int]) -> set[int]:
        """Return the guard's descriptors that are none of this rank's business."""
        fds = {*self._guard_fds(), *read_ends, *self._channel_fds[setup.rank :]}
        if self._listener is not None:
            fds.add(self._listener.fileno())
        return fds - setup.descriptors


def _listen() -> socket.socket:
    """Return a socket on a port of this host alone, chosen and held, so that nobody can take it."""
    with socket.socket() as bound:
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
    layout = {k: fd for k, fd in _LAYOUT.items() if getattr(setup, k) is not None}
    setup_fd = descriptors.move_up(os.memfd_create("llmrt-setup"))
    try:
        with open(setup_fd, "wb", closefd=False) as file:
            pickle.dump(replace(setup, **layout, proves_threads=False), file)
        os.lseek(setup_fd, 0, os.SEEK_SET)
        copies = [(setup_fd, SETUP_FD), (setup.stdout_fd, 1), (setup.stderr_fd, 2)]
        copies += [(getattr(setup, name), fd) for name, fd in layout.items()]
        actions = [(os.POSIX_SPAWN_DUP2, source, fd) for source, fd in copies]
        command = command_line.run_function(python, "llmrt.runtime.child", "main()")
        return os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    finally:
        os.close(setup_fd)
