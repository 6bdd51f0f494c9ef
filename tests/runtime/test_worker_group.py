from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from llmrt.config import Timeouts
from llmrt.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineNotOpenError,
    EngineStartError,
    WorkerDiedError,
    WorkerFailedError,
    WorkerHungError,
)
from llmrt.runtime.launchers.inprocess import InProcessLauncher
from llmrt.runtime.worker_group import Interrupted
from tests.runtime.conftest import QUICK, MakeGroup
from tests.support.fake_workers import Ask, Echo, FakeConfig, Misbehave
from tests.support.leaks import is_running, wait_until_gone
from tests.support.waiting import wait_until


def test_every_rank_answers_in_rank_order(start_group: MakeGroup) -> None:
    group = start_group(num_ranks=3)
    assert group.call(Ask(what="name"), 5) == [f"llmrt-rank{rank}" for rank in range(3)]
    assert group.call(Ask(what="pid"), 5) == [worker.pid for worker in group.workers]


def test_a_call_to_some_ranks_reaches_only_those(start_group: MakeGroup) -> None:
    group = start_group(num_ranks=3)
    call = group.submit(Ask(what="pid"), ranks=[2, 0])
    pids = [worker.pid for worker in group.workers]
    assert group.wait(call, 5) == [pids[2], pids[0]]


def test_answers_of_overlapping_calls_are_not_mixed_up(start_group: MakeGroup) -> None:
    group = start_group()
    calls = [group.submit(Echo(value=number)) for number in range(20)]
    for number, call in reversed(list(enumerate(calls))):
        assert group.wait(call, 5) == [number, number]


def test_big_commands_and_answers_pass_both_ways_at_once(start_group: MakeGroup) -> None:
    group = start_group()
    value = os.urandom(3_000_000)
    calls = [group.submit(Echo(value=value)) for _ in range(3)]
    assert all(group.wait(call, 30) == [value, value] for call in calls)


def test_an_orderly_close_asks_destroys_groups_and_leaves_nothing(start_group: MakeGroup) -> None:
    group = start_group()
    pids = [worker.pid for worker in group.workers]
    report = group.close()
    assert [(w.ended_by, w.group_destroyed, w.exit_code) for w in report.workers] == [
        ("asked", True, 0)
    ] * 2
    assert [w.pid for w in report.workers] == pids
    assert not any(is_running(pid) for pid in pids)
    assert group.close() is report
    assert group.workers == ()


def test_a_closed_group_says_that_it_is_closed(start_group: MakeGroup) -> None:
    group = start_group()
    group.close()
    with pytest.raises(EngineClosedError):
        group.call(Echo(), 1)


def test_a_group_that_was_never_started_closes(make_group: MakeGroup) -> None:
    group = make_group()
    with pytest.raises(EngineNotOpenError):
        group.call(Echo(), 1)
    assert group.close().workers == ()


@pytest.mark.parametrize(
    ("fault", "exit_code", "signal_name"),
    [
        ("exit_3", 3, None),
        ("exit_0", 0, None),
        ("sys_exit", 5, None),
        ("kill", None, "SIGKILL"),
        ("segfault", None, "SIGSEGV"),
    ],
)
def test_a_death_says_who_and_how(
    start_group: MakeGroup, fault: str, exit_code: int | None, signal_name: str | None
) -> None:
    group = start_group()
    pid = group.workers[1].pid
    started_at = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        group.call(Misbehave(fault=fault, rank=1), 10)
    assert time.monotonic() - started_at < 1
    error = caught.value
    assert (error.rank, error.pid, error.exit_code, error.signal) == (
        (1, pid, exit_code, signal_name)
    )
    assert error.host
    assert str(pid) in str(error)
    with pytest.raises(WorkerDiedError) as again:
        group.submit(Echo())
    assert again.value is error


def test_a_death_shows_the_last_stderr_lines(start_group: MakeGroup) -> None:
    group = start_group()
    with pytest.raises(WorkerDiedError, match="last words") as caught:
        group.call(Misbehave(fault="exit", argument=7, rank=0), 10)
    assert caught.value.stderr_tail[-1] == "last words"


def test_a_death_is_told_while_peers_wait_in_a_collective(start_group: MakeGroup) -> None:
    group = start_group()
    waiting = group.submit(Misbehave(fault="ignore_abort"), ranks=[0])
    group.submit(Misbehave(fault="kill"), ranks=[1])
    with pytest.raises(WorkerDiedError, match="Worker 1"):
        group.wait(waiting, 10)
    assert [w.ended_by for w in group.close(timeout=4).workers] == ["SIGTERM", "already gone"]


