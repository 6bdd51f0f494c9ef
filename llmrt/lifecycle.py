"""Lifecycle: opens and closes the sessions of one engine, one after another, from any thread.

    NEW ──open()──► STARTING ──► RUNNING ──close()──► CLOSING ──► CLOSED ──open()──► ...
                        └── fails ──► DEAD ◄── breaks ──┘                DEAD ──open()──► ...

It is all of an engine that must be let go of for its workers to end: nothing here is known to the
session, whose thread therefore keeps no engine alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from enum import Enum

from llmrt.checkpoint.resolve import resolve
from llmrt.config import EngineConfig
from llmrt.display.progress import Progress
from llmrt.errors import EngineNotOpenError, LlmrtError
from llmrt.launch_plan import make_launch_plan
from llmrt.opened import Opened
from llmrt.outputs import CloseReport
from llmrt.ownership import check_owner
from llmrt.runtime.live_sessions import track
from llmrt.session import Session
from llmrt.tokenizer import Tokenizer
from llmrt.worker_output import forward_output


class EngineState(Enum):
    """Where an engine is in its life."""

    NEW = "new"
    """Never opened."""
    STARTING = "starting"
    """Its workers come up."""
    RUNNING = "running"
    """It serves requests."""
    CLOSING = "closing"
    """Its workers are being stopped."""
    CLOSED = "closed"
    """Closed; it may be opened again."""
    DEAD = "dead"
    """It broke; it may be opened again."""


class Lifecycle:
    """The life of one engine. Every method may be called from any thread."""

    def __init__(self, options: EngineConfig) -> None:
        self.session: Session | None = None
        """The latest opening; None before the first."""
        self._options = options
        self._opened: Opened | None = None
        self._turn = threading.RLock()  # of whoever opens: one at a time
        self._is_opening = False
        self._is_cancelled = False
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None

    # ---- open ----

    def open(self) -> None:
        """Start a session; where that fails or is interrupted, leave nothing of it.

        Raises:
            ConfigError: model, options and machine do not go together; nothing was started.
            EngineStartError: the workers did not come up.
            EngineClosedError: somebody closed the engine meanwhile.
            LlmrtError: the engine is open already.
        """
        self.check_owner()
        with self._turn:
            if self.state in (EngineState.STARTING, EngineState.RUNNING):
                raise LlmrtError("the engine is open already; close it before opening it again.")
            try:
                self._is_opening, self._is_cancelled = True, False
                self._opened = self._open()
            except BaseException:
                self._end_session(0.0)
                raise
            finally:
                self._is_opening = False

    def _open(self) -> Opened:
        self._end_session(self._options.timeouts.close)  # of an earlier opening: it may be at work
        with Progress(self._options.progress) as progress:
            checkpoint = resolve(self._options.model, progress=progress)
            plan = make_launch_plan(self._options, checkpoint)
            session = Session(plan, on_phase=progress.show, on_output=forward_output)
            self._adopt(session)
            session.start()
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            session.started.result()
        return Opened(session, plan, tokenizer, checkpoint.generation_config)

    def _adopt(self, session: Session) -> None:
        """From now on whoever closes the engine, or drops it, closes this session."""
        if self._finalizer is not None:
            self._finalizer.detach()
        # A weak one: while there is something to close, the session's own thread keeps it.
        self._finalizer = weakref.finalize(self, Session.drop, weakref.ref(session))
        self._finalizer.atexit = False
        track(session)
        self.session = session
        if self._is_cancelled:  # by somebody who saw no session yet
            session.ask_to_close()

    # ---- close ----

    def close(self, timeout: float | None) -> CloseReport:
        """End the session, also one that is starting; return how its workers ended."""
        self.check_owner()
        self._is_cancelled = True
        self._is_opening = False  # which it is not for long, or was not for a Ctrl-C in `open()`
        try:
            return self._end_session(self._options.timeouts.close if timeout is None else timeout)
        except KeyboardInterrupt:
            self._end_session(0.0)
            raise

    def cancel_open(self) -> None:
        """Make an `open()` in another thread give up, without waiting for that."""
        self._is_cancelled = True
        session = self.session
        if session is not None and self._is_opening:
            session.ask_to_close()

    def _end_session(self, timeout: float) -> CloseReport:
        session = self.session
        report = None if session is None else session.close(timeout)
        return report or CloseReport(workers=(), seconds=0.0)

    # ---- what is so now ----

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        if self._is_opening:
            return EngineState.STARTING
        if self.session is None:
            return EngineState.NEW
        return EngineState(self.session.state.value)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine serves requests, of this process."""
        return self.state is EngineState.RUNNING and not self.is_foreign

    @property
    def is_foreign(self) -> bool:
        """Whether the session belongs to the process that this one was forked from."""
        return self.session is not None and self.session.owner_pid != os.getpid()

    def require_session(self) -> Session:
        """Return the latest session.

        Raises:
            EngineNotOpenError: there was none yet.
            EngineClosedError: it belongs to the process that this one was forked from.
        """
        if self.session is None:
            raise EngineNotOpenError(
                "the engine is not open: use `with Engine(...) as llm:` or call `.open()`."
            )
        self.check_owner()
        return self.session

    def require_opened(self) -> Opened:
        """Return what the verbs need.

        Raises:
            EngineNotOpenError: the engine is not open yet.
            EngineClosedError: it is closed, or belongs to another process.
            EngineDeadError: it broke.
        """
        session = self.require_session()
        if session.is_own_thread:
            raise LlmrtError(
                "an engine was called from a callback on its own thread, which would wait for "
                "itself: hand the work to another thread."
            )
        if session.error is not None:
            raise session.error.for_one_caller()
        opened = self._opened
        if opened is None or opened.session is not session:
            raise EngineNotOpenError("the engine is still starting: wait until `open()` returns.")
        return opened

    def check_owner(self) -> None:
        """Refuse what a fork of the owning process asks for."""
        if self.session is not None:
            check_owner(self.session.owner_pid)
