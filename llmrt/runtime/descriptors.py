"""File descriptors: making ours out of the way of the user's, and leaving inherited ones alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Collection

_FIRST_OF_OURS = 10
"""Ours start here: a program that closed its stdout must not find our socket in its place."""

_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD", "/dev/dxg", "/dev/accel")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected stream sockets, neither inherited by programs that this process runs."""
    first, second = socket.socketpair()
    try:
        moved = socket.socket(fileno=move_up(first.detach()))
    except BaseException:
        second.close()
        raise
    try:
        return moved, socket.socket(fileno=move_up(second.detach()))
    except BaseException:
        moved.close()
        raise


def pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a pipe, out of the way of descriptors 0 to 2."""
    read_end, write_end = os.pipe()
    try:
        moved = move_up(read_end)
    except BaseException:
        os.close(write_end)
        raise
    try:
        return moved, move_up(write_end)
    except BaseException:
        os.close(moved)
        raise


def move_up(fd: int) -> int:
    """Give a descriptor of ours a number out of the way of the user's, and of 0 to 9."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OF_OURS)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the limit is below our first
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
        raise
    finally:
        os.close(fd)


def open_descriptors() -> list[int]:
    """Return the descriptors that are open in this process."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in numbers if _is_open(fd)]  # one of them was the listing itself


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def inheritable_descriptors() -> list[int]:
    """Return the descriptors above 2 that a program run by this process would inherit."""
    found: list[int] = []
    for fd in open_descriptors():
        with contextlib.suppress(OSError):  # another thread closed it
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found


def replace_inherited(keep: Collection[int]) -> None:
    """Point every descriptor but `keep` at /dev/null.

    They are not closed: a Python object that came along will one day close its number, which must
    not be one of ours by then.
    """
    null = os.open("/dev/null", os.O_RDWR)
    for fd in open_descriptors():
        if fd not in keep and fd != null:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def has_accelerator_open() -> bool:
    """Return whether any library holds an accelerator's driver open in this process."""
    for fd in open_descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(_ACCELERATORS):
                return True
    return False