def test_the_death_is_told_and_not_what_its_peers_raise(start_group: MakeGroup) -> None:
    for _ in range(5):
        group = start_group(num_ranks=3)
        call = group.submit(Misbehave(fault="wait_for_peer"), ranks=[0, 2])
        group.submit(Misbehave(fault="kill"), ranks=[1])
        with pytest.raises(WorkerDiedError, match="Worker 1"):
            group.wait(call, 10)
        group.close()


def test_ranks_that_wait_for_a_dead_peer_are_told_to_give_up(start_group: MakeGroup) -> None:
    group = start_group()
    group.submit(Misbehave(fault="wait_for_peer"), ranks=[0])
    doomed = group.submit(Misbehave(fault="kill"), ranks=[1])
    with pytest.raises(WorkerDiedError):
        group.wait(doomed, 10)
    assert [w.ended_by for w in group.close().workers] == ["asked", "already gone"]


def test_a_death_while_idle_is_noticed(start_group: MakeGroup) -> None:
    group = start_group()
    os.kill(group.workers[1].pid, 9)
    deadline = time.monotonic() + 1
    while group.failure is None and time.monotonic() < deadline:
        group.poll(0.2)
    assert isinstance(group.failure, WorkerDiedError)


def test_failures_of_all_ranks_are_listed(start_group: MakeGroup) -> None:
    group = start_group()
    with pytest.raises(WorkerFailedError, match=r"rank [01]: ValueError") as caught:
        group.call(Misbehave(fault="raise"), 5)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    assert "fault_raise" in caught.value.failures[0].traceback
    assert group.failure is caught.value


def test_a_failure_frees_peers_that_wait_for_the_failed_rank(start_group: MakeGroup) -> None:
    group = start_group()
    call = group.submit(Misbehave(fault="wait_for_peer"), ranks=[0])
    failing = group.submit(Misbehave(fault="raise"), ranks=[1])
    with pytest.raises(WorkerFailedError, match="rank 1: ValueError"):
        group.wait(failing, 5)
    deadline = time.monotonic() + 5
    while call.missing and time.monotonic() < deadline:
        group.poll(0.2)
    assert {failure.rank for failure in call.failures} == {0}
    assert [w.ended_by for w in group.close().workers] == ["asked", "asked"]


def test_an_answer_that_cannot_be_pickled_is_a_failure_not_a_hang(start_group: MakeGroup) -> None:
    group = start_group()
    with pytest.raises(WorkerFailedError, match="pickle"):
        group.call(Misbehave(fault="unpicklable", rank=0), 5)


@pytest.mark.parametrize("fault", ["garbage", "half_frame", "half_frame_hang"])
def test_a_broken_channel_breaks_the_group_in_bounded_time(
    start_group: MakeGroup, fault: str
) -> None:
    group = start_group()
    with pytest.raises(EngineDeadError):
        group.call(Misbehave(fault=fault, rank=1), 1)
    started_at = time.monotonic()
    group.close()
    assert time.monotonic() - started_at < 4


def test_a_hung_rank_shows_its_python_stack(start_group: MakeGroup) -> None:
    group = start_group()
    with pytest.raises(WorkerHungError) as caught:
        group.call(Misbehave(fault="hang", rank=1), 0.3)
    assert set(caught.value.stacks) == {1}
    assert "fault_hang" in caught.value.stacks[1]
    assert [w.ended_by for w in group.close().workers] == ["asked", "SIGTERM"]


def test_a_stopped_rank_shows_what_the_kernel_says(start_group: MakeGroup) -> None:
    group = start_group()
    with pytest.raises(WorkerHungError, match=r"T \(stopped\)") as caught:
        group.call(Misbehave(fault="freeze", rank=0), 0.3)
    assert "Misbehave" in caught.value.stacks[0]
    assert group.close().workers[0].ended_by == "SIGKILL"


def test_progress_renews_the_limit_only_where_asked(start_group: MakeGroup) -> None:
    group = start_group()
    group.call(Misbehave(fault="slow"), 0.4, renew_on_progress=True)
    assert (0, "dawdling", "50 %") in group.heard.phases
    with pytest.raises(WorkerHungError):
        group.call(Misbehave(fault="slow"), 0.3)


def test_the_ladder_goes_down_to_sigkill_within_its_deadline(start_group: MakeGroup) -> None:
    group = start_group(config=FakeConfig(fault="deaf", phase="stop"))
    started_at = time.monotonic()
    report = group.close(timeout=1.0)
    assert time.monotonic() - started_at < 1.5
    assert [(w.ended_by, w.exit_code) for w in report.workers] == [("SIGKILL", -9)] * 2


def test_a_stuck_stop_is_terminated(start_group: MakeGroup) -> None:
    group = start_group(config=FakeConfig(fault="hang", phase="stop", rank=1))
    report = group.close()
    assert [w.ended_by for w in report.workers] == ["asked", "SIGTERM"]
    assert [w.group_destroyed for w in report.workers] == [True, False]


