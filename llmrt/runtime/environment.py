"""What kind of process this is, and whether the guard of an engine is forked from it or spawned.

Values and a pure decision; `llmrt.runtime.observe` is what looks at the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from llmrt.errors import ConfigError
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.start_method_rows import READ_AT_LOAD, ROWS, Question, StartMethodRow


class Host(Enum):
    """What runs the user's code; the values are how a sentence names it."""

    JUPYTER = "a Jupyter kernel"
    IPYTHON = "IPython"
    IDE_WINDOW = "the interactive window of an IDE"
    PYTHON_I = "python -i"
    REPL = "the Python REPL"
    FROZEN = "a frozen program"
    DEBUGGER = "a debugger"
    TEST_RUNNER = "a test runner"
    MODULE = "python -m"
    COMMAND = "python -c"
    STDIN = "a program on standard input"
    SCRIPT = "a script"


INTERACTIVE_HOSTS = frozenset(
    {Host.JUPYTER, Host.IPYTHON, Host.IDE_WINDOW, Host.PYTHON_I, Host.REPL}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The facts about a process that decide how its engines may start their guard."""

    host: Host
    ray: Literal["driver", "worker"] | None = None
    """What Ray has made of this process; None where Ray is not initialised in it."""
    open_accelerators: tuple[str, ...] | None = ()
    """Device files that are open here, and `torch.cuda` where torch says it is initialised.

    None where the descriptors of this process cannot be read.
    """
    anonymous_bytes: int | None = None
    """Memory of this process that no file backs; None where it cannot be read."""
    num_native_threads: int | None = None
    """Threads that the kernel sees, Python's and others; None where it cannot be read."""
    platform: str
    """As `sys.platform`."""
    machine: str
    """As `uname -m`."""
    method_variable: str | None = None
    """The value of LLMRT_WORKER_MULTIPROC_METHOD; None where it is unset or empty."""

    @property
    def is_interactive(self) -> bool:
        """Whether a person types into this process."""
        return self.host in INTERACTIVE_HOSTS


def choose_start_method(
    environment: Environment,
    requested: str = "auto",
    worker_env: Mapping[str, str] | None = None,
    thread_option_given: bool = False,
    fork_failed_reason: str | None = None,
) -> StartMethod:
    """Decide how a guard is born; the first row of `explain_start_method` that matches wins.

    Args:
        environment: What `observe` saw.
        requested: The `start_method` option.
        worker_env: The `env` option.
        thread_option_given: Whether an option sets the number of native threads.
        fork_failed_reason: Why an earlier fork of this process failed its probe, where one did.

    Raises:
        ConfigError: an unknown method, or a fork was asked for where a fork cannot work.
    """
    row = deciding_row(
        explain_start_method(
            environment, requested, worker_env, thread_option_given, fork_failed_reason
        )
    )
    if row.start_method is None:
        raise ConfigError(row.error)
    return row.start_method


def explain_start_method(
    environment: Environment,
    requested: str = "auto",
    worker_env: Mapping[str, str] | None = None,
    thread_option_given: bool = False,
    fork_failed_reason: str | None = None,
) -> tuple[StartMethodRow, ...]:
    """Return every row of the decision, in order, with what it saw; takes what the decision takes.

    The `warning` of the row that decides is for the caller to pass on.
    """
    question = Question(
        environment=environment,
        requested=requested,
        late_variables=tuple(n for n in worker_env or {} if n.startswith(READ_AT_LOAD)),
        thread_option_given=thread_option_given,
        fork_failed_reason=fork_failed_reason,
    )
    rows = tuple(row(question) for row in ROWS)
    decider = next(row for row in rows if row.matches)
    return tuple(replace(row, decides=row is decider) for row in rows)


def deciding_row(rows: Sequence[StartMethodRow]) -> StartMethodRow:
    """Return the row that decides."""
    return next(row for row in rows if row.decides)
