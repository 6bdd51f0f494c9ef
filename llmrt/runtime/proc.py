"""What /proc and the cgroup files say of processes. Reads only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, not interruptible",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, not reaped",
    "X": "ended",
    "I": "idle",
}


def num_native_threads() -> int:
    """Return how many threads this process has, Python's and others'."""
    return len(os.listdir("/proc/self/task"))


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children of a process, ended ones included."""
    return [child for child in _all_pids() if _stat_field(child, 1) == pid]


def living_in_session(session: int) -> list[int]:
    """Return the pids of a session's processes that have not ended."""
    return [p for p in _all_pids() if _stat_field(p, 3) == session and state_code(p) not in "ZX"]


def state_code(pid: int) -> str:
    """Return the one-letter state of a process; `X` where there is none."""
    fields = _stat(pid)
    return fields[0] if fields else "X"


def describe_state(pid: int) -> str:
    """Return the state of a process in words, with the kernel function it sleeps in where known."""
    code = state_code(pid)
    words = f"{code} ({_STATES.get(code, 'unknown')})"
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text()
        if where not in ("", "0"):
            words += f" in {where}"
    return words


def catches_signal(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal, and does not block it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    bit = 1 << (signum - 1)
    caught, blocked = (int(masks.get(name, "0"), 16) for name in ("SigCgt", "SigBlk"))
    return bool(caught & bit) and not blocked & bit


def num_oom_kills() -> int | None:
    """Return how often the kernel killed for memory in this cgroup; None where unreadable."""
    for path, key in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    return None


def available_memory_bytes() -> int:
    """Return how much memory could be allocated, under the machine's and the cgroup's limits."""
    limits = [_mem_available()]
    for path in _cgroup_paths():
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                used = int((path / usage).read_text())
                limits.append(max(0, int((path / limit).read_text()) - used))
    return min(limits)


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _oom_counters() -> list[tuple[Path, str]]:
    names = ("memory.events", "memory.oom_control")
    return [(path / name, "oom_kill") for path in _cgroup_paths() for name in names]


def _cgroup_paths() -> list[Path]:
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup")
            if controllers == "":
                paths += [root / path.lstrip("/"), root]
            elif "memory" in controllers.split(","):
                paths += [root / "memory" / path.lstrip("/"), root / "memory"]
    return paths


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat_field(pid: int, index: int) -> int:
    fields = _stat(pid)
    return int(fields[index]) if fields else -1


def _stat(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on: state, ppid, pgrp, session, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name in front is in parentheses and may hold anything, parentheses too.
    return text.rpartition(")")[2].split()
