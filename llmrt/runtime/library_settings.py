"""Environment variables that native libraries read once, as they load: what workers do best with.

They reach a guard that is spawned; one that is forked has its libraries already.
"""

from __future__ import annotations

from collections.abc import Mapping

_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SPINS = "4000"
"""How often an OpenMP thread looks again before it sleeps: some 0.1 ms, longer than the gap between
two operations of a step. Never to spin makes a step on two threads 1.6 times as long; to spin
without end, as is the default, 50 times, as soon as another program needs one of the cores."""

_MIB = 1 << 20
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(128 * _MIB),
    "MALLOC_TRIM_THRESHOLD_": str(512 * _MIB),
}
"""A step frees what the next one allocates: given back to the kernel in between, every page would
be cleared anew, which took 6 % of a long prompt's time."""

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
"""1 asks for huge pages, where the kernel gives them to who asks: weights are read once a token,
and one thread reads them a fifth faster when a page is 2 MB."""


def library_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to set beside or in *environ*; what the user has chosen there stays."""
    settings = {name: value for name, value in _MALLOC.items() if name not in environ}
    if not any(name in environ for name in _WAIT_POLICIES):
        settings["GOMP_SPINCOUNT"] = _SPINS
    tunables = environ.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        settings[_TUNABLES] = f"{tunables}:{_HUGE_PAGES}=1".removeprefix(":")
    return settings
