"""OpenMP thread pools around a fork: released before it, proven after it.

A pool's threads do not survive a fork, and a forked process that believes in them hangs at its next
parallel region. Works on whatever OpenMP runtimes happen to be loaded; loads none itself.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$")
_PAUSE_HARD = 2
_NUM_THREADS = ctypes.c_uint(2)
"""Enough to need the pool, whatever OMP_NUM_THREADS says."""


@contextmanager
def released_pools() -> Generator[None]:
    """Release the calling thread's pools; restore its settings afterwards.

    The thread that calls this must be the one that forks: a pool belongs to its thread.
    """
    runtimes = _loaded_runtimes()
    num_threads = [int(r.omp_get_max_threads()) for r in runtimes]
    for runtime in runtimes:
        if hasattr(runtime, "omp_pause_resource_all"):
            runtime.omp_pause_resource_all(_PAUSE_HARD)
    try:
        yield
    finally:
        for runtime, wanted in zip(runtimes, num_threads, strict=True):
            if runtime.omp_get_max_threads() != wanted:
                runtime.omp_set_num_threads(wanted)


def run_parallel_regions() -> None:
    """Run one parallel region in every loaded runtime; hangs where a fork broke a pool."""
    libc = ctypes.CDLL(None)
    for runtime in _loaded_runtimes():
        if hasattr(runtime, "GOMP_parallel"):
            # Any function without effect will do: each thread of the pool calls it once.
            runtime.GOMP_parallel(libc.getpid, None, _NUM_THREADS, ctypes.c_uint(0))


def _loaded_runtimes() -> list[ctypes.CDLL]:
    paths: set[str] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if _RUNTIME.search(path[1] + path[2]):
            paths.add(path[1] + path[2])
    return [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in sorted(paths)]
