"""Workers of a few lines that do what real ones must not: the runtime's own tests need no torch."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from llmrt.config import WorkerContext
from llmrt.messages import Stop, Stopped


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """What a fake worker does wrong, and when."""

    fault: str = "none"
    """The name of a function below, without its underscore."""
    phase: str = "call"
    """`start`, `call` or `stop`: when the fault happens."""
    rank: int | None = None
    """The rank with the fault; None for every rank."""
    note: str = ""
    """A path that the fault may write to."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Answer with what was sent."""

    value: object = None


@dataclass(frozen=True, kw_only=True)
class Misbehave:
    """Do something wrong."""

    fault: str
    argument: object = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Answer with a fact about the process."""

    what: str
    arguments: tuple[object, ...] = field(default=())


class FakeWorker:
    """A worker that answers, until it is told to do something else."""

    def __init__(self, config: FakeConfig, context: WorkerContext) -> None:
        self.config = config
        self.context = context
        if config.fault == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._misbehave_in("start")

    def _misbehave_in(self, phase: str) -> object:
        mine = self.config.rank in (None, self.context.rank)
        if mine and self.config.phase == phase and self.config.fault != "none":
            return self.do(self.config.fault)
        return None

    def handle(self, command: object) -> object:
        match command:
            case Echo(value=value):
                return value
            case Misbehave(fault=fault, argument=argument, rank=rank):
                return self.do(fault, argument) if rank in (None, self.context.rank) else None
            case Ask(what=what, arguments=arguments):
                return getattr(self, f"ask_{what}")(*arguments)
            case _:
                raise ValueError(f"not understood: {command!r}")

    def stop(self, command: Stop) -> Stopped:
        self._misbehave_in("stop")
        return Stopped(rank=self.context.rank, group_destroyed=command.destroy_group)

    def do(self, fault: str, argument: object = None) -> object:
        return getattr(self, f"fault_{fault}")(argument)

    # ---- faults ----

    def fault_raise(self, _: object) -> None:
        raise ValueError(f"rank {self.context.rank} was told to fail")

    def fault_exit(self, code: object) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(int(code or 0))  # type: ignore[call-overload]

    def fault_exit_0(self, _: object) -> None:
        os._exit(0)

    def fault_exit_3(self, _: object) -> None:
        os._exit(3)

    def fault_sys_exit(self, _: object) -> None:
        sys.exit(5)

    def fault_kill(self, _: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fault_segfault(self, _: object) -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)

    def fault_freeze(self, _: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def fault_hang(self, _: object) -> None:
        threading.Event().wait()

    def fault_spin(self, _: object) -> None:
        """Keep the interpreter busy, deaf to everything a process can be deaf to."""
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_IGN)
        while True:
            pass

    def fault_deaf(self, _: object) -> None:
        """Get stuck; the constructor has seen to it that SIGTERM is ignored."""
        threading.Event().wait()

    def fault_sleep(self, seconds: object) -> None:
        time.sleep(float(seconds))  # type: ignore[arg-type]

    def fault_slow(self, _: object) -> None:
        for done in range(6):
            time.sleep(0.1)
            self.context.report("dawdling", done, 6)

    def fault_unpicklable(self, _: object) -> object:
        return threading.Lock()

    def _channel(self) -> socket.socket:
        """Find the rank's channel: the only stream socket pair end it has."""
        for name in os.listdir("/proc/self/fd"):
            try:
                sock = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue
            if sock.family == socket.AF_UNIX:
                return sock
            sock.close()
        raise AssertionError("no channel")

    def fault_garbage(self, _: object) -> None:
        self._channel().sendall(b"Traceback (most recent call last):\n" * 3)
        threading.Event().wait()

    def fault_half_frame(self, _: object) -> None:
        self._channel().sendall(b"LRT1\x01\0\0\0\0\0")
        os._exit(3)

    def fault_half_frame_hang(self, _: object) -> None:
        self._channel().sendall(b"LRT1\x01\0\0\0\0\0")
        threading.Event().wait()

    def fault_grandchild(self, path: object) -> int:
        child = subprocess.Popen(["sleep", "1000"])
        Path(str(path or self.config.note)).write_text(str(child.pid))
        return child.pid

    def fault_detached_grandchild(self, _: object) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def fault_print(self, num_lines: object) -> None:
        line = "x" * 999
        for _ in range(int(num_lines)):  # type: ignore[call-overload]
            print(line)
        print("the end", flush=True)

    def fault_ignore_abort(self, _: object) -> None:
        while True:
            time.sleep(0.01)

    def fault_wait_for_peer(self, _: object) -> None:
        """Wait as a collective does: until the runtime says that nobody will come."""
        while not self.context.is_aborted():
            time.sleep(0.001)
        raise RuntimeError("a peer is dead")

    # ---- facts ----

    def ask_result(self, call: bytes) -> object:
        """Call a function that was sent by value."""
        function, arguments, keywords = pickle.loads(call)
        return function(self.context.rank, *arguments, **keywords)

    def ask_pid(self) -> int:
        return os.getpid()

    def ask_name(self) -> str:
        return Path("/proc/self/comm").read_text().strip()

    def ask_env(self, name: str) -> str | None:
        return os.environ.get(name)

    def ask_path(self) -> list[str]:
        return sys.path

    def ask_main(self) -> str | None:
        return getattr(sys.modules["__main__"], "__file__", None)

    def ask_modules(self) -> list[str]:
        return sorted(sys.modules)

    def ask_num_threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def ask_descriptors(self) -> dict[int, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
        return found

    def ask_signals(self) -> dict[str, str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {k: v.strip() for k, v in (x.split(":", 1) for x in lines) if k.startswith("Sig")}

    def ask_flags(self) -> tuple[int, list[str]]:
        return sys.flags.dev_mode, sys.warnoptions

    def ask_shared(self) -> tuple[int, int] | None:
        fd = self.context.shared_memory_fd
        return None if fd is None else (fd, os.fstat(fd).st_size)

    def ask_write_shared(self, offset: int, data: bytes) -> None:
        assert self.context.shared_memory_fd is not None
        os.pwrite(self.context.shared_memory_fd, data, offset)

    def ask_read_shared(self, offset: int, num_bytes: int) -> bytes:
        assert self.context.shared_memory_fd is not None
        return os.pread(self.context.shared_memory_fd, num_bytes, offset)

    def ask_rendezvous(self) -> tuple[str, int, bool] | None:
        meeting = self.context.rendezvous
        return meeting and (meeting.host, meeting.port, meeting.listen_fd is not None)

    def ask_session(self) -> int:
        return os.getsid(0)
