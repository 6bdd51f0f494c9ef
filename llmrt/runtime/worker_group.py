"""N workers from start to reaped: start them, call them, close them.

Used by one thread, which is the only one that waits; `wake`, `interrupt` and `hurry` may come from
any other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from llmrt.config import Timeouts
from llmrt.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineNotOpenError,
    EngineStartError,
)
from llmrt.outputs import CloseReport, WorkerInfo
from llmrt.runtime import reports
from llmrt.runtime.deadlines import Patience
from llmrt.runtime.events import Abort
from llmrt.runtime.finalizer import let_go
from llmrt.runtime.fork_trial import DistrustedForkError
from llmrt.runtime.group_close import GroupCloser
from llmrt.runtime.group_start import FAILURE_GRACE, StartWatch
from llmrt.runtime.launchers.base import GroupSpec, Launcher
from llmrt.runtime.rank_view import PendingCall, RankView, WorkerOutput
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.supervisor import Supervisor

WorkerState = Literal["starting", "running", "stopping", "exited"]


_DEATH_GRACE = 0.05
_OUTPUT_SECONDS = 0.2


class Interrupted(Exception):  # noqa: N818 - nothing is wrong: somebody asked for it
    """`interrupt` was called while something was waited for."""


class WorkerGroup:
    """The workers of one engine."""

    def __init__(
        self,
        spec: GroupSpec,
        launcher: Launcher,
        timeouts: Timeouts,
        *,
        on_output: Callable[[WorkerOutput], None],
        on_phase: Callable[[int | None, str, str], None],
    ) -> None:
        self._spec = spec
        self._launcher = launcher
        self._timeouts = timeouts
        self._on_output = on_output
        self._on_phase = on_phase
        self._owner_pid = os.getpid()
        self._supervisor: Supervisor | None = None
        self._closer: GroupCloser | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._report: CloseReport | None = None
        self._is_interrupted = False
        self._is_hurried = False
        self.failure: EngineDeadError | None = None
        """Why the group serves nothing any more; stays until it is dropped."""
        self.start_method: StartMethod = spec.start_method
        """How the workers really came to be, after a fork that was given up."""

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers as they are known now; empty before the start and after the close."""
        supervisor = self._supervisor
        if supervisor is None:
            return ()
        host = supervisor.launched.host
        return tuple(self._info(view, host) for view in supervisor.ranks)

    def _info(self, view: RankView, host: str) -> WorkerInfo:
        state: WorkerState = "running" if view.is_ready else "starting"
        if view.exited is not None:
            state = "exited"
        elif self._closer is not None:
            state = "stopping"
        return WorkerInfo(
            rank=view.rank, pid=view.pid, host=view.host or host, device="", state=state
        )

    # ---- from any thread ----

    def wake(self) -> None:
        """Make the current or next `poll` return."""
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.wake()

    def interrupt(self) -> None:
        """Make whatever `start` or `wait` is in progress, or comes next, raise Interrupted.

        `close` ends this.
        """
        self._is_interrupted = True
        self.wake()

    def hurry(self) -> None:
        """Move the deadline of the current or next `close` to now."""
        self._is_hurried = True
        self.wake()

    def cut_off(self) -> None:
        """Have every process killed; the last resort where the group's own thread is stuck."""
        supervisor = self._supervisor
        if supervisor is not None:
            let_go(self._owner_pid, supervisor.launched.lifeline, ())

    # ---- start ----

    def start(self) -> None:
        """Start the workers and return when every one of them serves.

        Raises:
            EngineStartError: they did not come up; nothing of them is left.
            Interrupted: `interrupt` was called; nothing of them is left.
        """
        self._check_process()
        assert self._supervisor is None, "A group is started once."
        spec = self._spec
        while True:
            try:
                self._start(spec)
                return
            except DistrustedForkError as error:
                self._abandon()
                instead = self._launcher.distrust(spec, str(error))
                assert instead is not None
                spec = instead
                self._on_phase(None, "fork given up", str(error))
            except BaseException:
                self._abandon()
                raise

    def _start(self, spec: GroupSpec) -> None:
        try:
            launched = self._launcher.launch(spec, self._timeouts)
            try:
                self._supervisor = Supervisor(
                    launched,
                    on_output=self._on_output,
                    on_phase=self._on_phase,
                )
            except BaseException:
                launched.release()
                raise
        except OSError as error:
            raise EngineStartError(
                f"The engine did not start: {error}. Its processes could not be made; "
                "see `ulimit -n` for open files, `ulimit -u` for processes."
            ) from error
        self.start_method = launched.start_method
        self._finalizer = weakref.finalize(
            self, let_go, self._owner_pid, launched.lifeline, self._supervisor.sockets
        )
        watch = StartWatch(
            self._supervisor, self._timeouts, check_interrupt=self._raise_if_interrupted
        )
        watch.await_ready()

    # ---- calls ----

    def submit(self, command: object, ranks: Sequence[int] | None = None) -> PendingCall:
        """Send a command to all ranks, or to some, without waiting."""
        supervisor = self._running()
        self._raise_if_failed(supervisor)
        return supervisor.submit(command, range(len(supervisor.ranks)) if ranks is None else ranks)

    def wait(
        self, call: PendingCall, timeout: float, *, renew_on_progress: bool = False
    ) -> list[object]:
        """Return the answers to a call, in the order of its ranks.

        With `renew_on_progress` the limit is on the time without progress. Time in which this
        process itself was stopped does not count.

        Raises:
            WorkerDiedError: a worker ended. Ranks that wait for it are not waited for.
            WorkerHungError: the time was up.
            WorkerFailedError: a worker's own code raised.
            Interrupted: `interrupt` was called; the answers that still come are dropped.
        """
        supervisor = self._running()
        patience = Patience(timeout)
        num_seen = supervisor.num_progress
        while not call.is_done:
            self._raise_if_interrupted()
            self._raise_if_call_failed(supervisor, call)
            self._raise_if_failed(supervisor)
            if patience.is_spent:
                self._raise_hung(supervisor, call, timeout)
            supervisor.pump(patience.start_wait())
            patience.end_wait()
            if renew_on_progress and supervisor.num_progress != num_seen:
                num_seen = supervisor.num_progress
                patience.renew()
        return [call.replies[rank] for rank in call.ranks]

    def call(
        self, command: object, timeout: float, *, renew_on_progress: bool = False
    ) -> list[object]:
        """Submit and wait."""
        return self.wait(self.submit(command), timeout, renew_on_progress=renew_on_progress)

    def poll(self, timeout: float | None) -> None:
        """Handle what happens, until something did, `wake` was called, or the time is up."""
        supervisor = self._running()
        supervisor.pump(timeout)
        self._note_death(supervisor)

    def catch_up_with_output(self) -> None:
        """Hand on what workers have printed by now, before anything that happens later."""
        self._running().catch_up_with_output(_OUTPUT_SECONDS)

    def _running(self) -> Supervisor:
        self._check_process()
        if self._supervisor is None:
            error = EngineNotOpenError if self._report is None else EngineClosedError
            raise error("The workers are not running.")
        return self._supervisor

    def _check_process(self) -> None:
        pid = os.getpid()
        if pid != self._owner_pid:
            raise EngineNotOpenError(
                f"This engine belongs to process {self._owner_pid}; process {pid}, forked from it, "
                "can neither use nor close it. Open an engine of its own here."
            )

    def _raise_if_interrupted(self) -> None:
        if self._is_interrupted:
            raise Interrupted

    def _raise_if_failed(self, supervisor: Supervisor) -> None:
        self._note_death(supervisor)
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def _note_death(self, supervisor: Supervisor) -> None:
        if self.failure is None:
            self.failure = reports.describe_death(supervisor)
        if self.failure is None and supervisor.broken is not None:
            self.failure = reports.rank_sent_garbage(supervisor.broken)

    def _raise_if_call_failed(self, supervisor: Supervisor, call: PendingCall) -> None:
        if not call.failures or self.failure is not None:
            return
        # A peer of a dead rank may raise before its death is known.
        supervisor.pump_for(_DEATH_GRACE, until=lambda: bool(supervisor.deaths))
        supervisor.launched.tell(Abort())  # ranks that wait for the failed one give up
        supervisor.pump_for(FAILURE_GRACE, until=lambda: not call.missing)
        if not supervisor.died_beside({failure.rank for failure in call.failures}):
            self.failure = reports.call_failed(call)

    def _raise_hung(self, supervisor: Supervisor, call: PendingCall, timeout: float) -> NoReturn:
        hung = [supervisor.ranks[rank] for rank in call.missing]
        for view in hung:
            view.is_hung = True
        supervisor.ask_where(hung, self._timeouts.stacks)
        self.failure = reports.ranks_hung(call, hung, timeout, supervisor.launched.host)
        raise self.failure

    # ---- close ----

    def close(self, timeout: float | None = None) -> CloseReport:
        """Stop the workers, one way or another, and return how each ended. May be called twice.

        In a process forked from the owner it does nothing.
        """
        if os.getpid() != self._owner_pid:
            return CloseReport(workers=(), seconds=0.0)
        if self._report is None:
            try:
                self._take_down(self._timeouts.close if timeout is None else timeout)
            finally:
                self._is_interrupted = self._is_hurried = False
        return self._report or CloseReport(workers=(), seconds=0.0)

    def _abandon(self) -> None:
        """Leave nothing of a start that failed."""
        self._take_down(0.0)
        self._report = None

    def _take_down(self, total: float) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            return
        self._closer = closer = GroupCloser(
            supervisor,
            self._timeouts,
            total,
            is_broken=self.failure is not None or bool(supervisor.deaths),
            is_hurried=lambda: self._is_hurried,
        )
        try:
            closer.run()
        finally:
            self._report = closer.report()
            if self._finalizer is not None:
                self._finalizer.detach()
            self._supervisor = self._closer = None
            supervisor.close()
            supervisor.launched.release()
