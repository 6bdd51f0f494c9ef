"""Session: one opening of an engine, from start to reaped, on a thread of its own.

The thread owns the workers and the scheduler, so neither needs a lock. Everybody else leaves a
message and waits:

    any thread                      the session's thread
      Add(generation) ──► inbox ──►   scheduler.add ─► steps ─► generation.accept ─► future, stream
      Abort(request_id) ─► inbox ─►   scheduler.abort
      RemoteCall ────────► inbox ─►   between two steps: CallFunction to every rank ─► future
      Errand ────────────► inbox ─►   between two steps: what it does with Upkeep ─► future
      close() ─────────► flags  ──►   stop ladder ─► CloseReport ─► the thread ends

A session holds no reference to its Engine: an engine that is dropped is collected, and its
finalizer asks the session to close.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from llmrt.errors import (
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    LlmrtError,
    RemoteCallError,
    RequestError,
    WorkerFailedError,
)
from llmrt.generation import Generation
from llmrt.launch_plan import LaunchPlan
from llmrt.messages import (
    AllocateCache,
    Batch,
    BatchResult,
    CallFunction,
    Execute,
    FunctionRaised,
    FunctionReturned,
    Load,
    LoadReport,
)
from llmrt.outputs import CloseReport, TimelineEntry, WorkerInfo
from llmrt.runtime.supervisor import PendingCall, WorkerOutput
from llmrt.runtime.worker_group import WorkerGroup
from llmrt.scheduler.loop import StepLoop
from llmrt.scheduler.request import Request
from llmrt.scheduler.scheduler import Scheduler
from llmrt.scheduler.updates import (
    PromptLogprobsUpdate,
    SequenceFailed,
    SequenceFinished,
    TokenUpdate,
    Update,
)
from llmrt.upkeep import Upkeep

Result = TypeVar("Result")


class SessionState(Enum):
    """Where a session is in its life; it only moves downwards."""

    STARTING = "starting"
    """The thread brings the workers up."""
    RUNNING = "running"
    """Requests are served."""
    CLOSING = "closing"
    """The stop ladder runs."""
    CLOSED = "closed"
    """Closed on request; nothing is left."""
    DEAD = "dead"
    """The engine broke; nothing is left but the error."""


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A function of the user's that is to run on every worker."""

    command: CallFunction
    future: Future[list[FunctionReturned | FunctionRaised]] = field(
        default_factory=Future[list[FunctionReturned | FunctionRaised]]
    )
    abandoned_at: float | None = None
    """When its caller stopped waiting: from then on it has as long as a step."""


@dataclass(slots=True, eq=False)
class Errand(Generic[Result]):
    """Something that is to be done to the engine between two steps."""

    work: Callable[[Upkeep], Result]
    future: Future[Result] = field(default_factory=Future[Result])


