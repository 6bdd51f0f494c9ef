"""The Ray that llmrt itself started in this process: counted, and shut down by its last user."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from llmrt.runtime import ray_cluster
from llmrt.runtime.placement import PlacementError

_START_SECONDS = 120.0
_SHUT_DOWN_SECONDS = 30.0


@dataclass(kw_only=True)
class OwnRay:
    """Ray as far as llmrt started it. One per process: that is what it is about."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pid: int = 0
    _num_users: int = 0
    _keeper: _Keeper | None = None

    def enter(self) -> bool:
        """Have Ray initialised; return whether it is llmrt's, to be left again.

        Raises:
            PlacementError: Ray could not be started.
        """
        with self._lock:
            if self._pid != os.getpid():  # a fork of the process that started it
                self._pid, self._num_users, self._keeper = os.getpid(), 0, None
            if self._keeper is None:
                if ray_cluster.is_initialized():
                    return False
                self._keeper = _Keeper()
                try:
                    self._keeper.start()
                except BaseException:
                    self._keeper = None
                    raise
            self._num_users += 1
            return True

    def leave(self) -> None:
        """Shut Ray down, if this was its last user and nobody else's actor or group lives in it."""
        with self._lock:
            self._num_users -= 1
            keeper = self._keeper
            if self._num_users or keeper is None or ray_cluster.is_used_by_others():
                return
            self._keeper = None
            keeper.stop()


class _Keeper:
    """The thread that starts Ray and shuts it down.

    Ray ties the life of the processes that it starts to the thread that starts them.
    """

    def __init__(self) -> None:
        self._is_up = threading.Event()
        self._may_end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="llmrt-own-ray", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._is_up.wait(_START_SECONDS):
            self._may_end.set()
            raise PlacementError(f"Ray did not start within {_START_SECONDS:g} s.")
        if self._error is not None:
            raise PlacementError(
                f"Ray could not be started: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def stop(self) -> None:
        self._may_end.set()
        self._thread.join(_SHUT_DOWN_SECONDS)

    def _run(self) -> None:
        before = dict(os.environ)
        try:
            ray_cluster.start()
        except BaseException as error:
            self._error = error
        self._is_up.set()
        if self._error is None:
            after = dict(os.environ)
            self._may_end.wait()
            ray_cluster.shut_down()
            ray_cluster.take_back(before, after)


OWN_RAY = OwnRay()
