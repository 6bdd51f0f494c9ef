"""Every exception llmrt raises, in one tree.

    LlmrtError
    ├── ConfigError (ValueError)    what you asked for cannot be: a bad option, no model
    ├── RequestError (ValueError)   you sent what cannot be served; the engine lives
    ├── EngineNotOpenError          you called a verb before `with Engine(...)` or `.open()`
    ├── EngineAsleepError           you called a verb between `sleep()` and `wake()`
    ├── EngineClosedError           you called a verb after `close()`, or it closed under your call
    ├── RemoteCallError             your function raised on a worker; the engine lives
    ├── EngineStartError            the engine did not come up; nothing is left running
    └── EngineDeadError             the engine broke; sticky until re-opened
        ├── WorkerDiedError         a worker process ended
        ├── WorkerHungError         a worker did not answer in time
        └── WorkerFailedError       llmrt's own code raised in a worker

Every class takes its message first, everything else by keyword with a default: so all pickle.
"""

from __future__ import annotations

import copy
import traceback
from dataclasses import dataclass

from typing_extensions import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """An exception that a worker raised, as text, so that it always crosses to another process."""

    rank: int
    type_name: str
    """The class as a dotted name, without `builtins.`: `ValueError`, `torch.OutOfMemoryError`."""
    message: str
    traceback: str
    """The formatted remote traceback."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """Return an exception as text, whatever its class does in `__str__`."""
        module, name = type(error).__module__, type(error).__qualname__
        try:
            message = str(error)
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except Exception:
            message = "<its message cannot be printed>"
            trace = f"{name}: {message}\n"
        type_name = name if module == "builtins" else f"{module}.{name}"
        return cls(rank=rank, type_name=type_name, message=message, traceback=trace)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}"


class LlmrtError(Exception):
    """Base of everything llmrt raises."""

    def for_one_caller(self) -> Self:
        """Return an equal error of the caller's own.

        One instance that several threads raise would gather the tracebacks of them all, and keep
        their frames alive.
        """
        error = copy.copy(self)
        error.__cause__ = self.__cause__
        return error


class ConfigError(LlmrtError, ValueError):
    """An option, a model or an installation cannot work as asked."""


class RequestError(LlmrtError, ValueError):
    """A request cannot be served as asked; other requests and the engine go on."""


class EngineNotOpenError(LlmrtError):
    """A verb was called before the engine was opened."""


class EngineAsleepError(LlmrtError):
    """A verb was called while the engine sleeps; `wake()` makes it serve again."""


class EngineClosedError(LlmrtError):
    """A verb was called on a closed engine, or the engine was closed while the call waited."""


class RemoteCallError(LlmrtError):
    """A function of yours raised on one or more workers; the engine goes on."""

    def __init__(self, message: str, *, failures: tuple[RankFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures


class EngineStartError(LlmrtError):
    """The engine did not come up. Nothing is left running; `open()` may be tried again."""

    def __init__(self, message: str, *, failures: tuple[RankFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures
        """What the ranks raised, in order of time; empty where none did (a death, a time-out)."""


class EngineDeadError(LlmrtError):
    """The engine broke and serves nothing until it is re-opened."""

    @property
    def root_cause(self) -> BaseException:
        """The first error in the chain of causes: what broke, where this error only reports it."""
        error: BaseException = self
        while error.__cause__ is not None:
            error = error.__cause__
        return error


class WorkerDiedError(EngineDeadError):
    """A worker process ended while it was needed."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        pid: int | None = None,
        host: str | None = None,
        exit_code: int | None = None,
        signal: str | None = None,
        stderr_tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """None where it was the guard, not a rank, that died."""
        self.pid = pid
        self.host = host
        self.exit_code = exit_code
        """None where a signal ended it."""
        self.signal = signal
        """The signal's name, as `SIGKILL`."""
        self.stderr_tail = stderr_tail


class WorkerHungError(EngineDeadError):
    """A worker did not answer within its time limit and was ended."""

    def __init__(self, message: str, *, stacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = stacks or {}
        """By rank: its Python stacks, or what /proc says of it where it could not answer."""


class WorkerFailedError(EngineDeadError):
    """llmrt's own code raised in a worker during a step."""

    def __init__(self, message: str, *, failures: tuple[RankFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures
