"""A Ray driver that is a process of its own: tests send it functions to run.

The process of the tests stays free of Ray, whose threads would outlive every test; and a test can
end a driver in any way.

    python -m tests.support.ray_driver FD
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

ROOT = Path(__file__).parents[2]
INIT: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 80_000_000,
}
"""As little of Ray as there can be."""
RAY_ENVIRONMENT = {
    # This machine's memory is not Ray's to watch: it would kill workers of these tests for others.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a token would be left in the home directory
}
_LENGTH = struct.Struct("!Q")
_END_SECONDS = 30.0
T = TypeVar("T")


class DriverError(Exception):
    """What ran in the driver raised; the message is the traceback there."""


class RayDriver:
    """One driver process, and a short-lived directory for a Ray that it starts."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        # The paths of Ray's sockets must be short.
        self.directory = tempfile.mkdtemp(prefix="lr", dir="/tmp")
        os.mkdir(f"{self.directory}/ray")
        self._env = env or {}
        self._ray_options: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_driver", str(theirs.fileno())],
            cwd=ROOT,
            # Ray notes there which cluster is this machine's: no test may find another's.
            env={**environ, **RAY_ENVIRONMENT, "RAY_TMPDIR": self.directory, **self._env},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._is_stuck = False

    def _replace(self) -> None:
        """Start anew, with a new Ray: what is stuck in the driver is its test's, not the next's."""
        self._socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_SECONDS)
        self._start()
        if self._ray_options is not None:
            self.init(**self._ray_options)

    def init(self, **options: Any) -> None:
        """Start a Ray in the driver."""
        self._ray_options = options
        self.run(_init, {**INIT, **options}, timeout=100)

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 60) -> T:
        """Run a function in the driver's main thread; return or raise what it does.

        Raises:
            DriverError: it raised.
            TimeoutError: it took too long; the driver's stacks are on its stderr, and a new process
                serves what is run next.
            EOFError: the driver ended.
        """
        self.send(function, *args)
        return self.receive(timeout)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a function run; `receive` returns what it returns."""
        if self._is_stuck:
            self._replace()
        data = cloudpickle.dumps((function, args))
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout: float = 60) -> Any:
        """Return the result of what was sent."""
        self._socket.settimeout(timeout)
        try:
            is_good, value = pickle.loads(_receive(self._socket))
        except TimeoutError:
            os.kill(self.process.pid, signal.SIGUSR1)
            self._is_stuck = True
            raise
        if not is_good:
            raise DriverError(f"in the driver:\n{value}")
        return value

    def kill(self) -> None:
        """SIGKILL the driver."""
        self.process.kill()
        self.process.wait(_END_SECONDS)

    def close(self) -> None:
        """End the driver and with it the Ray it started; wait for it."""
        self._socket.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(_END_SECONDS)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


def _init(options: dict[str, Any]) -> None:
    import ray

    ray.init(**options)


def _receive(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the driver ended")
        data += part
    return data


def main() -> None:
    """Run what arrives, until nobody sends any more."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, args = pickle.loads(_receive(sock))
            try:
                answer = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            data = cloudpickle.dumps(answer)
            sock.sendall(_LENGTH.pack(len(data)) + data)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
