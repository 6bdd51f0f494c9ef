"""First code in a rank: signals, descriptors, entry point, and the loop that answers calls.

A worker is any class with `__init__(config, context)`, `handle(command) -> answer` and
`stop(Stop) -> Stopped`. It is reached by a dotted name; this module knows nothing of what it
computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from llmrt.config import Rendezvous, WorkerContext
from llmrt.messages import Stop, Stopped
from llmrt.runtime import openmp, prctl
from llmrt.runtime.channel import (
    START_ID,
    Failure,
    Pipe,
    Progress,
    RawFrame,
    Reply,
    decode,
    describe_error,
)
from llmrt.runtime.events import THREADS_PROVEN
from llmrt.runtime.shared_memory import AbortWord
from llmrt.runtime.signals import STACK_DUMP_SIGNAL, reset_signals

SETUP_FD = 3
"""Where a rank that was not forked finds its pickled RankSetup."""

_REPORT_INTERVAL = 0.05


class Worker(Protocol):
    """What a rank runs."""

    def handle(self, command: Any) -> object:
        """Answer a command; what it raises becomes a Failure."""
        ...

    def stop(self, command: Stop) -> Stopped:
        """Let go of everything: the process ends after this."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """What one rank's process is made of."""

    rank: int
    world_size: int
    entry: str
    config: bytes = field(repr=False)
    guard_pid: int
    channel_fd: int
    stdout_fd: int
    stderr_fd: int
    stacks_fd: int
    memory_fd: int
    has_shared_memory: bool
    device_index: int | None
    rendezvous: Rendezvous | None
    listen_fd: int | None
    """The rendezvous socket, on rank 0 only."""
    proves_threads: bool

    @property
    def descriptors(self) -> frozenset[int]:
        """The descriptors that are this rank's own."""
        fds = {self.channel_fd, self.stdout_fd, self.stderr_fd, self.stacks_fd, self.memory_fd}
        return frozenset(fds if self.listen_fd is None else fds | {self.listen_fd})


def main() -> NoReturn:
    """Run a rank in a fresh interpreter."""
    with open(SETUP_FD, "rb") as file:
        setup: RankSetup = pickle.load(file)
    run_rank(setup)


def run_rank(setup: RankSetup) -> NoReturn:
    """Be rank `setup.rank` in this process, to its end; nothing of the caller's is unwound."""
    code = 1
    try:
        _kept = _become_rank(setup)  # alive until the process ends
        code = _serve_owner(setup)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        _flush_output()
        os._exit(code & 0xFF)


def _become_rank(setup: RankSetup) -> list[object]:
    prctl.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != setup.guard_pid:  # it died before the line above
        os._exit(1)
    prctl.set_name(f"llmrt-rank{setup.rank}")
    reset_signals()
    os.dup2(setup.stdout_fd, 1)
    os.dup2(setup.stderr_fd, 2)
    os.close(setup.stdout_fd)
    os.close(setup.stderr_fd)
    kept = replace_output_files()
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=setup.stacks_fd, all_threads=True)
    gc.enable()  # a fork-born guard runs without, so that it finalises nothing of the user's
    return kept


def replace_output_files() -> list[object]:
    """Make new sys.stdout and sys.stderr on descriptors 1 and 2; return the old ones, to be kept.

    An inherited one may hold unwritten text, or close its descriptor when it is collected.
    """
    kept: list[object] = [sys.stdin, sys.stdout, sys.stderr]
    kept += [sys.__stdin__, sys.__stdout__, sys.__stderr__]
    sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115
    for name, fd in (("stdout", 1), ("stderr", 2)):
        file = open(  # noqa: SIM115
            fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    return kept


def _flush_output() -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()


def _serve_owner(setup: RankSetup) -> int:
    with contextlib.closing(Pipe(socket.socket(fileno=setup.channel_fd))) as pipe:
        return _serve_on(pipe, setup)


def _serve_on(pipe: Pipe, setup: RankSetup) -> int:
    report = Reporter(pipe)
    if setup.proves_threads:
        openmp.run_parallel_regions()
        report(THREADS_PROVEN)
    abort_word = AbortWord(setup.memory_fd)
    context = WorkerContext(
        rank=setup.rank,
        world_size=setup.world_size,
        report=report,
        shared_memory_fd=setup.memory_fd if setup.has_shared_memory else None,
        device_index=setup.device_index,
        rendezvous=setup.rendezvous and replace(setup.rendezvous, listen_fd=setup.listen_fd),
        is_aborted=abort_word.is_set,
    )
    return serve(pipe, report, setup.rank, lambda: build_worker(setup.entry, setup.config, context))


def build_worker(entry: str, config: bytes, context: WorkerContext) -> Worker:
    """Import the class that `entry` ("package.module:Class") names, and make one."""
    module, _, name = entry.partition(":")
    worker_class = getattr(importlib.import_module(module), name)
    return worker_class(pickle.loads(config), context)


class Reporter:
    """Sends a rank's progress to its owner, not more often than anyone can see."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._phase = ""
        self._sent_at = 0.0
        self.call_id = START_ID

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report that the current call has come so far."""
        now = time.monotonic()
        is_news = phase != self._phase or done >= total
        if is_news or now - self._sent_at >= _REPORT_INTERVAL:
            self._phase, self._sent_at = phase, now
            self._pipe.send(Progress(self.call_id, (phase, done, total)))


def serve(pipe: Pipe, report: Reporter, rank: int, build: Callable[[], Worker]) -> int:
    """Build a worker, answer calls until the stop or the owner's end; return the exit code."""
    try:
        worker = build()
    except Exception as error:
        pipe.send(Failure(START_ID, describe_error(rank, error)))
        return 1
    pipe.send(Reply(START_ID, None))
    while (raw := pipe.receive()) is not None:
        report.call_id = raw.id
        if _answer(pipe, rank, worker, raw):
            return 0
    return 0


def _answer(pipe: Pipe, rank: int, worker: Worker, raw: RawFrame) -> bool:
    """Answer one call; return whether it was the last."""
    is_stop = False
    try:
        command: Any = decode(raw).body
        if isinstance(command, Stop):
            is_stop = True
            pipe.send(Reply(raw.id, worker.stop(command)))
        else:
            pipe.send(Reply(raw.id, worker.handle(command)))
    except Exception as error:
        # Also an answer that cannot be pickled: nothing of it has been sent then.
        pipe.send(Failure(raw.id, describe_error(rank, error)))
    return is_stop
