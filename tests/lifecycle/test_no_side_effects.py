"""The user's process is after an engine what it was before: in success, failure and interrupt."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmrt import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineStartError,
    LlmrtError,
    RequestError,
)
from tests.lifecycle.conftest import SHORT, MakeEngine, StartProgram, in_thread
from tests.support.rigged import Rigged
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def snapshot() -> dict[str, Any]:
    """Return everything of this process that is its user's and that a library might touch."""
    return {
        "environ": dict(os.environ),
        "handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakeup": _wakeup_fd(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "traces": (sys.gettrace(), sys.getprofile(), threading.gettrace()),
        "policy": type(asyncio.get_event_loop_policy()),
        "threads": threading.active_count(),
        "cwd": os.getcwd(),
        "umask": _umask(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "group": (os.getpgrp(), os.getsid(0)),
        "nice": os.nice(0),
        "affinity": os.sched_getaffinity(0),
        "recursion": sys.getrecursionlimit(),
        "switching": sys.getswitchinterval(),
        "loggers": [logging.getLogger(n).handlers for n in ("", "llmrt", "llmrt.worker")],
        "levels": [logging.getLogger(n).level for n in ("", "llmrt", "llmrt.worker")],
    }


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def succeed(make_engine: MakeEngine, model: Path) -> None:
    with make_engine() as llm:
        llm.generate("a", SHORT)
        list(llm.stream("a", SHORT))
        llm.collective_rpc(lambda worker: worker.rank)


def fail_to_start(make_engine: MakeEngine, model: Path) -> None:
    with pytest.raises(EngineStartError):
        make_engine(backend=Rigged(load="refuse")).open()


def die(make_engine: MakeEngine, model: Path) -> None:
    llm = make_engine(backend=Rigged(rank=1, execute="kill")).open()
    with pytest.raises(EngineDeadError):
        llm.generate("a", SHORT)
    llm.close()


def be_refused(make_engine: MakeEngine, model: Path) -> None:
    with make_engine() as llm, pytest.raises(RequestError):
        llm.generate("", SHORT)


def ask_from_a_loop(make_engine: MakeEngine, model: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(model, tp=2, backend=Rigged()) as llm:
            await llm.generate("a", SHORT)

    asyncio.run(main())


@pytest.mark.parametrize("work", [succeed, fail_to_start, die, be_refused, ask_from_a_loop])
def test_nothing_of_the_users_changes(
    make_engine: MakeEngine, tiny_model: Path, work: Callable[[MakeEngine, Path], None]
) -> None:
    work(make_engine, tiny_model)  # lazy imports start what they start
    before, num_threads = snapshot(), native_threads()
    work(make_engine, tiny_model)
    wait_until(lambda: native_threads() <= num_threads, 2)  # the kernel takes its time
    after = snapshot()
    assert {k: v for k, v in after.items() if v != before[k]} == {}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_engine_is_one_thread_and_nothing_else(tiny_model: Path, method: str) -> None:
    before, num_threads = snapshot(), native_threads()
    with Engine(tiny_model, tp=2, start_method=method) as llm:  # type: ignore[arg-type]
        llm.generate("a", SHORT)
        during = snapshot()
        assert native_threads() <= num_threads + 1
    during["threads"] -= 1
    assert during == before


def test_torch_and_numpy_are_not_imported_on_our_account(start_program: StartProgram) -> None:
    program = start_program("""
        with Engine(MODEL, tp=2) as llm:
            llm.generate("a", SHORT)
            say(tasks=len(os.listdir("/proc/self/task")))
        say(heavy=sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
        import multiprocessing
        say(method=multiprocessing.get_start_method(allow_none=True))
    """)
    assert program.finish() == ""
    assert program.facts == {"tasks": 2, "heavy": [], "method": None}


# ---- threads and loops ----


def test_any_thread_may_own_an_engine_and_keep_its_handlers(make_engine: MakeEngine) -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    answers = []

    def own() -> None:
        with make_engine() as llm:
            answers.append(llm.generate("a", SHORT)[0].token_ids)

    threads = [in_thread(own) for _ in range(3)]
    for thread, raised in threads:
        thread.join()
        assert raised == []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own).result()
    assert answers == [answers[0]] * 4
    assert before == {s: signal.getsignal(s) for s in before}


def test_an_engine_outlives_the_thread_that_opened_it(make_engine: MakeEngine) -> None:
    llm = make_engine()
    thread, raised = in_thread(llm.open)
    thread.join()
    assert raised == []
    assert llm.generate("a", SHORT)[0].token_ids


def test_two_threads_that_open_one_engine_open_it_once(make_engine: MakeEngine) -> None:
    llm = make_engine()
    threads = [in_thread(llm.open) for _ in range(4)]
    raised = []
    for thread, errors in threads:
        thread.join()
        raised += errors
    assert [type(error) for error in raised] == [LlmrtError] * 3
    assert all("open already" in str(error) for error in raised)
    assert llm.generate("a", SHORT)


def test_a_blocking_engine_lives_inside_a_running_loop(make_engine: MakeEngine) -> None:
    async def main() -> int:
        with make_engine() as llm:
            other = await asyncio.to_thread(llm.generate, "a", SHORT)
            return len(llm.generate("a", SHORT)[0].token_ids) + len(other[0].token_ids)

    assert asyncio.run(main()) == 8


# ---- what workers print ----


def test_what_workers_print_is_logged_with_their_rank(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def speak(worker: Any) -> None:
        print(f"rank {worker.rank} speaks\nand again", flush=True)

    with caplog.at_level(logging.INFO, logger="llmrt.worker"), make_engine() as llm:
        llm.collective_rpc(speak)
        wait_until(lambda: len(caplog.records) == 4)
    assert {(r.rank, r.getMessage()) for r in caplog.records} == {  # type: ignore[attr-defined]
        (rank, f"rank {rank}: {text}")
        for rank in (0, 1)
        for text in (f"rank {rank} speaks", "and again")
    }
    assert {record.name for record in caplog.records} == {"llmrt.worker"}
    assert capfd.readouterr().out == ""


def test_without_logging_it_goes_to_stderr_never_to_stdout(start_program: StartProgram) -> None:
    program = start_program("""
        with Engine(MODEL, tp=2) as llm:
            llm.collective_rpc(lambda worker: print("hello from", worker.rank, flush=True))
    """)
    lines = sorted(program.finish().splitlines())
    assert lines == ["[llmrt rank 0] hello from 0", "[llmrt rank 1] hello from 1"]


def test_a_log_handler_that_raises_does_not_end_the_engine(make_engine: MakeEngine) -> None:
    class Broken(logging.Handler):
        heard = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.heard += 1
            raise OSError("the disk of the log is full")

    handler = Broken()
    logger = logging.getLogger("llmrt.worker")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with make_engine() as llm:
            llm.collective_rpc(lambda worker: print("hello", flush=True))
            wait_until(lambda: handler.heard)
            assert llm.generate("a", SHORT)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_flood_of_output_holds_up_nobody(make_engine: MakeEngine) -> None:
    def flood(worker: Any) -> int:
        for _ in range(20_000):
            print("x" * 500)
        return worker.rank

    logger = logging.getLogger("llmrt.worker")
    logger.addHandler(logging.NullHandler())
    try:
        with make_engine() as llm:
            assert llm.collective_rpc(flood, timeout=60) == [0, 1]
            assert llm.generate("a", SHORT)
    finally:
        logger.handlers.clear()
