"""Waits for a launched group to serve, and says why where it does not."""

from __future__ import annotations

from collections.abc import Callable

from llmrt.config import Timeouts
from llmrt.errors import EngineStartError
from llmrt.runtime import reports
from llmrt.runtime.deadlines import Patience
from llmrt.runtime.fork_trial import ForkTrial
from llmrt.runtime.supervisor import Supervisor

FAILURE_GRACE = 0.2
"""How long the other ranks are given to say what went wrong with them, once one has."""

_TURN_SECONDS = 1.0


class StartWatch:
    """Watches one start. Its limit counts from the last progress of any rank or of the guard."""

    def __init__(
        self, supervisor: Supervisor, timeouts: Timeouts, *, check_interrupt: Callable[[], None]
    ) -> None:
        self._supervisor = supervisor
        self._timeouts = timeouts
        self._check_interrupt = check_interrupt
        self._patience = Patience(timeouts.start_progress)
        is_fork = supervisor.launched.start_method.name == "fork"
        self._trial = ForkTrial(timeouts.fork_probe) if is_fork else None

    def await_ready(self) -> None:
        """Return when every rank serves.

        Raises:
            EngineStartError: a rank or the guard failed, died, or made no progress.
            DistrustedForkError: a fork-born group did not prove itself.
        """
        num_seen = 0
        while not all(view.is_ready and view.pid for view in self._supervisor.ranks):
            self._check_interrupt()
            self._judge_fork()
            self._check_failure()
            if self._patience.is_spent:
                raise self._timed_out()
            self._pump()
            if self._supervisor.num_progress != num_seen:
                num_seen = self._supervisor.num_progress
                self._patience.renew()

    def _judge_fork(self) -> None:
        trial = self._trial
        if trial and not trial.judge(self._supervisor, is_out_of_time=self._patience.is_spent):
            self._trial = None

    def _pump(self) -> None:
        trial = self._trial
        longest = trial.start_wait(self._supervisor) if trial else _TURN_SECONDS
        self._supervisor.pump(self._patience.start_wait(longest))
        self._patience.end_wait()
        if trial:
            trial.end_wait(self._supervisor)

    def _check_failure(self) -> None:
        supervisor = self._supervisor
        if supervisor.start_failures:
            supervisor.pump_for(FAILURE_GRACE)
        failed = {failure.rank for failure in supervisor.start_failures}
        if failed and not supervisor.died_beside(failed):
            error, cause = reports.start_failed(supervisor.start_failures, len(supervisor.ranks))
            raise error from cause
        if supervisor.launch_failed is not None:
            raise reports.launch_failed(supervisor.launch_failed)
        death = reports.describe_death(supervisor)
        if death is not None:
            raise EngineStartError(f"The engine did not start. {death}") from death

    def _timed_out(self) -> EngineStartError:
        supervisor = self._supervisor
        late = [view for view in supervisor.ranks if not view.is_ready and view.is_alive]
        supervisor.ask_where(late, self._timeouts.stacks)
        return reports.start_timed_out(
            supervisor.ranks, supervisor.guard_phase, self._timeouts.start_progress
        )
