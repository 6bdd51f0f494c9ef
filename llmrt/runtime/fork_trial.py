"""Whether a fork-born group is to be believed: only after each rank has proven its thread pools.

A pool that came through a fork without its threads hangs at its first parallel region, and at
nothing before that: so each rank runs one and says so.
"""

from __future__ import annotations

from llmrt.runtime.deadlines import Patience
from llmrt.runtime.supervisor import Supervisor


class DistrustedForkError(Exception):
    """A fork-born group did not prove itself; its message is the reason."""


class ForkTrial:
    """Watches a fork-born group until it has proven itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._patience = Patience(seconds)

    def start_wait(self, supervisor: Supervisor) -> float:
        """Return how long to wait at most; imports of the guard are not the trial's business."""
        return self._patience.start_wait() if self._is_silent(supervisor) else 1.0

    def end_wait(self, supervisor: Supervisor) -> None:
        """Count the wait against those who have yet to speak."""
        if self._is_silent(supervisor):
            self._patience.end_wait()
        else:
            self._patience.renew()

    def judge(self, supervisor: Supervisor, *, is_out_of_time: bool) -> bool:
        """Return whether the trial goes on; raise DistrustedForkError where it is lost."""
        if all(view.proved_threads for view in supervisor.ranks):
            return False
        if supervisor.guard_exited is not None and supervisor.launch_failed is None:
            raise DistrustedForkError("the forked guard died")
        if supervisor.deaths and not supervisor.start_failures:
            raise DistrustedForkError(f"forked rank {supervisor.deaths[0].rank} died")
        if self._patience.is_spent or is_out_of_time:
            raise DistrustedForkError(
                f"no sign of life from {self._silent(supervisor)} for {self._seconds:g} s"
            )
        return True

    def _is_silent(self, supervisor: Supervisor) -> bool:
        return not supervisor.guard_phase or any(
            view.pid != 0 and not view.proved_threads for view in supervisor.ranks
        )

    def _silent(self, supervisor: Supervisor) -> str:
        ranks = [str(v.rank) for v in supervisor.ranks if v.pid and not v.proved_threads]
        return f"forked rank {', '.join(ranks)}" if ranks else "the forked guard"
