"""Ctrl-C between any two lines of an engine's own code."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import llmrt
from llmrt import Engine, EngineState
from tests.lifecycle.conftest import LONG, QUICK, SHORT, assert_gone, pids_of
from tests.support.leaks import Snapshot
from tests.support.rigged import Rigged

pytestmark = pytest.mark.slow

ROOT = Path(llmrt.__file__).parent
WATCHED = {str(ROOT / f"{name}.py") for name in ("engine", "lifecycle", "session")}
USED_TO_GENERATE = WATCHED | {
    str(ROOT / f"{name}.py")
    for name in ("opened", "generation", "runtime/worker_group", "runtime/supervisor")
}
LEFT_TO_THE_USER = {"__enter__", "__exit__", "open", "close"}
"""Where Ctrl-C may come before anything could be done about it, as in any context manager."""


class Interrupter:
    """Raises an error at the n-th line that this thread runs in the watched files."""

    def __init__(
        self,
        n: int,
        error: type[BaseException] = KeyboardInterrupt,
        watched: Collection[str] = WATCHED,
    ) -> None:
        self._left = n
        self._error = error
        self._watched = watched
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_line if frame.f_code.co_filename in self._watched else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.where:
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise self._error
        return self._on_line


class InterruptingThreadStart:
    """Raises KeyboardInterrupt where this thread waits for a new thread to begin."""

    def __enter__(self) -> None:
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        is_wait = code.co_filename == threading.__file__ and code.co_name == "wait"
        if is_wait and caller is not None and caller.f_code.co_name == "start":
            raise KeyboardInterrupt


def one_life(model: Path, n: int) -> tuple[str, bool]:
    """Open, use and close an engine with a Ctrl-C at line n; return where, and if it was closed."""
    before = Snapshot.take()
    llm = Engine(model, tp=1, backend=Rigged(), timeouts=QUICK)
    interrupter = Interrupter(n)
    try:
        with interrupter, llm:
            llm.generate("a", SHORT)
    except KeyboardInterrupt:
        pass
    was_closed = not Snapshot.take().children - before.children
    llm.close()
    with llm:
        assert llm.generate("a", SHORT)[0].token_ids
    assert Snapshot.take().children == before.children, interrupter.where
    return interrupter.where, was_closed


def lives(model: Path, stride: int) -> None:
    n, open_after = 0, []
    while True:
        where, was_closed = one_life(model, n)
        if not where:
            break
        if not was_closed and where.partition(":")[0] not in LEFT_TO_THE_USER:
            open_after.append(where)
        n += stride
    assert n > 100, "it was interrupted nowhere"
    assert open_after == []


def test_an_interrupt_at_some_lines_leaves_an_engine_that_opens_again(tiny_model: Path) -> None:
    lives(tiny_model, stride=23)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupt_at_any_line_leaves_an_engine_that_opens_again(tiny_model: Path) -> None:
    lives(tiny_model, stride=1)


def test_a_time_limit_of_the_users_is_swallowed_or_leaves_a_request(tiny_model: Path) -> None:
    n = 0
    with Engine(tiny_model, tp=1, backend=Rigged(), timeouts=QUICK) as llm:
        while True:
            interrupter = Interrupter(n, TimeoutError, USED_TO_GENERATE)
            try:
                with interrupter:
                    llm.generate(["a", "b"], LONG)
            except TimeoutError:
                n += 1
                llm.generate("a", SHORT)
                assert llm.stats().num_running == 0, interrupter.where
            else:
                break
        assert interrupter.where == ""
        assert n > 100, "it was raised nowhere"
        assert llm.generate("a", SHORT)[0].token_ids


def test_an_interrupt_while_the_engines_thread_starts_leaves_nothing(tiny_model: Path) -> None:
    llm = Engine(tiny_model, tp=2, backend=Rigged(), timeouts=QUICK)
    with pytest.raises(KeyboardInterrupt), InterruptingThreadStart():
        llm.open()
    assert llm.state is EngineState.CLOSED
    with llm:
        assert llm.generate("a", SHORT)


def test_an_engine_whose_close_was_interrupted_and_that_was_dropped_leaves_nothing(
    tiny_model: Path,
) -> None:
    llm = Engine(tiny_model, tp=2, backend=Rigged(), timeouts=QUICK).open()
    pids = pids_of(llm)
    with pytest.raises(KeyboardInterrupt), Interrupter(0):
        llm.close()
    del llm
    gc.collect()
    assert_gone(pids)
