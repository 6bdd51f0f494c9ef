"""The user's process ends without a word: everything it started is gone within seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.lifecycle.conftest import StartProgram
from tests.support.leaks import is_running, wait_until_gone
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

IDLE = """
llm = Engine(MODEL, tp=2).open()
say(ready=True)
threading.Event().wait()
"""
GENERATING = """
llm = Engine(MODEL, tp={tp}).open()
stream = llm.stream("a", LONG)
next(stream)
say(ready=True)
while True:
    llm.generate(["a"] * 16, LONG)
"""
IN_A_CALL = """
llm = Engine(MODEL, tp=2).open()
call = llm.begin_call(lambda worker: __import__("threading").Event().wait())
say(ready=True)
threading.Event().wait()
"""
STARTING = """
from tests.support.rigged import Rigged
llm = Engine(MODEL, tp=2, backend=Rigged("real", 1, {phase}="hang"))
threading.Thread(target=llm.open, daemon=True).start()
def is_there():
    return {condition}
while not is_there():
    threading.Event().wait(0.005)
say(ready=True)
threading.Event().wait()
"""
IMPORTING = STARTING.format(
    phase="load", condition='any(e.phase == "importing" for e in llm.timeline)'
)
CONSTRUCTING = STARTING.format(
    phase="init", condition="[w.state for w in llm.workers] == ['running', 'starting']"
)
LOADING = STARTING.format(
    phase="load",
    condition="any(e.phase == 'loading weights' and e.rank == 0 for e in llm.timeline)",
)
CLOSING = """
from tests.support.rigged import Rigged
llm = Engine(
    MODEL, tp=2, backend=Rigged("light", 1, stop="hang"),
    timeouts=llmrt.Timeouts(close=90, close_ask=60),
).open()
threading.Thread(target=llm.close, daemon=True).start()
while llm.state is not EngineState.CLOSING:
    threading.Event().wait(0.005)
say(ready=True)
threading.Event().wait()
"""
PHASES = {
    "idle": IDLE,
    "generating-1": GENERATING.format(tp=1),
    "generating-2": GENERATING.format(tp=2),
    "generating-4": GENERATING.format(tp=4),
    "in a call": IN_A_CALL,
    "importing": IMPORTING,
    "constructing": CONSTRUCTING,
    "loading": LOADING,
    "closing": CLOSING,
}


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_outlives_a_killed_owner(start_program: StartProgram, phase: str) -> None:
    program = start_program(PHASES[phase])
    program.wait_for("ready")
    program.kill_and_wait_for_everything(seconds=5)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGABRT"])
def test_nothing_outlives_an_owner_that_a_signal_ends(
    start_program: StartProgram, name: str
) -> None:
    program = start_program(GENERATING.format(tp=2))
    program.wait_for("ready")
    pids = program.descendants()
    program.send(signal.Signals[name])
    assert program.finish() == ""
    assert program.process.returncode == -signal.Signals[name]
    wait_until_gone(pids, 5)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (GENERATING.format(tp=2).replace("while True:", "os._exit(9)\nif True:"), 9),
        (IMPORTING.replace("threading.Event().wait()", "os._exit(9)"), 9),
        (IDLE.replace("threading.Event().wait()", "os.abort()"), -6),
        (IDLE.replace("threading.Event().wait()", "os.execv('/bin/sleep', ['sleep', '0'])"), 0),
    ],
    ids=["_exit in use", "_exit while starting", "abort", "exec"],
)
def test_nothing_outlives_an_owner_that_ends_itself(
    start_program: StartProgram, source: str, code: int
) -> None:
    program = start_program(source)
    program.wait_for("ready")
    pids = program.descendants()
    program.finish(10)
    assert program.process.returncode == code
    wait_until_gone(pids, 5)


def test_a_thread_that_leaves_with_systemexit_takes_nothing_with_it(
    start_program: StartProgram,
) -> None:
    program = start_program("""
        llm = Engine(MODEL, tp=2)
        def work():
            llm.open()
            sys.exit(3)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        say(answer=len(llm.generate("a", SHORT)[0].token_ids))
    """)
    assert program.finish() == ""
    assert program.facts["answer"] == 4
    assert program.process.returncode == 0


@contextmanager
def holder_of(pid: int) -> Iterator[int]:
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_the_owner_forked_keeps_nothing_alive(start_program: StartProgram) -> None:
    program = start_program("""
        llm = Engine(MODEL, tp=2).open()
        pid = os.fork()
        if pid == 0:
            os.close(1)
            signal.pause()
        say(workers=[w.pid for w in llm.workers], child=pid)
        signal.pause()
    """)
    program.wait_for("child")
    with holder_of(program.facts["child"]) as child:
        assert len(psutil.Process(child).net_connections("unix")) >= 3, "it holds our sockets"
        pids = [pid for pid in program.descendants() if pid != child]
        program.process.kill()
        program.process.wait()
        wait_until_gone(pids, 5)
        assert is_running(child), "it is the user's own"


def test_a_stopped_owner_keeps_its_engine(start_program: StartProgram) -> None:
    program = start_program(
        """
        llm = Engine(MODEL, tp=2, timeouts=llmrt.Timeouts(step=5)).open()
        say(ready=True)
        signal.sigwait([signal.SIGUSR1])
        say(answer=len(llm.generate("a", SHORT)[0].token_ids))
    """,
        before="import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
    )
    program.wait_for("ready")
    program.send(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(program.process.pid).status() == psutil.STATUS_STOPPED)
    program.send(signal.SIGUSR1)
    program.send(signal.SIGCONT)
    assert program.finish() == ""
    assert program.facts["answer"] == 4