class Session:
    """One opening of an engine. Every public method may be called from any thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        on_phase: Callable[[TimelineEntry], None],
        on_output: Callable[[WorkerOutput], None],
    ) -> None:
        self.owner_pid = os.getpid()
        self.state = SessionState.STARTING
        self.started: Future[None] = Future()
        self.timeline: list[TimelineEntry] = []
        self.report: CloseReport | None = None
        self.error: LlmrtError | None = None
        """Why calls fail once the session has ended."""
        self.scheduler: Scheduler | None = None
        self.upkeep: Upkeep | None = None
        self._plan = plan
        self._timeouts = plan.timeouts
        self._on_phase = on_phase
        self._opened_at = time.monotonic()
        self._inbox: deque[Generation | RemoteCall | Errand[Any]] = deque()
        self._aborts: deque[str] = deque()
        self._close_asked = False
        self._close_deadline: float | None = None
        self._generations: dict[str, Generation] = {}
        self._calls: deque[RemoteCall | Errand[Any]] = deque()
        self._active: tuple[RemoteCall, PendingCall] | None = None
        self._devices: tuple[str, ...] = ()
        self._ended = threading.Event()
        self.group = WorkerGroup(
            plan.spec,
            plan.launcher,
            plan.timeouts,
            on_output=on_output,
            on_phase=self._note_phase,
        )
        self._thread = threading.Thread(target=self._run, name="llmrt-engine", daemon=True)

    # ---- called from any thread ----

    def start(self) -> None:
        """Start the thread; `started` tells when the workers serve."""
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raise RequestError where a request can never be served."""
        assert self.scheduler is not None
        self.scheduler.check(request)

    def add(self, generation: Generation) -> None:
        """Queue a request; its future tells how it ends."""
        self._post(generation)

    def call(self, command: CallFunction) -> RemoteCall:
        """Queue a function to run on every worker, after the step that runs now."""
        remote_call = RemoteCall(command=command)
        self._post(remote_call)
        return remote_call

    def run(self, work: Callable[[Upkeep], Result]) -> Future[Result]:
        """Queue something to do to the engine, after the step that runs now."""
        errand = Errand(work=work)
        self._post(errand)
        return errand.future

    def abandon(self, remote_call: RemoteCall) -> None:
        """Say that nobody waits for this call any more."""
        remote_call.abandoned_at = time.monotonic()
        remote_call.future.cancel()
        self.group.wake()

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step. Takes no lock: finalizers call it."""
        self._aborts.append(request_id)
        self.group.wake()

    def ask_to_close(self) -> None:
        """Begin to close. Takes no lock and does not wait: finalizers call it."""
        self._close_asked = True
        self.group.interrupt()

    @staticmethod
    def drop(session: Session) -> None:
        """Close a session whose engine was collected; a forked copy of it is left alone."""
        if session.owner_pid == os.getpid():
            session.ask_to_close()

    def close(self, timeout: float) -> CloseReport | None:
        """Stop everything within *timeout* seconds and return how the workers ended.

        Ctrl-C moves the deadline to now; KeyboardInterrupt is raised when all are gone.
        """
        self._set_deadline(time.monotonic() + timeout)
        self.ask_to_close()
        interrupted = False
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt:
                interrupted = True
                self.group.hurry()
        self._thread.join()
        if interrupted:
            raise KeyboardInterrupt
        return self.report

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes as they are now, by rank."""
        workers, devices = self.group.workers, self._devices
        if len(devices) != len(workers):
            return workers
        return tuple(replace(w, device=d) for w, d in zip(workers, devices, strict=True))

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is this session's thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def _set_deadline(self, deadline: float) -> None:
        if self._close_deadline is None or deadline < self._close_deadline:
            self._close_deadline = deadline

    def _post(self, message: Generation | RemoteCall | Errand[Any]) -> None:
        self._inbox.append(message)
        self.group.wake()
        if self._ended.is_set():  # it ended between the caller's look and now
            self._fail_inbox()

    # ---- the session's thread ----

    def _run(self) -> None:
        try:
            self._bring_up()
            self._serve()
        except (
            BaseException
        ) as error:  # whatever it is, it ends the session and reaches its callers
            self._record(error)
        finally:
            self._shut_down()

    def _bring_up(self) -> None:
        self.group.start()
        replies = self._command(Load())
        reports = cast("list[LoadReport]", replies)
        self._devices = tuple(report.device for report in reports)
        num_blocks = min(report.num_blocks for report in reports)
        self._command(AllocateCache(num_blocks=num_blocks))
        self.scheduler = Scheduler(self._plan.scheduler_config(num_blocks))
        self.upkeep = Upkeep(self.group, self.scheduler, num_blocks, self._timeouts)
        self._note_phase(None, "ready", "")
        self.state = SessionState.RUNNING
        self.started.set_result(None)

    def _command(self, command: Load | AllocateCache) -> list[object]:
        return self.group.call(command, self._timeouts.start_progress, renew_on_progress=True)

    def _serve(self) -> None:
        assert self.scheduler is not None
        loop = StepLoop(self.scheduler, _GroupSteps(self.group, self._timeouts.step), self._deliver)
        while not self._close_asked:
            self._take_messages(self.scheduler)
            if self._active is not None:
                self._follow_call()
            elif self._calls:
                loop.drain()
                self._begin_next()
            elif not loop.run_once():
                self.group.poll(None)
            if self.group.failure is not None:
                raise self.group.failure

    def _take_messages(self, scheduler: Scheduler) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Generation):
                self._admit(scheduler, message)
            else:
                self._calls.append(message)
        while self._aborts:
            request_id = self._aborts.popleft()
            self._generations.pop(request_id, None)
            scheduler.abort(request_id)

    def _admit(self, scheduler: Scheduler, generation: Generation) -> None:
        if generation.future.cancelled():
            return
        assert self.upkeep is not None
        try:
            self.upkeep.check_awake()
            updates = scheduler.add(generation.request)
        except (RequestError, EngineAsleepError) as error:
            generation.fail(error)
        else:
            self._generations[generation.request.request_id] = generation
            self._deliver(updates)

    def _deliver(self, updates: Sequence[Update]) -> None:
        assert self.scheduler is not None
        for update in updates:
            generation = self._generations.get(update.request_id)
            if generation is None:
                continue
            match update:
                case TokenUpdate():
                    stop = generation.accept(update)
                    if stop is not None:
                        self.scheduler.finish(update.seq_id, stop)
                case PromptLogprobsUpdate():
                    generation.accept_prompt_logprobs(update)
                case SequenceFinished():
                    generation.accept_end(update)
                case SequenceFailed():
                    generation.fail(_as_error(update))
                    self.scheduler.abort(update.request_id)
            if generation.future.done():
                self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.request.request_id, None)

    # ---- remote calls and errands ----

    def _begin_next(self) -> None:
        assert self.upkeep is not None
        asked = self._calls[0]
        if isinstance(asked, Errand):
            self._run_errand(asked, self.upkeep)
        elif self.upkeep.is_asleep:
            _fail(asked.future, EngineAsleepError("the engine is asleep; call `wake()` first."))
        elif not asked.future.cancelled():
            self._active = (asked, self.group.submit(asked.command))
        self._calls.popleft()

    def _run_errand(self, errand: Errand[Any], upkeep: Upkeep) -> None:
        """Do an errand. What breaks the engine is raised, and fails the errand when it ends."""
        try:
            result = errand.work(upkeep)
        except (RequestError, EngineAsleepError) as error:
            _fail(errand.future, error)
        else:
            with contextlib.suppress(InvalidStateError):  # its caller has left
                errand.future.set_result(result)

    def _follow_call(self) -> None:
        assert self._active is not None
        remote_call, pending = self._active
        if pending.missing:
            self.group.poll(self._patience(remote_call))
        if not pending.missing:
            self._active = None
            replies = self.group.wait(pending, self._timeouts.step)
            with contextlib.suppress(InvalidStateError):  # its caller has left
                remote_call.future.set_result(
                    cast("list[FunctionReturned | FunctionRaised]", replies)
                )
        elif self._patience(remote_call) == 0.0:
            self.group.wait(pending, 0.0)  # raises WorkerHungError, with stacks

    def _patience(self, remote_call: RemoteCall) -> float | None:
        if remote_call.abandoned_at is None:
            return None
        return max(0.0, remote_call.abandoned_at + self._timeouts.step - time.monotonic())

    # ---- the end ----

    def _record(self, error: BaseException) -> None:
        if self._close_asked:
            return
        if self.state is SessionState.STARTING:
            self.error = _as_start_error(error)
        elif isinstance(error, EngineDeadError):
            self.error = error
        else:
            self.error = EngineDeadError(
                f"the engine broke: {type(error).__name__}: {error}. "
                "This is a fault in llmrt; the engine can be opened again."
            )
            self.error.__cause__ = error

    def _shut_down(self) -> None:
        died = self.error is not None
        self.state = SessionState.DEAD if died else SessionState.CLOSING
        if self.error is None:
            self.error = EngineClosedError(
                "the engine was closed; open it again with `with` or `.open()`."
            )
        self._fail_running()
        try:
            self.report = self.group.close(self._time_to_close())
        finally:
            if not died:
                self.state = SessionState.CLOSED
            self._ended.set()
            self._fail_inbox()
            if not self.started.done():
                self.started.set_exception(self.error)

    def _time_to_close(self) -> float:
        if self._close_deadline is None:
            return self._timeouts.close
        return max(0.0, self._close_deadline - time.monotonic())

    def _fail_running(self) -> None:
        assert self.error is not None
        for generation in list(self._generations.values()):
            generation.fail(self.error)
        self._generations.clear()
        if self._active is not None:
            self._calls.appendleft(self._active[0])
            self._active = None
        while self._calls:
            _fail(self._calls.popleft().future, self.error)

    def _fail_inbox(self) -> None:
        assert self.error is not None
        with contextlib.suppress(IndexError):  # two threads may empty it together
            while True:
                message = self._inbox.popleft()
                if isinstance(message, Generation):
                    message.fail(self.error)
                else:
                    _fail(message.future, self.error)

    def _note_phase(self, rank: int | None, phase: str, detail: str) -> None:
        entry = TimelineEntry(
            seconds=time.monotonic() - self._opened_at, rank=rank, phase=phase, detail=detail
        )
        self.timeline.append(entry)
        self._on_phase(entry)


class _GroupSteps:
    """Runs steps on a worker group."""

    def __init__(self, group: WorkerGroup, step_timeout: float) -> None:
        self._group = group
        self._step_timeout = step_timeout

    def start(self, batch: Batch) -> PendingCall:
        return self._group.submit(Execute(batch=batch))

    def finish(self, handle: PendingCall) -> BatchResult:
        return cast("BatchResult", self._group.wait(handle, self._step_timeout)[0])


def _fail(future: Future[Any], error: LlmrtError) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _as_error(update: SequenceFailed) -> LlmrtError:
    failure = update.failure
    if update.by_user_code:
        return RemoteCallError(
            f"a logits processor of request {update.request_id!r} raised on {failure}\n"
            f"{failure.traceback}",
            failures=(failure,),
        )
    return RequestError(f"request {update.request_id!r} cannot go on: {failure.message}")


def _as_start_error(error: BaseException) -> EngineStartError:
    if isinstance(error, EngineStartError):
        return error
    failures = error.failures if isinstance(error, WorkerFailedError) else ()
    start_error = EngineStartError(f"the engine did not start: {error}", failures=failures)
    start_error.__cause__ = error
    return start_error
