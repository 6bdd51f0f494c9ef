"""Drives the stop ladder on a group, and reports how every rank ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from llmrt.config import Timeouts
from llmrt.messages import Stop
from llmrt.outputs import CloseReport, EndedBy, WorkerCloseReport
from llmrt.runtime import teardown
from llmrt.runtime.events import Abort, Shutdown, SignalRank
from llmrt.runtime.rank_view import RankView
from llmrt.runtime.supervisor import Supervisor


@dataclass(kw_only=True)
class _Descent:
    """How far down the ladder one rank has been taken."""

    is_asked: bool = False
    terminated_at: float | None = None
    is_killed: bool = False
    was_alive: bool = True
    ended_at: float | None = None


class GroupCloser:
    """Takes one group down. The deadline moves to now when `is_hurried` says so, or on Ctrl-C."""

    def __init__(
        self,
        supervisor: Supervisor,
        timeouts: Timeouts,
        total: float,
        *,
        is_broken: bool,
        is_hurried: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._limits = teardown.Limits.of(timeouts, total, is_broken=is_broken)
        self._is_broken = is_broken
        self._is_hurried = is_hurried
        self._clock = clock
        self._started_at = clock()
        self._launcher_told_at: float | None = None
        self._launcher_is_killed = False
        self._descents = [_Descent(was_alive=view.exited is None) for view in supervisor.ranks]

    def run(self) -> None:
        """Go down the ladder until everything has ended; raise a Ctrl-C only then."""
        interrupt: KeyboardInterrupt | None = None
        is_over = False
        while not is_over:
            try:
                is_over = self._step()
            except KeyboardInterrupt as error:
                interrupt = error
                self._limits = self._limits.hurried(self._elapsed())
        if interrupt is not None:
            raise interrupt

    def _elapsed(self) -> float:
        return self._clock() - self._started_at

    def _step(self) -> bool:
        if self._is_hurried():
            self._limits = self._limits.hurried(self._elapsed())
        self._note_ends()
        match teardown.plan(self._observe(), self._limits):
            case teardown.Over():
                return True
            case teardown.Wait(seconds=seconds):
                self._supervisor.pump(seconds)
            case step:
                self._do(step)
        return False

    def _do(self, step: teardown.Step) -> None:
        launched = self._supervisor.launched
        match step:
            case teardown.Ask(ranks=ranks):
                if self._is_broken:
                    launched.tell(Abort())
                self._supervisor.submit(Stop(destroy_group=not self._is_broken), ranks)
                for rank in ranks:
                    self._descents[rank].is_asked = True
            case teardown.Terminate(ranks=ranks):
                for rank in ranks:
                    launched.tell(SignalRank(rank=rank, signum=signal.SIGTERM))
                    self._descents[rank].terminated_at = self._elapsed()
            case teardown.Kill(ranks=ranks):
                for rank in ranks:
                    launched.tell(SignalRank(rank=rank, signum=signal.SIGKILL))
                    self._descents[rank].is_killed = True
            case teardown.EndLauncher():
                launched.tell(Shutdown())
                self._launcher_told_at = self._elapsed()
            case teardown.KillLauncher():
                launched.tell(Shutdown(force=True))
                self._launcher_is_killed = True
                for view in self._supervisor.ranks:
                    self._descents[view.rank].is_killed |= view.is_alive
            case _:
                raise AssertionError(f"no such step: {step!r}")

    def _note_ends(self) -> None:
        for view, descent in zip(self._supervisor.ranks, self._descents, strict=True):
            if view.exited is not None and descent.ended_at is None:
                descent.ended_at = self._elapsed()

    def _observe(self) -> teardown.Observed:
        return teardown.Observed(
            elapsed=self._elapsed(),
            living=tuple(self._observe_rank(v) for v in self._supervisor.ranks if v.is_alive),
            launcher_is_gone=self._supervisor.guard_exited is not None,
            launcher_told_at=self._launcher_told_at,
            launcher_is_killed=self._launcher_is_killed,
        )

    def _observe_rank(self, view: RankView) -> teardown.RankObserved:
        descent = self._descents[view.rank]
        return teardown.RankObserved(
            rank=view.rank,
            can_be_asked=view.is_ready and not view.is_hung and not view.channel.is_at_end,
            is_asked=descent.is_asked,
            terminated_at=descent.terminated_at,
            is_killed=descent.is_killed,
        )

    def report(self) -> CloseReport:
        """Return how every rank ended."""
        views = [view for view in self._supervisor.ranks if view.pid != 0]
        return CloseReport(
            workers=tuple(self._report_rank(view) for view in views), seconds=self._elapsed()
        )

    def _report_rank(self, view: RankView) -> WorkerCloseReport:
        descent = self._descents[view.rank]
        return WorkerCloseReport(
            rank=view.rank,
            pid=view.pid,
            group_destroyed=view.stopped is not None and view.stopped.group_destroyed,
            ended_by=_ended_by(descent),
            exit_code=None if view.exited is None else view.exited.exit_code,
            seconds=descent.ended_at or 0.0,
        )


def _ended_by(descent: _Descent) -> EndedBy:
    if not descent.was_alive:
        return "already gone"
    if descent.is_killed:
        return "SIGKILL"
    return "asked" if descent.terminated_at is None else "SIGTERM"
