"""A worker ends, hangs or fails: everybody who waits hears who, how and why, at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from llmrt import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineStartError,
    EngineState,
    SamplingParams,
    Timeouts,
    WorkerDiedError,
    WorkerFailedError,
    WorkerHungError,
)
from tests.lifecycle.conftest import (
    LONG,
    SHORT,
    MakeEngine,
    in_thread,
    is_waiting_in,
    pids_of,
)
from tests.support.leaks import is_running
from tests.support.rigged import Rigged
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LIMIT = 1.0
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM")
TARGETS = {"guard": 0, "rank 0": 1, "rank 1": 2}


def check_error(error: WorkerDiedError, target: str, pid: int, name: str | None) -> None:
    rank = None if target == "guard" else int(target[-1])
    assert (error.rank, error.pid, error.host) == (rank, pid, socket.gethostname())
    assert (error.signal, error.exit_code) == (name, None)
    assert str(pid) in str(error)
    assert str(name) in str(error)
    if name == "SIGKILL" and rank is not None:
        assert "memory" in str(error)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_death_while_idle_is_known_at_once(
    make_engine: MakeEngine, target: str, name: str
) -> None:
    if (target, name) == ("guard", "SIGTERM"):
        name = "SIGKILL"  # a guard that is asked to end does so in order
    llm = make_engine().open()
    pids = pids_of(llm)
    started_at = time.monotonic()
    os.kill(pids[TARGETS[target]], signal.Signals[name])
    wait_until(lambda: not llm.is_healthy())
    assert time.monotonic() - started_at < LIMIT
    with pytest.raises(WorkerDiedError) as caught:
        llm.generate("a", SHORT)
    check_error(caught.value, target, pids[TARGETS[target]], name)
    wait_until(lambda: not any(map(is_running, pids)), 5)
    llm.restart()
    assert llm.generate("a", SHORT)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("target", ["rank 0", "rank 1"])
@pytest.mark.parametrize("verb", ["generate", "call"])
def test_a_death_in_a_call_ends_every_wait_with_the_same_error(
    make_engine: MakeEngine, target: str, name: str, verb: str
) -> None:
    phase = "execute" if verb == "generate" else "call"
    llm = make_engine(backend=Rigged(**{phase: "hang"})).open()
    pids = pids_of(llm)
    futures = [llm.submit("a", LONG) for _ in range(2)] if verb == "generate" else []
    streams = [llm.stream("a", LONG)] if verb == "generate" else []
    caller, raised = in_thread(
        lambda: llm.generate("a", LONG) if futures else llm.collective_rpc(lambda worker: None)
    )
    wait_until(lambda: is_waiting_in("result", caller))
    started_at = time.monotonic()
    os.kill(pids[TARGETS[target]], signal.Signals[name])
    caller.join()
    errors = [*raised, *(future.exception(5) for future in futures)]
    assert time.monotonic() - started_at < LIMIT
    for stream in streams:
        with pytest.raises(WorkerDiedError) as caught:
            next(stream)
        errors.append(caught.value)
    assert len(errors) == (4 if futures else 1)
    for error in errors:
        assert isinstance(error, WorkerDiedError)
        check_error(error, target, pids[TARGETS[target]], name)
    assert not llm.is_healthy()
    assert llm.state is EngineState.DEAD
    llm.close()
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_killed_rank_of_a_real_engine_frees_its_peers_from_their_collective(
    tiny_model: Path, tp: int
) -> None:
    llm = Engine(tiny_model, tp=tp, start_method="fork").open()
    pids = pids_of(llm)
    caller, raised = in_thread(lambda: llm.generate(["a"] * 32, LONG))
    wait_until(lambda: llm.stats().num_generated_tokens)
    started_at = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    caller.join()
    assert time.monotonic() - started_at < LIMIT
    assert isinstance(raised[0], WorkerDiedError)
    check_error(raised[0], f"rank {tp - 1}", pids[-1], "SIGKILL")
    report = llm.close()
    assert report.seconds < 2
    assert not any(map(is_running, pids))
    with llm:
        assert len(llm.generate("a", SHORT)[0].token_ids) == 4


def test_an_exit_in_a_step_shows_its_code_and_its_last_words(make_engine: MakeEngine) -> None:
    llm = make_engine(backend=Rigged(rank=0, execute="exit_7")).open()
    with pytest.raises(WorkerDiedError, match="exited with code 7") as caught:
        llm.generate("a", SHORT)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signal) == (0, 7, None)
    assert caught.value.stderr_tail[-1] == "last words"
    assert not llm.is_healthy()


@pytest.mark.parametrize("fault", ["kill", "segfault", "exit_7", "refuse"])
@pytest.mark.parametrize("phase", ["init", "load", "allocate"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_while_starting_is_one_error_and_leaves_nothing(
    make_engine: MakeEngine, fault: str, phase: str, rank: int
) -> None:
    llm = make_engine(backend=Rigged(rank=rank, **{phase: fault}))
    with pytest.raises(EngineStartError, match=rf"(rank|Worker) {rank}\b") as caught:
        llm.open()
    expected = {"kill": "SIGKILL", "segfault": "SIGSEGV", "exit_7": "code 7"}
    assert expected.get(fault, f"ValueError: no {phase} today") in str(caught.value)
    assert not isinstance(caught.value, EngineDeadError)
    if fault == "refuse":
        assert [failure.rank for failure in caught.value.failures] == [rank]
        assert "in refuse" in str(caught.value)
    assert llm.workers == ()
    assert llm.state is EngineState.DEAD
    with pytest.raises(EngineStartError):
        llm.generate("a", SHORT)


def test_a_failed_start_can_be_tried_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigged = Rigged(load="refuse")
    llm = make_engine(backend=rigged)
    for _ in range(2):
        with pytest.raises(EngineStartError):
            llm.open()
    monkeypatch.setattr(rigged, "_rigging", "{}")
    with llm:
        assert llm.generate("a", SHORT)


@pytest.mark.parametrize("phase", ["init", "load", "allocate"])
def test_a_start_without_progress_says_which_rank_was_doing_what(
    make_engine: MakeEngine, phase: str
) -> None:
    llm = make_engine(
        backend=Rigged(rank=1, **{phase: "hang"}), timeouts=Timeouts(start_progress=1)
    )
    with pytest.raises(EngineStartError, match=r"(rank|worker) 1") as caught:
        llm.open()
    assert "in hang" in str(caught.value), "the stack of the rank that hangs"
    assert llm.workers == ()


# ---- hung ----


@pytest.mark.parametrize("phase", ["execute", "call"])
def test_a_stopped_rank_is_reported_as_hung_with_its_state(
    make_engine: MakeEngine, phase: str
) -> None:
    timeouts = Timeouts(step=1.0, stacks=0.3, close=4)
    llm = make_engine(backend=Rigged(rank=1, **{phase: "freeze"}), timeouts=timeouts).open()
    pids = pids_of(llm)
    started_at = time.monotonic()
    if phase == "execute":
        with pytest.raises(WorkerHungError) as caught:
            llm.generate("a", SHORT)
        assert time.monotonic() - started_at < 3
        assert "stopped" in caught.value.stacks[1]
        assert list(caught.value.stacks) == [1]
    else:
        with pytest.raises(TimeoutError):
            llm.collective_rpc(lambda worker: None, timeout=0.1)
        with pytest.raises(WorkerHungError, match="stopped"):
            llm.generate("a", SHORT)
    llm.close()
    assert not any(map(is_running, pids))


def test_a_hung_rank_of_a_real_engine_shows_where_it_is(tiny_model: Path) -> None:
    timeouts = Timeouts(step=2.0)
    backend = Rigged("real", 1, execute="hang")
    with Engine(tiny_model, tp=2, start_method="fork", timeouts=timeouts, backend=backend) as llm:
        with pytest.raises(WorkerHungError, match="worker") as caught:
            llm.generate("a", SHORT)
        assert "in hang" in caught.value.stacks[1]
        assert llm.close().seconds < 5
        llm.restart()
        assert llm.is_healthy()


# ---- failed ----


def test_what_a_step_raises_is_the_error_of_the_call(make_engine: MakeEngine) -> None:
    llm = make_engine(backend=Rigged(rank=1, execute="refuse")).open()
    with pytest.raises(WorkerFailedError, match="rank 1: ValueError: no execute today") as caught:
        llm.generate("a", SHORT)
    assert caught.value.failures[0].rank == 1
    assert "in refuse" in caught.value.failures[0].traceback
    with pytest.raises(WorkerFailedError):
        llm.generate("a", SHORT)


def test_a_step_that_raises_on_one_real_rank_frees_the_other(tiny_model: Path) -> None:
    backend = Rigged("real", 1, execute="refuse")
    with Engine(tiny_model, tp=2, start_method="fork", backend=backend) as llm:
        started_at = time.monotonic()
        with pytest.raises(WorkerFailedError, match="rank 1: ValueError"):
            llm.generate("a", SHORT)
        assert time.monotonic() - started_at < 3


def test_garbage_on_a_channel_ends_the_engine_with_a_word_about_it(
    make_engine: MakeEngine,
) -> None:
    llm = make_engine().open()

    def scribble(worker: Any) -> None:
        import os
        import stat

        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if int(name) > 2 and os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
                os.write(int(name), b"not a frame at all, and long enough for a header")

    with pytest.raises(EngineDeadError, match="Expected a frame"):
        llm.collective_rpc(scribble)
    llm.close()


def test_async_waits_end_with_the_same_error(tiny_model: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(tiny_model, tp=2, backend=Rigged(execute="hang")) as llm:
            stream = llm.stream("a", LONG)
            task = asyncio.create_task(llm.generate("a", LONG))
            while not llm.stats().num_running:  # the other may wait until a step is done: never
                await asyncio.sleep(0.01)
            pid = llm.workers[1].pid
            os.kill(pid, signal.SIGKILL)
            for wait in (task, anext(stream), llm.generate("a", SHORT)):
                with pytest.raises(WorkerDiedError) as caught:
                    await asyncio.wait_for(wait, LIMIT)
                assert (caught.value.rank, caught.value.pid) == (1, pid)
            assert not llm.is_healthy()
            await llm.restart()
            assert llm.is_healthy()

    asyncio.run(main())


def test_a_death_that_nobody_waits_for_breaks_no_other_engine(make_engine: MakeEngine) -> None:
    with make_engine() as one, make_engine() as other:
        os.kill(pids_of(one)[1], signal.SIGKILL)
        wait_until(lambda: not one.is_healthy())
        assert other.generate("a", SamplingParams(temperature=0, max_tokens=50))
        assert other.is_healthy()
