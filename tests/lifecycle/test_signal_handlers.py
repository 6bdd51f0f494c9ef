"""Signal handlers of the user's own, which may do and raise anything between two lines."""

from __future__ import annotations

import signal
import time

import pytest

from tests.lifecycle.conftest import StartProgram
from tests.support.leaks import wait_until_gone
from tests.support.program import Program

pytestmark = pytest.mark.slow


def strike(program: Program, name: str) -> str:
    """Send a signal when it is ready; return its stderr. Nothing may be left, and it is quick."""
    program.wait_for("ready")
    pids = program.descendants()
    started_at = time.monotonic()
    program.send(signal.Signals[name])
    stderr = program.finish(20)
    assert time.monotonic() - started_at < 5
    wait_until_gone(pids, 2)
    return stderr


def test_a_handler_that_closes_the_engine_ends_the_call_that_waits(
    start_program: StartProgram,
) -> None:
    program = start_program("""
        llm = Engine(MODEL, tp=2).open()
        signal.signal(signal.SIGTERM, lambda *_: llm.close())
        stream = llm.stream("a", LONG)
        next(stream)
        say(ready=True)
        try:
            while True:
                llm.generate(["a"] * 16, LONG)
        except llmrt.EngineClosedError:
            say(state=llm.state.value)
        sys.exit(7)
    """)
    assert strike(program, "SIGTERM") == ""
    assert program.facts["state"] == "closed"
    assert program.process.returncode == 7


@pytest.mark.parametrize(
    "source",
    [
        """
        with Engine(MODEL, tp=2) as llm:
            say(ready=True)
            while True:
                llm.generate(["a"] * 16, LONG)
        """,
        """
        with Engine(MODEL, tp=2) as llm:
            say(ready=True)
            for _ in iter(lambda: sum(1 for _ in llm.stream("a", LONG)), 0):
                pass
        """,
        """
        from tests.support.rigged import Rigged
        timeouts = llmrt.Timeouts(close=60, close_ask=60)
        with Engine(MODEL, tp=2, backend=Rigged(stop="hang"), timeouts=timeouts) as llm:
            closing = lambda: llm.state is EngineState.CLOSING
            def watch():
                while not closing():
                    threading.Event().wait(0.005)
                say(ready=True)
            threading.Thread(target=watch, daemon=True).start()
        """,
        """
        from tests.support.rigged import Rigged
        def watch():
            while len(llm.workers) < 2 or not llm.workers[1].pid:
                threading.Event().wait(0.005)
            say(ready=True)
        llm = Engine(MODEL, tp=2, backend=Rigged(init="hang"))
        threading.Thread(target=watch, daemon=True).start()
        llm.open()
        """,
    ],
    ids=["generate", "stream", "close", "open"],
)
def test_a_handler_that_exits_ends_the_program_as_it_says(
    start_program: StartProgram, source: str
) -> None:
    before = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    program = start_program(source, before=before)
    assert strike(program, "SIGTERM") == ""
    assert program.process.returncode == 7


def test_a_handler_that_raises_aborts_the_request_and_the_engine_goes_on(
    start_program: StartProgram,
) -> None:
    program = start_program("""
        def handler(*_):
            raise TimeoutError("too long")
        signal.signal(signal.SIGALRM, handler)
        with Engine(MODEL, tp=2) as llm:
            expected = llm.generate("b", SHORT)[0].token_ids
            try:
                say(ready=True)
                while True:
                    llm.generate(["a"] * 16, LONG)
            except TimeoutError:
                pass
            say(same=llm.generate("b", SHORT)[0].token_ids == expected)
            say(running=llm.stats().num_running)
    """)
    assert strike(program, "SIGALRM") == ""
    assert program.facts["same"]
    assert program.facts["running"] == 0


ASYNC = {
    "generate": """
        async def main():
            async with AsyncEngine(MODEL, tp=2) as llm:
                say(ready=True)
                while True:
                    await llm.generate(["a"] * 16, LONG)
    """,
    "streams": """
        async def read(llm):
            while True:
                async for _ in llm.stream("a", LONG):
                    pass
        async def main():
            async with AsyncEngine(MODEL, tp=2) as llm:
                say(ready=True)
                await asyncio.gather(*(read(llm) for _ in range(4)))
    """,
    "collective_rpc": """
        async def main():
            async with AsyncEngine(MODEL, tp=2, timeouts=llmrt.Timeouts(close_ask=0.3)) as llm:
                call = llm.collective_rpc(lambda worker: __import__("threading").Event().wait())
                say(ready=True)
                await call
    """,
    "open": """
        from tests.support.rigged import Rigged
        async def tell(llm):
            while len(llm.workers) < 2 or not llm.workers[1].pid:
                await asyncio.sleep(0.005)
            say(ready=True)
        async def main():
            llm = AsyncEngine(MODEL, tp=2, backend=Rigged(init="hang"))
            telling = asyncio.create_task(tell(llm))
            async with llm:
                pass
    """,
}


@pytest.mark.parametrize("verb", ASYNC)
def test_ctrl_c_in_an_async_program_prints_one_traceback(
    start_program: StartProgram, verb: str
) -> None:
    program = start_program(ASYNC[verb] + "\n        asyncio.run(main())", before="import asyncio")
    stderr = strike(program, "SIGINT")
    assert program.process.returncode == -signal.SIGINT
    assert stderr.endswith("\nKeyboardInterrupt\n")
    assert "never retrieved" not in stderr
    assert "ignored" not in stderr
