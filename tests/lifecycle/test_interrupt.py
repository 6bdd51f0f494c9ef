"""Ctrl-C at any moment: control is back at once, nothing is left over, nothing is mixed up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrt import Engine, EngineState, Timeouts
from tests.lifecycle.conftest import LONG, SHORT, MakeEngine, is_waiting_in, pids_of
from tests.support.leaks import is_running
from tests.support.rigged import Rigged
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LIMIT = 1.0
MANY = ["a"] * 64


def ctrl_c(
    work: Callable[[], object], when: Callable[[], object], *, times: int = 1
) -> KeyboardInterrupt:
    """Interrupt some work when something is so; fail unless control is back within a second."""
    sent_at: list[float] = []

    def press() -> None:
        wait_until(when)
        sent_at.append(time.monotonic())
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)

    def be_interrupted() -> None:
        thread.start()
        work()
        threading.Event().wait(60)  # the work was quicker than the fingers

    with pytest.raises(KeyboardInterrupt) as caught:
        be_interrupted()
    back_at = time.monotonic()
    thread.join()
    assert back_at - sent_at[0] < LIMIT
    return caught.value


def generating(llm: Engine) -> Callable[[], bool]:
    """Return what tells whether an engine has generated something since now."""
    before = llm.stats().num_generated_tokens
    return lambda: llm.stats().num_generated_tokens > before


def has_pending_sigint(pid: int) -> bool:
    """Whether a SIGINT was ever sent to a process that blocks it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask & 1 << (signal.SIGINT - 1) for mask in masks)


# ---- verbs ----


def test_an_interrupted_generate_gives_its_place_back(make_engine: MakeEngine) -> None:
    llm = make_engine().open()
    expected = llm.generate("b", SHORT)[0].token_ids
    free = llm.stats().num_free_blocks
    ctrl_c(lambda: llm.generate(MANY, LONG), generating(llm))
    assert llm.generate("b", SHORT)[0].token_ids == expected
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert llm.stats().num_free_blocks == free


def test_an_interrupted_stream_is_aborted_also_where_its_traceback_is_kept(
    make_engine: MakeEngine,
) -> None:
    llm = make_engine(backend=Rigged(rank=1, execute="hang")).open()
    stream = llm.stream("a", LONG)
    kept = ctrl_c(lambda: next(stream), lambda: is_waiting_in("__next__"))
    assert list(stream) == []
    assert kept.__traceback__
    assert llm.is_healthy()


def test_the_next_call_never_sees_the_interrupted_ones_answer(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    llm = make_engine().open()
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    def hold(worker: Any, begun: str, gate: str) -> str:
        import pathlib
        import time

        pathlib.Path(begun).touch()
        while not pathlib.Path(gate).exists():
            time.sleep(0.005)
        return "the old one's"

    ctrl_c(lambda: llm.collective_rpc(hold, str(begun), str(gate)), begun.exists)
    gate.touch()
    assert llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
    assert llm.generate("a", SHORT)[0].token_ids


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_real_engine_answers_after_an_interrupt(tiny_model: Path, tp: int) -> None:
    with Engine(tiny_model, tp=tp, start_method="fork") as llm:
        expected = llm.generate("b", SHORT)[0].token_ids
        for _ in range(3):
            ctrl_c(lambda: llm.generate(MANY, LONG), generating(llm))
            assert llm.generate("b", SHORT)[0].token_ids == expected
        pids = pids_of(llm)
        assert not any(map(has_pending_sigint, pids))
    assert not any(map(is_running, pids))


# ---- opening and closing ----


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", ["init", "load", "allocate"])
def test_an_interrupted_open_leaves_nothing(
    make_engine: MakeEngine, phase: str, times: int
) -> None:
    llm = make_engine(backend=Rigged(rank=1, **{phase: "hang"}))
    pids: list[int] = []

    def is_there() -> bool:
        if len(llm.workers) == 2 and llm.workers[1].pid:
            pids[:] = [worker.pid for worker in llm.workers]
        return bool(pids) and (phase == "init" or _has_entered(llm, phase))

    ctrl_c(llm.__enter__, is_there, times=times)
    assert not any(map(is_running, pids))
    assert llm.state is EngineState.CLOSED


def _has_entered(llm: Engine, phase: str) -> bool:
    return any(entry.phase == f"{phase} at last" for entry in llm.timeline)


def test_an_open_interrupted_in_its_import_leaves_nothing(make_engine: MakeEngine) -> None:
    llm = make_engine(backend=Rigged("real", load="hang"))
    ctrl_c(llm.__enter__, lambda: any(e.phase == "importing" for e in llm.timeline))
    assert llm.state is EngineState.CLOSED


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_close_raises_when_all_are_gone(make_engine: MakeEngine, times: int) -> None:
    timeouts = Timeouts(close=60, close_ask=60, close_terminate=60)
    llm = make_engine(backend=Rigged(rank=0, stop="hang"), timeouts=timeouts).open()
    pids = pids_of(llm)
    ctrl_c(llm.close, lambda: llm.state is EngineState.CLOSING, times=times)
    assert not any(map(is_running, pids))
    assert llm.close().workers[0].ended_by == "SIGKILL"


def test_an_interrupt_in_the_block_ends_everything(make_engine: MakeEngine) -> None:
    llm = make_engine()
    pids: list[int] = []

    def work() -> None:
        with llm:
            pids.extend(pids_of(llm))
            llm.generate(MANY, LONG)

    ctrl_c(work, lambda: len(pids) == 3 and llm.stats().num_running)
    assert not any(map(is_running, pids))
