"""Puts into words what happened to a group: one function per error that its user sees."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from llmrt.errors import (
    EngineStartError,
    RankFailure,
    WorkerDiedError,
    WorkerFailedError,
    WorkerHungError,
)
from llmrt.runtime.events import GuardExited, LaunchFailed, RankExited
from llmrt.runtime.rank_view import PendingCall, RankView
from llmrt.runtime.supervisor import Supervisor


def describe_death(supervisor: Supervisor) -> WorkerDiedError | None:
    """Return the first death of a group by time, or None."""
    host = supervisor.launched.host
    if supervisor.deaths:
        death = supervisor.deaths[0]
        return rank_died(death, supervisor.ranks[death.rank], host)
    if supervisor.guard_exited is not None:
        return guard_died(supervisor.guard_exited, host)
    return None


def rank_died(death: RankExited, view: RankView, host: str) -> WorkerDiedError:
    """Say how a rank ended, and what it was doing."""
    host = view.host or host
    doing = f"its last command was {view.last_command}" if view.last_command else view.phase
    message = f"Worker {death.rank} (process {death.pid} on {host}) {_how_ended(death)}; {doing}."
    message += f" {death.cause}" if death.cause else _memory_hint(death)
    message += _quoted("stderr", death.stderr_tail)
    exit_code, name = _split_exit(death.exit_code)
    return WorkerDiedError(
        message,
        rank=death.rank,
        pid=death.pid,
        host=host,
        exit_code=exit_code,
        signal=name,
        stderr_tail=death.stderr_tail,
    )


def guard_died(event: GuardExited, host: str) -> WorkerDiedError:
    """Say that the process that owns the workers ended, and the workers with it."""
    exit_code, name = _split_exit(event.exit_code)
    how = "ended; nobody could tell how"
    if name is not None:
        how = f"was ended by {name}"
    elif exit_code is not None:
        how = f"exited with code {exit_code}"
    message = f"The guard process {event.pid} on {host} {how}, and the workers with it."
    return WorkerDiedError(
        message + _quoted("output", event.output_tail),
        pid=event.pid,
        host=host,
        exit_code=exit_code,
        signal=name,
        stderr_tail=event.output_tail,
    )


def _how_ended(death: RankExited) -> str:
    exit_code, name = _split_exit(death.exit_code)
    if name is not None:
        return f"was ended by {name}"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    if death.cause:
        return "is gone"
    return "closed its channel; how it ended, the guard does not say"


def _split_exit(exit_code: int | None) -> tuple[int | None, str | None]:
    if exit_code is None or exit_code >= 0:
        return exit_code, None
    try:
        return None, signal.Signals(-exit_code).name
    except ValueError:
        return None, f"signal {-exit_code}"


def _memory_hint(death: RankExited) -> str:
    if death.exit_code != -signal.SIGKILL:
        return ""
    if death.was_out_of_memory:
        return (
            " The out-of-memory counter of this cgroup has risen: most likely the kernel killed it"
            " for memory. Lower kv_cache_bytes or gpu_memory_fraction, or give the container more."
        )
    if death.was_out_of_memory is None:
        return " Most SIGKILLs that nobody sent are the kernel's, out of memory: see `dmesg`."
    return " The kernel did not kill for memory in this cgroup, so somebody sent that signal."


def _quoted(what: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f" Its last {what}:\n" + "\n".join(f"    {line}" for line in lines)


def call_failed(call: PendingCall) -> WorkerFailedError:
    """Say what llmrt's own code raised in the workers."""
    failures = tuple(call.failures)
    message = f"{call.command} failed on {_ranks([f.rank for f in failures])}: {failures[0]}"
    return WorkerFailedError(message + _others(failures) + _trace(failures[0]), failures=failures)


def rank_sent_garbage(failure: RankFailure) -> WorkerFailedError:
    """Say that a rank's channel holds something else than frames."""
    return WorkerFailedError(
        f"The channel of rank {failure.rank} is broken: {failure.message}", failures=(failure,)
    )


def ranks_hung(
    call: PendingCall, views: Sequence[RankView], timeout: float, host: str
) -> WorkerHungError:
    """Say where the ranks are that did not answer in time."""
    stacks = {view.rank: where_is(view) for view in views}
    ranks = ", ".join(f"{v.rank} (process {v.pid} on {v.host or host})" for v in views)
    message = f"{call.command} was not answered within {timeout:g} s by worker {ranks}."
    return WorkerHungError(message + _places(stacks), stacks=stacks)


def where_is(view: RankView) -> str:
    """Return a rank's Python stacks, or what else is known where it could not answer."""
    if view.stacks:
        return view.stacks.rstrip()
    state = view.state or "unknown, the guard does not answer"
    told = view.last_command or "nothing yet"
    return f"no stacks; state {state}; last told: {told}; phase: {view.phase}"


def _places(stacks: dict[int, str]) -> str:
    return "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in stacks.items())


def start_failed(
    failures: Sequence[RankFailure], num_ranks: int
) -> tuple[EngineStartError, WorkerFailedError]:
    """Return the error for ranks that raised while starting, and its cause."""
    first = failures[0]
    message = f"The engine did not start: {first}"
    error = EngineStartError(message + _others(failures) + _trace(first), failures=tuple(failures))
    cause = f"rank {first.rank} of {num_ranks} raised while starting"
    return error, WorkerFailedError(cause + _trace(first), failures=tuple(failures))


def launch_failed(event: LaunchFailed) -> EngineStartError:
    """Say what the guard could not do."""
    failure = event.failure
    what = f"{failure.type_name}: {failure.message}"
    if failure.type_name.endswith(("SharedMemoryError", "PlacementError")):
        what = failure.message
    return EngineStartError(
        f"The engine did not start: {event.what} failed: {what}\n{failure.traceback}".rstrip()
    )


def start_timed_out(
    views: Sequence[RankView], guard_phase: str, seconds: float
) -> EngineStartError:
    """Say which rank was doing what when progress ended."""
    late = [view for view in views if not view.is_ready]
    doing = "; ".join(f"rank {view.rank}: {view.phase}" for view in late)
    message = f"The engine did not start: no progress for {seconds:g} s. "
    stacks = {view.rank: where_is(view) for view in late if view.stacks or view.state}
    return EngineStartError(message + f"Guard: {guard_phase}; {doing}." + _places(stacks))


def _ranks(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def _others(failures: Sequence[RankFailure]) -> str:
    return "".join(f"\nalso {failure}" for failure in failures[1:])


def _trace(failure: RankFailure) -> str:
    return f"\n\nRemote traceback of rank {failure.rank}:\n{failure.traceback.rstrip()}"
