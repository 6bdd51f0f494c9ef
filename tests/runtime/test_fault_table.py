"""Every fault, in every phase, of every target: an error that says so, and nothing left."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest

from llmrt.config import Timeouts
from llmrt.errors import (
    EngineDeadError,
    EngineStartError,
    LlmrtError,
    WorkerDiedError,
    WorkerFailedError,
    WorkerHungError,
)
from tests.runtime.conftest import HeardGroup, MakeGroup
from tests.support.fake_workers import Ask, Echo, FakeConfig, Misbehave
from tests.support.leaks import wait_until_gone

pytestmark = pytest.mark.slow

LIMITS = Timeouts(
    start_progress=1.0, step=1.0, stacks=0.2, close=4.0, close_ask=0.4, close_terminate=0.3
)
LONGEST_CLOSE = 6.0

DIES = ("exit_0", "exit_3", "kill", "segfault", "half_frame", "sys_exit")
BREAKS = ("raise", "garbage")
STICKS = ("hang", "freeze", "half_frame_hang", "spin", "deaf")

ERROR_IN_CALL: dict[str, type[EngineDeadError]] = {
    **dict.fromkeys(DIES, WorkerDiedError),
    **dict.fromkeys(BREAKS, WorkerFailedError),
    **dict.fromkeys(STICKS, WorkerHungError),
    "unpicklable": WorkerFailedError,
}

GUARD_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGHUP", "SIGSTOP")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    fault: str
    phase: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}-rank{self.rank}"


CASES = [
    Case(fault, phase, rank)
    for fault in ERROR_IN_CALL
    for phase in ("start", "call", "stop")
    for rank in (0, 1)
    if not (fault == "unpicklable" and phase != "call")
]


def close_and_check(group: HeardGroup, pids: list[int]) -> None:
    started_at = time.monotonic()
    report = group.close()
    assert time.monotonic() - started_at < LONGEST_CLOSE
    assert report.seconds < LONGEST_CLOSE
    wait_until_gone(pids, 1)


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_of_a_rank(make_group: MakeGroup, case: Case, method: str) -> None:
    config = FakeConfig(fault=case.fault, phase=case.phase, rank=case.rank)
    group = make_group(method=method, timeouts=LIMITS, config=config)
    if case.phase == "start":
        with pytest.raises(EngineStartError, match=rf"(rank|Worker) {case.rank}"):
            group.start()
        close_and_check(group, [])
        return
    group.start()
    pids = [worker.pid for worker in group.workers]
    if case.phase == "call":
        check_call(group, case)
    close_and_check(group, pids)


def check_call(group: HeardGroup, case: Case) -> None:
    """The others wait for the faulty rank, as in a collective."""
    others = [rank for rank in (0, 1) if rank != case.rank]
    group.submit(Misbehave(fault="wait_for_peer"), ranks=others)
    call = group.submit(Misbehave(fault=case.fault), ranks=[case.rank])
    started_at = time.monotonic()
    with pytest.raises(ERROR_IN_CALL[case.fault], match=rf"(rank|ranks|[Ww]orker) {case.rank}"):
        group.wait(call, LIMITS.step)
    assert time.monotonic() - started_at < LIMITS.step + 2
    with pytest.raises(EngineDeadError):
        group.submit(Echo())


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("phase", ["start", "idle", "call", "stop"])
@pytest.mark.parametrize("name", GUARD_SIGNALS)
def test_a_fault_of_the_guard(make_group: MakeGroup, name: str, phase: str, method: str) -> None:
    signum = signal.Signals[name]
    config = FakeConfig()
    if phase in ("start", "stop"):
        config = FakeConfig(fault="hang", phase=phase)
    group = make_group(method=method, timeouts=LIMITS, config=config)
    if phase == "start":
        check_guard_in_start(group, signum)
        return
    group.start()
    pids = [worker.pid for worker in group.workers]
    (guard_pid, _) = group.call(Ask(what="session"), 5)
    assert isinstance(guard_pid, int)
    call = group.submit(Misbehave(fault="hang")) if phase == "call" else None
    os.kill(guard_pid, signum)
    if call is not None:
        check_guard_in_call(group, call, signum)
    close_and_check(group, [*pids, guard_pid])


def check_guard_in_start(group: HeardGroup, signum: signal.Signals) -> None:
    """Also where a forked guard that died is followed by a spawned one."""
    on_phase = group._on_phase
    pids: list[int] = []
    guard_pids: list[int] = []

    def strike(rank: int | None, phase: str, detail: str) -> None:
        on_phase(rank, phase, detail)
        if "process" in detail:
            pids.append(int(detail.rpartition(" ")[2]))
        if phase == "spawned":
            guard_pids.append(pids[-1])
        if rank == 1 and phase == "started":
            os.kill(guard_pids[-1], signum)

    group._on_phase = strike
    with pytest.raises(EngineStartError):
        group.start()
    close_and_check(group, pids)


def check_guard_in_call(group: HeardGroup, call: object, signum: signal.Signals) -> None:
    expected = WorkerHungError if signum == signal.SIGSTOP else WorkerDiedError
    with pytest.raises(LlmrtError) as caught:
        group.wait(call, LIMITS.step)  # type: ignore[arg-type]
    assert isinstance(caught.value, expected)
