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
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextvars import Context, copy_context
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
from llmrt.interruption import INTERRUPTIONS
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

_ATTENTION_SECONDS = 3.0
"""How long the session's thread has at least to turn to the stop ladder."""

_CLOSE_GRACE_SECONDS = 12.0
"""How long after its deadline the stop ladder has given up in any case."""


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
    context: Context = field(default_factory=copy_context)
    """Whose call it is, to libraries that ask: a notebook's cell, an asyncio task."""
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
        self.backend = plan.backend
        self.upkeep: Upkeep | None = None
        self._plan = plan
        self._timeouts = plan.timeouts
        self._on_phase = on_phase
        self._on_output = on_output
        self._opener: Context | None = copy_context()
        self._opened_at = time.monotonic()
        self._inbox: deque[Generation | RemoteCall | Errand[Any]] = deque()
        self._aborts: deque[str] = deque()
        self._close_asked = False
        self._is_exiting = False
        self._close_deadline: float | None = None
        self._generations: dict[str, Generation] = {}
        self._calls: deque[RemoteCall | Errand[Any]] = deque()
        self._active: tuple[RemoteCall, PendingCall] | None = None
        self._devices: tuple[str, ...] = ()
        self._has_begun = threading.Lock()  # taken once: by the thread, or to keep it from running
        self._ended = threading.Event()
        self._close_error: BaseException | None = None
        self.group = WorkerGroup(
            plan.spec,
            plan.launcher,
            plan.timeouts,
            on_output=self._forward_output,
            on_phase=self._note_phase,
        )
        self._thread = threading.Thread(target=self._run, name="llmrt-engine", daemon=True)

    # ---- called from any thread ----

    def start(self) -> None:
        """Start the thread; `started` tells when the workers serve.

        Raises:
            EngineStartError: this process can have no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineStartError(
                f"the engine did not start: {error}. Each open engine is one thread of this "
                "process; see `ulimit -u`."
            ) from error

    def check(self, request: Request) -> None:
        """Raise RequestError where a request can never be served."""
        assert self.scheduler is not None
        self.scheduler.check(request)

    def add(self, generations: Sequence[Generation]) -> None:
        """Queue requests, for one step as far as they fit; their futures tell how they end."""
        self._post(*generations)

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

    def begin_exit(self) -> None:
        """Begin to close because the process ends.

        Whoever still waits is a daemon thread: an error there would be noise in the last moment.
        """
        self._is_exiting = True
        self.ask_to_close()

    @staticmethod
    def drop(reference: weakref.ref[Session]) -> None:
        """Close a session whose engine was collected; a forked copy of it is left alone."""
        session = reference()
        if session is not None and session.owner_pid == os.getpid():
            session.ask_to_close()

    def close(self, timeout: float) -> CloseReport | None:
        """Stop everything within *timeout* seconds and return how the workers ended.

        Ctrl-C, or a `sys.exit()` in a signal handler, moves the deadline to now; it is raised when
        all are gone.

        Raises:
            LlmrtError: a callback keeps the session's thread, which alone can end it in order; or
                the caller is that callback. The workers are killed.
        """
        interruption: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._wait_for_end(timeout)
            except INTERRUPTIONS as error:
                interruption, timeout = error, 0.0
        if interruption is not None:
            raise interruption
        if self._close_error is not None:
            raise self._close_error
        return self.report

    def _wait_for_end(self, timeout: float) -> None:
        self._set_deadline(time.monotonic() + timeout)
        self.ask_to_close()
        if timeout == 0:
            self.group.hurry()
        if self._has_begun.acquire(blocking=False):  # its thread has not run, and now never will
            self._end()
        if self.is_own_thread:
            raise LlmrtError(
                "close() was called from a callback on the engine's own thread, for which it would "
                "have to wait: the engine closes when the callback has returned."
            )
        if not self._comes_to_its_end(timeout):
            self.group.cut_off()
            raise LlmrtError(
                "the engine's own thread does not come back, from a callback of yours or a logging "
                f"handler; its workers were killed. It is here:\n{_stack_of(self._thread)}"
            )
        if self._thread.ident is not None:
            self._thread.join()

    def _comes_to_its_end(self, timeout: float) -> bool:
        if self._ended.wait(max(timeout, _ATTENTION_SECONDS)):
            return True
        is_at_it = self.state in (SessionState.CLOSING, SessionState.DEAD)
        return is_at_it and self._ended.wait(_CLOSE_GRACE_SECONDS)

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

    def _post(self, *messages: Generation | RemoteCall | Errand[Any]) -> None:
        self._inbox.extend(messages)
        self.group.wake()
        if self._ended.is_set():  # it ended between the caller's look and now
            self._fail_inbox()

    # ---- the session's thread ----

    def _run(self) -> None:
        if not self._has_begun.acquire(blocking=False):
            return
        try:
            self._work()
            self._shut_down()
        except BaseException as error:  # it belongs to whoever closes
            self._close_error = error
        finally:
            self._end()

    def _work(self) -> None:
        try:
            if not self._close_asked:
                self._bring_up()
            self._serve()
        except BaseException as error:  # whatever it is, it ends the session and its callers' waits
            self._record(error)

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
        self._opener = None
        self.started.set_result(None)

    def _command(self, command: Load | AllocateCache) -> list[object]:
        return self.group.call(command, self._timeouts.start_progress, renew_on_progress=True)

    def _serve(self) -> None:
        if self.scheduler is None:  # closed before it was up
            return
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
        except BaseException:
            self._inbox.appendleft(generation)  # it ends with all the others
            raise
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
        asked = self._calls[0]  # until it is sent: a death that is noticed now ends it, too
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
            replies = self.group.wait(pending, self._timeouts.step)
            self.group.catch_up_with_output()  # what it printed comes before what it returned
            self._active = None
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
        self.state = SessionState.CLOSING if self.error is None else SessionState.DEAD
        self._set_error()
        self._fail_running()
        self.report = self.group.close(self._time_to_close())

    def _set_error(self) -> LlmrtError:
        if self.error is None:
            self.error = EngineClosedError(
                "the engine was closed; open it again with `with` or `.open()`."
            )
        return self.error

    def _end(self) -> None:
        """Say that nothing is left. It runs once, on whichever thread `_has_begun` fell to."""
        error = self._set_error()
        if self.state is not SessionState.DEAD:
            self.state = SessionState.CLOSED
        self._ended.set()
        self._fail_inbox()
        if not self.started.done() and not self._is_exiting:
            self.started.set_exception(error.for_one_caller())

    def _time_to_close(self) -> float:
        if self._close_deadline is None:
            return self._timeouts.close
        return max(0.0, self._close_deadline - time.monotonic())

    def _fail_running(self) -> None:
        waiting: list[Generation | RemoteCall | Errand[Any]] = [
            *self._generations.values(),
            *self._calls,
        ]
        if self._active is not None:
            waiting.insert(0, self._active[0])
        self._generations.clear()
        self._calls.clear()
        self._active = None
        for message in waiting:
            self._fail(message)

    def _fail_inbox(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may empty it together
            while True:
                self._fail(self._inbox.popleft())

    def _fail(self, message: Generation | RemoteCall | Errand[Any]) -> None:
        """End one caller's wait; what its callbacks raise must not keep it from the others."""
        if self._is_exiting:
            return
        with contextlib.suppress(BaseException):
            if isinstance(message, Generation):
                message.fail(self._set_error().for_one_caller())
            else:
                message.future.set_exception(self._set_error().for_one_caller())

    def _note_phase(self, rank: int | None, phase: str, detail: str) -> None:
        entry = TimelineEntry(
            seconds=time.monotonic() - self._opened_at, rank=rank, phase=phase, detail=detail
        )
        self.timeline.append(entry)
        with contextlib.suppress(Exception):  # a closed stderr keeps no engine from starting
            self._caller().run(self._on_phase, entry)

    def _forward_output(self, output: WorkerOutput) -> None:
        self._caller().run(self._on_output, output)

    def _caller(self) -> Context:
        """Return the context of whoever waits for what happens now.

        What is shown in it reaches them: in a notebook it lands in the cell that caused it.
        """
        if self._active is not None:
            return self._active[0].context
        for generation in self._generations.values():
            return generation.context
        return self._opener or Context()


class _GroupSteps:
    """Runs steps on a worker group."""

    def __init__(self, group: WorkerGroup, step_timeout: float) -> None:
        self._group = group
        self._step_timeout = step_timeout

    def start(self, batch: Batch) -> PendingCall:
        return self._group.submit(Execute(batch=batch))

    def finish(self, handle: PendingCall) -> BatchResult:
        return cast("BatchResult", self._group.wait(handle, self._step_timeout)[0])


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else "(ended)"


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
