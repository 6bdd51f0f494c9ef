from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrt import Engine, SamplingParams, Timeouts
from tests.support.leaks import wait_until_gone
from tests.support.program import Program
from tests.support.rigged import Rigged

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
QUICK = Timeouts(start_progress=30, step=30, close=8, close_ask=1, close_terminate=0.5)

MakeEngine = Callable[..., Engine]
StartProgram = Callable[..., Program]


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[MakeEngine]:
    """Make engines that are closed at the end: light ones, unless `backend` says otherwise."""
    with ExitStack() as stack:

        def make(**options: Any) -> Engine:
            options = {"tp": 2, "backend": Rigged(), "timeouts": QUICK, **options}
            engine = Engine(tiny_model, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def start_program(tiny_model: Path, tmp_path: Path) -> Iterator[StartProgram]:
    """Start programs that are ended at the end of the test."""
    with ExitStack() as stack:

        def start(source: str, **options: Any) -> Program:
            directory = tmp_path / f"program{len(list(tmp_path.iterdir()))}"
            directory.mkdir()
            program = Program(source, tiny_model, directory, **options)
            stack.callback(program.release)
            return program

        yield start


def pids_of(engine: Engine) -> list[int]:
    """Return the pids of an engine's ranks and, first, of its guard."""
    ranks = [worker.pid for worker in engine.workers]
    return [psutil.Process(ranks[0]).ppid(), *ranks]


def assert_gone(pids: list[int], seconds: float = 2.0) -> None:
    wait_until_gone(pids, seconds)


def is_waiting_in(function: str, thread: threading.Thread | None = None) -> bool:
    """Return whether a thread, the main one unless told, waits somewhere inside a function."""
    thread = thread or threading.main_thread()
    frame = sys._current_frames().get(thread.ident or 0)
    names = [entry.name for entry in traceback.extract_stack(frame)] if frame else [""]
    return function in names and names[-1] == "wait"


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Run something in a thread of its own; return the thread and what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised
