"""What only prctl(2) can do: name a process, tie its life to its parent's, adopt orphans."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def set_name(name: str) -> None:
    """Name this process for ps and top; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send this signal when the thread that made this process ends; 0 for none."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum))


def become_subreaper() -> None:
    """Adopt descendants whose parents end, in the place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: ctypes.c_ulong | ctypes.c_char_p) -> None:
    zero = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
