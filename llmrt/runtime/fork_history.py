"""Whether forks of this process work, learned from those that did not."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(kw_only=True)
class ForkHistory:
    """What this process knows of its own forks. One per process: that is what it is about."""

    failure: str | None = None
    """Why it forks no more; None while it may."""
    pid: int = 0
    """Where that was learned: a process forked from this one may try again."""

    def forbid(self, reason: str) -> None:
        """Remember that a fork did not work here."""
        self.failure, self.pid = reason, os.getpid()

    def why_not(self) -> str | None:
        """Return why this process forks no more, or None."""
        return self.failure if self.pid == os.getpid() else None


FORK_HISTORY = ForkHistory()
