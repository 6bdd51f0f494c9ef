"""close() from anywhere, at any time, as often as anybody likes: one report, nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from llmrt import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    EngineState,
    LlmrtError,
    Timeouts,
    WorkerDiedError,
)
from tests.lifecycle.conftest import (
    LONG,
    SHORT,
    MakeEngine,
    assert_gone,
    in_thread,
    pids_of,
)
from tests.support.leaks import is_running
from tests.support.rigged import Rigged
from tests.support.waiting import wait_until

STUCK_STOP = Timeouts(close=4, close_ask=30, close_terminate=30)
"""A worker that hangs in its stop is killed late, so that there is a close to be in."""


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_process_is_left_of_a_real_engine(tiny_model: Path, tp: int, method: str) -> None:
    with Engine(tiny_model, tp=tp, start_method=method) as llm:  # type: ignore[arg-type]
        pids = pids_of(llm)
        assert len(llm.generate("a", SHORT)[0].token_ids) == 4
    assert not any(map(is_running, pids))
    report = llm.close()
    assert [worker.ended_by for worker in report.workers] == ["asked"] * tp
    assert [worker.exit_code for worker in report.workers] == [0] * tp


def test_close_from_another_thread_ends_what_runs(make_engine: MakeEngine) -> None:
    llm = make_engine().open()
    pids = pids_of(llm)
    stream = llm.stream("a", LONG)
    next(stream)
    caller, raised = in_thread(lambda: llm.generate("a", LONG))
    closer, problems = in_thread(llm.close)
    closer.join()
    assert not any(map(is_running, pids))
    caller.join()
    assert [type(error) for error in raised] == [EngineClosedError]
    assert problems == []
    with pytest.raises(EngineClosedError):
        list(stream)


def test_every_one_of_many_closers_returns_when_all_is_gone(make_engine: MakeEngine) -> None:
    llm = make_engine().open()
    pids = pids_of(llm)
    reports = []

    def close() -> None:
        reports.append(llm.close())
        assert not any(map(is_running, pids))

    threads = [in_thread(close) for _ in range(8)]
    for thread, raised in threads:
        thread.join()
        assert raised == []
    assert reports == [reports[0]] * 8


@pytest.mark.parametrize("phase", ["init", "load", "allocate"])
def test_close_during_an_open_ends_it_at_once(make_engine: MakeEngine, phase: str) -> None:
    llm = make_engine(backend=Rigged(rank=1, **{phase: "hang"}))
    opener, raised = in_thread(llm.open)
    wait_until(lambda: _is_in(llm, phase))
    pids = [worker.pid for worker in llm.workers]
    started_at = time.monotonic()
    llm.close(timeout=0.5)
    assert time.monotonic() - started_at < 5
    assert not any(map(is_running, pids))
    opener.join()
    assert [type(error) for error in raised] == [EngineClosedError]
    assert llm.state is EngineState.CLOSED


def _is_in(llm: Engine, phase: str) -> bool:
    if phase == "init":
        return [worker.state for worker in llm.workers] == ["running", "starting"]
    return any(entry.phase == f"{phase} at last" and entry.rank == 1 for entry in llm.timeline)


def test_close_before_anything_was_started_keeps_open_from_starting(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmrt.lifecycle

    resolve = llmrt.lifecycle.resolve
    is_resolving, may_go_on = threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> object:
        is_resolving.set()
        assert may_go_on.wait(30)
        return resolve(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llmrt.lifecycle, "resolve", slow)
    llm = make_engine()
    opener, raised = in_thread(llm.open)
    assert is_resolving.wait(30)
    assert llm.state is EngineState.STARTING
    llm.close()
    may_go_on.set()
    opener.join()
    assert [type(error) for error in raised] == [EngineClosedError]
    assert llm.workers == ()
    monkeypatch.undo()
    with llm:
        assert llm.generate("a", SHORT)


def test_close_during_a_step_does_not_wait_for_the_step(make_engine: MakeEngine) -> None:
    llm = make_engine(backend=Rigged(rank=1, execute="hang")).open()
    future = llm.submit("a", LONG)
    wait_until(lambda: llm.stats().num_running)
    report = llm.close(timeout=1.0)
    assert report.seconds < 3
    assert report.workers[1].ended_by == "SIGTERM"
    with pytest.raises(EngineClosedError):
        future.result(0)


def test_close_of_a_dead_engine_is_quick_and_raises_nothing(make_engine: MakeEngine) -> None:
    llm = make_engine().open()
    pids = pids_of(llm)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        llm.generate("a", LONG)
    report = llm.close()
    assert [worker.ended_by for worker in report.workers] == ["asked", "already gone"]
    assert not any(map(is_running, pids))
    assert llm.state is EngineState.DEAD
    with llm:
        assert llm.generate("a", SHORT)


def test_an_exception_in_the_block_is_the_one_that_is_seen(make_engine: MakeEngine) -> None:
    llm = make_engine()
    pids: list[int] = []

    def work() -> None:
        with llm:
            pids.extend(pids_of(llm))
            raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        work()
    assert not any(map(is_running, pids))


def test_an_open_while_closing_waits_for_the_old_workers(make_engine: MakeEngine) -> None:
    llm = make_engine(
        backend=Rigged(rank=0, stop="hang"), timeouts=Timeouts(close=1, close_ask=0.3)
    ).open()
    pids = pids_of(llm)
    closer, raised = in_thread(llm.close)
    wait_until(lambda: llm.state is EngineState.CLOSING)
    llm.open()
    assert not any(map(is_running, pids))
    assert llm.is_healthy()
    closer.join()
    assert raised == []


def test_a_dropped_engine_takes_its_workers_along(tiny_model: Path) -> None:
    llm = Engine(tiny_model, tp=2, backend=Rigged()).open()
    pids = pids_of(llm)
    del llm
    assert_gone(pids)


def test_an_engine_in_a_reference_cycle_is_closed_by_the_collector(tiny_model: Path) -> None:
    llm = Engine(tiny_model, tp=2, backend=Rigged()).open()
    llm.me = [llm]  # type: ignore[attr-defined]
    llm.stream("a", LONG)
    pids, seen = pids_of(llm), weakref.ref(llm)
    del llm
    gc.collect()
    assert seen() is None
    assert_gone(pids)


def test_a_broken_engine_whose_error_was_caught_can_still_be_collected(tiny_model: Path) -> None:
    llm = Engine(tiny_model, tp=2, backend=Rigged(execute="refuse")).open()
    seen = weakref.ref(llm)
    with pytest.raises(LlmrtError):
        llm.generate("a", SHORT)
    llm.close()
    del llm
    gc.collect()
    assert seen() is None


def test_every_half_read_stream_ends_with_one_error(
    make_engine: MakeEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = make_engine().open()
    streams = [llm.stream("a", LONG) for _ in range(4)]
    for stream in streams:
        next(stream)
    llm.close()
    for stream in streams:
        with pytest.raises(EngineClosedError):
            for _ in stream:
                pass
    assert capfd.readouterr().err == ""


def test_every_half_read_async_stream_ends_with_one_error(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def read(llm: AsyncEngine, is_half_read: asyncio.Event) -> str:
        try:
            async for _ in llm.stream("a", LONG):
                is_half_read.set()
        except EngineClosedError:
            return "closed"
        return "went on"

    async def main() -> list[str]:
        loop_errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: loop_errors.append(c))
        llm = await AsyncEngine(tiny_model, tp=2, backend=Rigged()).open()
        events = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(read(llm, event)) for event in events]
        for event in events:
            await event.wait()
        await llm.close()
        ends = await asyncio.gather(*tasks)
        assert loop_errors == []
        return ends

    assert asyncio.run(main()) == ["closed"] * 4
    assert capfd.readouterr().err == ""


def test_close_from_a_callback_does_not_wait_for_itself(make_engine: MakeEngine) -> None:
    llm = make_engine().open()
    pids = pids_of(llm)
    raised: list[BaseException] = []

    def close(_: object) -> None:
        try:
            llm.close()
        except LlmrtError as error:
            raised.append(error)

    llm.submit("a", SHORT).add_done_callback(close)
    assert_gone(pids, 10)
    assert "callback" in str(raised[0])
    llm.close()
    assert llm.state is EngineState.CLOSED


def test_a_callback_that_never_returns_does_not_keep_close_for_ever(
    make_engine: MakeEngine,
) -> None:
    llm = make_engine(timeouts=Timeouts(close=0.5)).open()
    pids = pids_of(llm)
    is_stuck, may_return = threading.Event(), threading.Event()

    def stick(_: object) -> None:
        is_stuck.set()
        may_return.wait(60)

    llm.submit("a", SHORT).add_done_callback(stick)
    assert is_stuck.wait(30)
    with pytest.raises(LlmrtError, match=r"may_return\.wait"):
        llm.close()
    assert_gone(pids)
    may_return.set()
    llm.close()


def test_a_callback_that_raises_anything_keeps_nobody_from_his_end(
    make_engine: MakeEngine,
) -> None:
    llm = make_engine().open()

    def leave(_: object) -> None:
        raise SystemExit(3)

    futures = [llm.submit("a", LONG) for _ in range(3)]
    futures[0].add_done_callback(leave)
    llm.close()
    for future in futures:
        with pytest.raises(EngineClosedError):
            future.result(0)


def test_an_engine_that_was_never_opened_closes(make_engine: MakeEngine) -> None:
    llm = make_engine()
    assert llm.close().workers == ()
    assert llm.state is EngineState.NEW


def test_a_failed_request_leaves_no_thread(make_engine: MakeEngine) -> None:
    before = set(threading.enumerate())
    with make_engine() as llm, pytest.raises(ValueError, match="empty"):
        llm.generate("", SHORT)
    assert set(threading.enumerate()) == before
