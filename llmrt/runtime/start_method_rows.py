"""The rows of the decision between fork and spawn: one pure function each, in order in `ROWS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrt.runtime.start_method import StartMethod

if TYPE_CHECKING:
    from llmrt.runtime.environment import Environment

METHOD_VARIABLE = "LLMRT_WORKER_MULTIPROC_METHOD"
"""The environment variable that names a start method."""
MAX_FORKED_BYTES = 1 << 30
"""Anonymous memory above which a fork costs more than it saves: the copy keeps it allocated."""
READ_AT_LOAD = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "TORCH_",
    "ATEN_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "PYTHON",
)
"""How variables begin that are read once, when a library or the interpreter loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartMethodRow:
    """What one row of the decision saw and says."""

    number: int
    question: str
    saw: str
    start_method: StartMethod | None = None
    """What this row says; None where it does not match."""
    warning: str | None = None
    """What the user should hear if this row decides."""
    error: str | None = None
    """Why nothing can be chosen if this row decides."""
    decides: bool = False
    """Whether this is the first row that matches."""

    @property
    def matches(self) -> bool:
        """Whether what it asks about holds."""
        return self.start_method is not None or self.error is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Everything that a row may look at."""

    environment: Environment
    requested: str
    late_variables: tuple[str, ...]
    thread_option_given: bool
    fork_failed_reason: str | None

    @property
    def why_fork_is_unsafe(self) -> str | None:
        """Return why a fork cannot work here, as a clause; None where it can."""
        return (
            _not_linux(self.environment)
            or _ray_is_here(self.environment)
            or _driver_is_open(self.environment)
        )


def _row_option(question: Question) -> StartMethodRow:
    row = StartMethodRow(
        number=1, question="start_method= given", saw=f"start_method={question.requested!r}"
    )
    unsafe = question.why_fork_is_unsafe
    match question.requested:
        case "auto":
            return row
        case "spawn":
            return replace(row, start_method=_spawn("start_method='spawn' was given."))
        case "fork" if unsafe:
            return replace(
                row,
                error=f"start_method='fork' cannot work here: {unsafe}. Use start_method='spawn', "
                "or leave it at 'auto'.",
            )
        case "fork":
            return _asked_to_fork(row, question, "start_method='fork' was given")
        case other:
            return replace(
                row, error=f"start_method={other!r} is not one of 'auto', 'fork', 'spawn'."
            )


def _row_variable(question: Question) -> StartMethodRow:
    value = question.environment.method_variable
    row = StartMethodRow(
        number=2, question=f"{METHOD_VARIABLE} set", saw="not set" if value is None else repr(value)
    )
    unsafe = question.why_fork_is_unsafe
    match value:
        case None:
            return row
        case "spawn":
            return replace(row, start_method=_spawn(f"{METHOD_VARIABLE}=spawn is set."))
        case "fork" if unsafe:
            return _spawn_instead(row, f"{METHOD_VARIABLE}=fork is set, but {unsafe}")
        case "fork":
            return _asked_to_fork(row, question, f"{METHOD_VARIABLE}=fork is set")
        case other:
            return replace(
                row,
                error=f"The environment variable {METHOD_VARIABLE} is {other!r}; set it to 'fork' "
                "or 'spawn', or unset it.",
            )


def _asked_to_fork(row: StartMethodRow, question: Question, asked: str) -> StartMethodRow:
    if question.fork_failed_reason is not None:
        return _spawn_instead(row, f"{asked}, but {_fork_failed(question.fork_failed_reason)}")
    warning = None
    if question.late_variables:
        warning = (
            f"{asked}, so {_listed(question.late_variables)} of env= may come too late for "
            "libraries that this process has loaded already."
        )
    return replace(row, start_method=StartMethod(name="fork", reason=f"{asked}."), warning=warning)


def _spawn_instead(row: StartMethodRow, why: str) -> StartMethodRow:
    return replace(
        row, start_method=_spawn(f"{why}."), warning=f"{why}: a fresh process is started instead."
    )


def _row_platform(question: Question) -> StartMethodRow:
    return StartMethodRow(
        number=3,
        question="not Linux",
        saw=f"{question.environment.platform} on {question.environment.machine}",
        start_method=_spawn_because(_not_linux(question.environment)),
    )


def _row_ray(question: Question) -> StartMethodRow:
    saw = {None: "Ray is not initialised here", "driver": "a Ray driver", "worker": "a Ray worker"}
    return StartMethodRow(
        number=4,
        question="Ray is initialised in this process, or it is a Ray worker",
        saw=saw[question.environment.ray],
        start_method=_spawn_because(_ray_is_here(question.environment)),
    )


def _row_accelerator(question: Question) -> StartMethodRow:
    opened = question.environment.open_accelerators
    return StartMethodRow(
        number=5,
        question="an accelerator driver is open in this process",
        saw="cannot be read" if opened is None else _listed(opened) or "none open",
        start_method=_spawn_because(_driver_is_open(question.environment)),
    )


def _row_cost(question: Question) -> StartMethodRow:
    size = question.environment.anonymous_bytes
    seen = ["memory unknown" if size is None else f"{_gib(size)} of anonymous memory"]
    seen += [f"env= names {name}" for name in question.late_variables]
    seen += ["a thread option"] if question.thread_option_given else []
    seen += ["an earlier fork failed"] if question.fork_failed_reason is not None else []
    return StartMethodRow(
        number=6,
        question="a fork would cost memory, come too late for env= or threads, or has failed here",
        saw="; ".join(seen),
        start_method=_spawn_because(_fork_does_not_pay(question)),
    )


def _row_interactive(question: Question) -> StartMethodRow:
    host = question.environment.host
    method = None
    if question.environment.is_interactive:
        reason = f"This is {host.value}, where a copy of the process starts fastest."
        method = StartMethod(name="fork", reason=reason)
    return StartMethodRow(number=7, question="interactive", saw=host.value, start_method=method)


def _row_program(question: Question) -> StartMethodRow:
    host = question.environment.host
    method = None
    if not question.environment.is_interactive:
        method = _spawn(f"This is {host.value}, and a fresh interpreter inherits nothing from it.")
    return StartMethodRow(number=8, question="a program", saw=host.value, start_method=method)


# Each returns a clause that says what holds, or None where it does not hold.


def _not_linux(environment: Environment) -> str | None:
    if environment.platform == "linux":
        return None
    return f"this is {environment.platform}, and llmrt forks on Linux only"


def _ray_is_here(environment: Environment) -> str | None:
    match environment.ray:
        case None:
            return None
        case "worker":
            return "this process is a Ray worker, whose threads and locks do not survive a fork"
        case "driver":
            return "Ray is initialised in this process, and its threads do not survive a fork"


def _driver_is_open(environment: Environment) -> str | None:
    opened = environment.open_accelerators
    if opened is None:
        return (
            "the open files of this process cannot be read, so nobody can tell whether an "
            "accelerator driver is among them"
        )
    if not opened:
        return None
    return (
        f"an accelerator driver is open in this process ({_listed(opened)}), and no driver "
        "survives a fork"
    )


def _fork_does_not_pay(question: Question) -> str | None:
    size = question.environment.anonymous_bytes
    if question.fork_failed_reason is not None:
        return _fork_failed(question.fork_failed_reason)
    if size is not None and size > MAX_FORKED_BYTES:
        return (
            f"this process holds {_gib(size)} of anonymous memory, which a fork would keep "
            "allocated as long as the engine lives"
        )
    if question.late_variables:
        return (
            f"{_listed(question.late_variables)} of env= is read when a library loads, too early "
            "for a copy of this process"
        )
    if question.thread_option_given:
        return "the number of threads is given, and thread pools are sized when a library loads"
    return None


def _fork_failed(reason: str) -> str:
    return f"an earlier fork of this process failed ({reason.rstrip('.')})"


def _spawn(reason: str) -> StartMethod:
    return StartMethod(name="spawn", reason=reason)


def _spawn_because(clause: str | None) -> StartMethod | None:
    return None if clause is None else _spawn(f"{clause[0].upper()}{clause[1:]}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


ROWS: tuple[Callable[[Question], StartMethodRow], ...] = (
    _row_option,
    _row_variable,
    _row_platform,
    _row_ray,
    _row_accelerator,
    _row_cost,
    _row_interactive,
    _row_program,
)
