"""Limits on waiting that count only the time in which this process was there to wait."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_WAIT = 1.0


class Patience:
    """A time limit that is spent by waiting, a bit at a time.

    Time in which this process was stopped (SIGSTOP, a suspended laptop) is not held against whoever
    is waited for: a wait that took longer than it was asked to counts only as what it was asked.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._left = seconds
        self._asked = 0.0
        self._started_at = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the limit is reached."""
        return self._left <= 0

    def renew(self) -> None:
        """Start again."""
        self._left = self._seconds

    def start_wait(self, longest: float = _LONGEST_WAIT) -> float:
        """Return how long to wait now."""
        self._asked = min(self._left, longest, _LONGEST_WAIT)
        self._started_at = self._clock()
        return self._asked

    def end_wait(self) -> None:
        """Count the wait that `start_wait` began."""
        self._left -= min(self._clock() - self._started_at, self._asked)