def test_close_during_a_step_is_bounded(start_group: MakeGroup) -> None:
    group = start_group()
    group.submit(Misbehave(fault="hang"))
    started_at = time.monotonic()
    assert {w.ended_by for w in group.close().workers} == {"SIGTERM"}
    assert time.monotonic() - started_at < 3


def test_hurry_moves_the_deadline_to_now(start_group: MakeGroup) -> None:
    timeouts = Timeouts(close=100.0, close_ask=60.0)
    group = start_group(timeouts=timeouts)
    group.submit(Misbehave(fault="hang"))
    timer = threading.Timer(0.2, group.hurry)
    timer.start()
    started_at = time.monotonic()
    assert {w.ended_by for w in group.close().workers} == {"SIGKILL"}
    assert time.monotonic() - started_at < 3
    timer.join()


def test_interrupt_ends_a_wait_and_the_group_still_closes(start_group: MakeGroup) -> None:
    group = start_group()
    call = group.submit(Misbehave(fault="hang"))
    timer = threading.Timer(0.1, group.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        group.wait(call, 10)
    group.close()
    timer.join()


def press_ctrl_c_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_during_close_is_raised_when_everything_has_ended(start_group: MakeGroup) -> None:
    group = start_group(timeouts=Timeouts(close=100.0, close_ask=60.0))
    pids = [worker.pid for worker in group.workers]
    group.submit(Misbehave(fault="hang"))
    timer = press_ctrl_c_after(0.2)
    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.close()
    assert time.monotonic() - started_at < 3
    assert not any(is_running(pid) for pid in pids)
    assert [w.ended_by for w in group.close().workers] == ["SIGKILL"] * 2
    timer.join()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ctrl_c_during_the_start_leaves_nothing(make_group: MakeGroup, method: str) -> None:
    group = make_group(method=method, config=FakeConfig(fault="hang", phase="start"))
    timer = press_ctrl_c_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        group.start()
    timer.join()


def test_wake_ends_a_poll(start_group: MakeGroup) -> None:
    group = start_group()
    while group.heard.phases and group._supervisor.pump(0.1):  # type: ignore[union-attr]
        pass
    timer = threading.Timer(0.1, group.wake)
    timer.start()
    started_at = time.monotonic()
    group.poll(10)
    assert time.monotonic() - started_at < 5
    timer.join()


def test_a_constructor_that_raises_is_the_start_error(make_group: MakeGroup) -> None:
    group = make_group(config=FakeConfig(fault="raise", phase="start", rank=1))
    with pytest.raises(EngineStartError, match="rank 1: ValueError: rank 1 was told") as caught:
        group.start()
    assert "fault_raise" in str(caught.value)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert isinstance(caught.value.__cause__, WorkerFailedError)


@pytest.mark.parametrize(("fault", "told"), [("exit_3", "code 3"), ("kill", "SIGKILL")])
def test_a_death_during_the_start_is_the_start_error(
    make_group: MakeGroup, fault: str, told: str
) -> None:
    group = make_group(config=FakeConfig(fault=fault, phase="start", rank=0))
    with pytest.raises(EngineStartError, match=told) as caught:
        group.start()
    assert isinstance(caught.value.__cause__, WorkerDiedError)


def test_a_start_without_progress_says_which_rank_did_what(make_group: MakeGroup) -> None:
    timeouts = Timeouts(start_progress=0.7, close=2.0)
    config = FakeConfig(fault="hang", phase="start", rank=1)
    group = make_group(config=config, timeouts=timeouts)
    with pytest.raises(EngineStartError, match=r"no progress for 0.7 s.*rank 1") as caught:
        group.start()
    assert "fault_hang" in str(caught.value)


def test_a_module_that_cannot_be_imported_is_named(make_group: MakeGroup) -> None:
    group = make_group(preload=("tests.no_such_module",))
    with pytest.raises(EngineStartError, match=r"importing tests.no_such_module failed"):
        group.start()


def test_a_class_that_is_not_there_is_named(make_group: MakeGroup) -> None:
    group = make_group(entry="tests.support.fake_workers:Missing")
    with pytest.raises(EngineStartError, match=r"AttributeError.*Missing"):
        group.start()


def test_interrupt_ends_a_start_and_leaves_nothing(make_group: MakeGroup) -> None:
    group = make_group(config=FakeConfig(fault="hang", phase="start"))
    timer = threading.Timer(0.5, group.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        group.start()
    timer.join()


def test_grandchildren_end_with_the_group(start_group: MakeGroup) -> None:
    group = start_group(num_ranks=1)
    pids = [
        group.call(Misbehave(fault=fault, argument=os.devnull), 5)[0]
        for fault in ("grandchild", "detached_grandchild")
    ]
    assert all(is_running(pid) for pid in pids)  # type: ignore[arg-type]
    group.close()
    wait_until_gone(pids, 1)  # type: ignore[arg-type]


def test_the_guards_death_ends_the_workers(start_group: MakeGroup) -> None:
    group = start_group()
    pids = [worker.pid for worker in group.workers]
    guard_pid = group.call(Ask(what="session"), 5)[0]
    call = group.submit(Misbehave(fault="hang"))
    os.kill(guard_pid, 9)  # type: ignore[arg-type]
    with pytest.raises(WorkerDiedError, match="guard") as caught:
        group.wait(call, 5)
    assert caught.value.rank is None
    assert caught.value.signal == "SIGKILL"
    wait_until_gone(pids, 1)
    assert [w.ended_by for w in group.close().workers] == ["already gone"] * 2


def test_a_stopped_guard_does_not_keep_the_workers(start_group: MakeGroup) -> None:
    group = start_group(config=FakeConfig(fault="deaf", phase="stop"))
    pids = [worker.pid for worker in group.workers]
    guard_pid = group.call(Ask(what="session"), 5)[0]
    os.kill(guard_pid, 19)  # type: ignore[arg-type]
    started_at = time.monotonic()
    group.close()
    assert time.monotonic() - started_at < 4
    wait_until_gone([*pids, guard_pid], 1)  # type: ignore[list-item]


def test_output_reaches_the_owner_in_whole_lines(start_group: MakeGroup) -> None:
    group = start_group(num_ranks=1)
    group.call(Misbehave(fault="print", argument=3), 5)
    group.close()
    assert group.heard.text("stdout").splitlines() == ["x" * 999] * 3 + ["the end"]


def test_a_flood_of_output_blocks_nobody_and_is_counted(start_group: MakeGroup) -> None:
    group = start_group(num_ranks=1)
    group.wait(group.submit(Misbehave(fault="print", argument=30_000)), 30)
    group.close()
    lines = sum(o.text.count("\n") + o.num_dropped_lines for o in group.heard.output)
    assert lines == 30_001


def test_the_last_lines_of_a_flood_are_counted_when_nothing_follows(
    start_group: MakeGroup,
) -> None:
    group = start_group(num_ranks=1)
    (pid,) = group.call(Ask(what="pid"), 5)
    assert isinstance(pid, int)
    guard_pid = psutil.Process(pid).ppid()
    num_read_before = _num_bytes_read(guard_pid)
    group.submit(Misbehave(fault="print", argument=10_000))
    # Nobody listens until the guard has read the last line.
    wait_until(lambda: _num_bytes_read(guard_pid) - num_read_before >= 10_000_008)

    def num_lines() -> int:
        group.poll(0.05)
        return sum(o.text.count("\n") + o.num_dropped_lines for o in group.heard.output)

    wait_until(lambda: num_lines() == 10_001, 10)
    assert group.heard.text("stdout").splitlines()[-1] != "the end"


def _num_bytes_read(pid: int) -> int:
    """Return how much a process has read, from pipes, too."""
    text = Path(f"/proc/{pid}/io").read_text()
    return int(text.partition("rchar: ")[2].split()[0])


def test_one_worker_in_this_process(make_group: MakeGroup) -> None:
    group = make_group(num_ranks=1, launcher=InProcessLauncher())
    group.start()
    assert group.call(Ask(what="pid"), 5) == [os.getpid()]
    report = group.close()
    assert [(w.ended_by, w.group_destroyed) for w in report.workers] == [("asked", True)]


def test_a_thread_that_does_not_end_is_said_to_be_running(make_group: MakeGroup) -> None:
    group = make_group(num_ranks=1, launcher=InProcessLauncher())
    group.start()
    group.submit(Misbehave(fault="sleep", argument=4.0))
    with pytest.raises(EngineDeadError, match="fault_sleep"):
        group.close(timeout=0.2)
    assert group.workers == ()


def test_two_workers_in_this_process_are_refused(make_group: MakeGroup) -> None:
    with pytest.raises(ConfigError, match="tp=2"):
        make_group(num_ranks=2, launcher=InProcessLauncher()).start()


def test_a_forked_process_can_neither_use_nor_end_the_group(start_group: MakeGroup) -> None:
    group = start_group()
    pid = os.fork()
    if pid == 0:
        try:
            group.close()
            group.call(Echo(), 1)
        except EngineNotOpenError as error:
            os._exit(42 if str(os.getppid()) in str(error) else 1)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert group.call(Echo(value=1), 5) == [1, 1]


def test_engines_open_and_close_again_and_again(start_group: MakeGroup) -> None:
    for number in range(5):
        group = start_group()
        assert group.call(Echo(value=number), QUICK.step) == [number, number]
        group.close()
