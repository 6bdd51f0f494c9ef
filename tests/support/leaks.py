"""What a test may not leave behind: processes, threads, descriptors, shared memory, temp files."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Snapshot:
    """What this process has at one moment."""

    children: frozenset[int]
    threads: frozenset[int]
    descriptors: Counter[str]
    shared_memory: frozenset[str]
    temporary_files: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            children=frozenset(p.pid for p in psutil.Process().children(recursive=True)),
            threads=frozenset(int(name) for name in os.listdir("/proc/self/task")),
            descriptors=Counter(_descriptors()),
            shared_memory=frozenset(os.listdir("/dev/shm")),
            temporary_files=frozenset(
                name for name in os.listdir(tempfile.gettempdir()) if "llmrt" in name
            ),
        )

    def left_since(self, before: Snapshot) -> list[str]:
        """Return what is here now and was not then, in words."""
        left = [f"process {_describe(pid)}" for pid in self.children - before.children]
        left += [f"native thread {tid}" for tid in self.threads - before.threads]
        left += [f"descriptor {name}" for name in self.descriptors - before.descriptors]
        left += [f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory]
        left += [f"temp file {name}" for name in self.temporary_files - before.temporary_files]
        return left


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        # The inode of a socket or pipe tells nothing, and pytest opens its own files as it goes.
        yield target.partition("[")[0] if target.startswith(("socket:", "pipe:")) else target


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} {process.name()} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(pid)


def start_torch_threads() -> None:
    """Let torch start the threads that it never ends, so that no test seems to leave them."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.ones(1 << 20).sum()


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if what runs inside leaves anything; what ends by itself gets a moment."""
    start_torch_threads()
    gc.collect()
    before = Snapshot.take()
    yield
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (left := Snapshot.take().left_since(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert not left, "left behind: " + "; ".join(left)


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int] | tuple[int, ...], seconds: float) -> float:
    """Wait for processes to end; fail after a while. Return how long it took."""
    started_at = time.monotonic()
    while any(is_running(pid) for pid in pids):
        waited = time.monotonic() - started_at
        assert waited < seconds, f"still running: {[_describe(p) for p in pids if is_running(p)]}"
        time.sleep(0.005)
    return time.monotonic() - started_at
