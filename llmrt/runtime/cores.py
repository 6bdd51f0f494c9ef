"""How much of the machine this process may use: cores and memory, under affinity and cgroups.

Containers limit both by cgroups (v1 or v2), which neither `os.cpu_count()` nor /proc/meminfo shows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmrt.errors import ConfigError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What torch itself takes its number of threads from."""


def threads_per_rank(
    num_ranks: int, environ: Mapping[str, str] = os.environ, *, cores: int | None = None
) -> int | None:
    """Return how many threads each of the ranks on this host may run, at least one.

    None where the user has said so already in the environment: the rank then keeps that.
    """
    if any(environ.get(name, "").strip() for name in _THREAD_VARIABLES):
        return None
    return max(1, (available_cores() if cores is None else cores) // num_ranks)


def available_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: its affinity, or a lower quota, rounded up.

    Args:
        root: Where /proc and /sys are.
    """
    return max(1, min([_num_schedulable_cores(), *map(math.ceil, _core_quotas(root))]))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process could still take before something is swapped or killed.

    Args:
        root: Where /proc and /sys are.

    Raises:
        ConfigError: neither /proc/meminfo nor a cgroup says.
    """
    rooms = [*_machine_room(root), *_cgroup_rooms(root)]
    if not rooms:
        raise ConfigError(
            f"Cannot tell how much memory is available: {root / 'proc/meminfo'} has no "
            "MemAvailable, and no cgroup sets a limit. Give kv_cache_bytes."
        )
    return max(0, min(rooms))


def cgroup_version(root: Path = Path("/")) -> int | None:
    """Return which cgroups limit memory here, 1 or 2; None without cgroups."""
    if next(_directories(root, "memory"), None) is not None:
        return 1
    return 2 if next(_directories(root, ""), None) is not None else None


def _num_schedulable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _core_quotas(root: Path) -> Iterator[float]:
    for directory in _directories(root, ""):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdecimal() and _number(period):
            yield int(quota) / int(period)
    for directory in _directories(root, "cpu"):
        quota = _number(_read(directory / "cpu.cfs_quota_us"))  # -1, so no number, without limit
        period = _number(_read(directory / "cpu.cfs_period_us"))
        if quota and period:
            yield quota / period


def _machine_room(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroup_rooms(root: Path) -> Iterator[int]:
    files = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controller, (limit_file, usage_file, reclaimable) in files.items():
        for directory in _directories(root, controller):
            limit = _number(_read(directory / limit_file))
            usage = _number(_read(directory / usage_file))
            if limit is not None and usage is not None:
                # Page cache that nobody used lately counts as used, but makes way.
                yield limit - usage + _statistic(directory / "memory.stat", reclaimable)


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


def _directories(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup and its parents, each of which may limit it.

    Args:
        root: Where /proc and /sys are.
        controller: A controller of cgroup v1, or "" for the one tree of v2.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        # In a container the path may be the host's: then only its root is mounted here.
        own = Path(path.lstrip("/"))
        mount = _mount(root, controllers)
        for directory in (mount / own, *(mount / parent for parent in own.parents)):
            if directory.is_dir():
                yield directory


def _mount(root: Path, controllers: str) -> Path:
    top = root / "sys/fs/cgroup"
    if controllers:
        return top / controllers
    # Beside v1 the tree of v2 has a folder of its own.
    return top / "unified" if (top / "unified").is_dir() else top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
