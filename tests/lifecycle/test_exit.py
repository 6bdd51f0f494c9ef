"""A program that never closes its engine ends at once, with its own exit code, and says nothing."""

from __future__ import annotations

import time

import pytest

from tests.lifecycle.conftest import StartProgram
from tests.support.leaks import wait_until_gone
from tests.support.program import Program

pytestmark = pytest.mark.slow

KEPT = {
    "a global": "kept = llm = Engine(MODEL, tp=2).open()",
    "a dict of a module": "llm = Engine(MODEL, tp=2).open(); json.engines = {'main': llm}",
    "a closure": """
def make():
    llm = Engine(MODEL, tp=2).open()
    return lambda: llm
get = make()
llm = get()
""",
    "a reference cycle": "llm = Engine(MODEL, tp=2).open(); llm.me = {'me': [llm]}",
    "a daemon thread": """
engines = []
is_open = threading.Event()
def work():
    engines.append(Engine(MODEL, tp=2).open())
    is_open.set()
    engines[0].generate(["a"] * 50, LONG)
    engines[0].collective_rpc(lambda worker: __import__("threading").Event().wait())
threading.Thread(target=work, daemon=True).start()
is_open.wait()
llm = engines[0]
""",
    "half a stream": """
llm = Engine(MODEL, tp=2).open()
stream = llm.stream("a", LONG)
next(stream)
""",
    "a pending future": "llm = Engine(MODEL, tp=2).open(); future = llm.submit('a', LONG)",
    "a traceback": """
llm = Engine(MODEL, tp=2).open()
try:
    llm.generate("")
except ValueError as error:
    kept = error
""",
    "nothing": "llm = Engine(MODEL, tp=2).open(); ranks = llm.workers",
}
SAY_PIDS = "\nsay(pids=[w.pid for w in llm.workers])\n"
ENDS = {
    "the end of the program": ("", 0),
    "sys.exit(7)": ("sys.exit(7)", 7),
    "an exception": ("raise LookupError('the last words')", 1),
}


def check_end(program: Program, code: int) -> None:
    program.wait_for("pids")
    started_at = time.monotonic()
    stderr = program.finish(20)
    assert time.monotonic() - started_at < 5
    assert program.process.returncode == code
    if "the last words" in stderr:
        assert stderr.startswith("Traceback (most recent call last):")
        assert stderr.endswith("LookupError: the last words\n")
        assert stderr.count("Traceback") == 1
    else:
        assert stderr == ""
    wait_until_gone(program.facts["pids"], 2)


@pytest.mark.parametrize("where", KEPT)
def test_an_engine_kept_anywhere_lets_the_program_end(
    start_program: StartProgram, where: str
) -> None:
    program = start_program(KEPT[where] + SAY_PIDS + "sys.exit(7)")
    check_end(program, 7)


@pytest.mark.parametrize("python", [("-W", "error"), ("-X", "dev")], ids=" ".join)
@pytest.mark.parametrize("end", ENDS)
def test_strict_interpreters_find_nothing_to_say(
    start_program: StartProgram, end: str, python: tuple[str, ...]
) -> None:
    source, code = ENDS[end]
    program = start_program(KEPT["half a stream"] + SAY_PIDS + source, python=python)
    check_end(program, code)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_the_user_made_before_survives_until_his_own_end(
    start_program: StartProgram, method: str
) -> None:
    before = """
        import atexit, os, tempfile
        directory = tempfile.TemporaryDirectory()
        def check():
            os.write(1, (b'{"files": %d}\\n' % len(os.listdir(directory.name))))
        atexit.register(check)
        open(os.path.join(directory.name, "data"), "w").close()
        unflushed = open(os.path.join(directory.name, "log"), "w")
        unflushed.write("once")
    """
    source = f"""
        llm = Engine(MODEL, tp=2, start_method="{method}").open()
        llm.close()
        llm.open()
        assert sorted(os.listdir(directory.name)) == ["data", "log"]
        unflushed.close()
        assert open(os.path.join(directory.name, "log")).read() == "once"
        say(pids=[w.pid for w in llm.workers], path=directory.name)
    """
    program = start_program(source, before=before)
    check_end(program, 0)
    assert program.facts["files"] == 2


ASYNC = {
    "never closed": """
        async def main():
            global llm
            llm = await AsyncEngine(MODEL, tp=2).open()
            await llm.generate("a", SHORT)
            say(pids=[w.pid for w in llm.workers])
        asyncio.run(main())
        {end}
    """,
    "half a stream": """
        async def main():
            global llm, stream
            llm = await AsyncEngine(MODEL, tp=2).open()
            stream = llm.stream("a", LONG)
            await anext(stream)
            say(pids=[w.pid for w in llm.workers])
        asyncio.run(main())
        {end}
    """,
    "a dropped engine": """
        async def main():
            llm = await AsyncEngine(MODEL, tp=2).open()
            say(pids=[w.pid for w in llm.workers])
        asyncio.run(main())
        {end}
    """,
}


@pytest.mark.parametrize("end", ["an exception", "sys.exit(7)"])
@pytest.mark.parametrize("how", ASYNC)
def test_an_async_engine_that_was_never_closed_is_as_quiet(
    start_program: StartProgram, how: str, end: str
) -> None:
    source, code = ENDS[end]
    program = start_program(ASYNC[how].format(end=source), before="import asyncio")
    check_end(program, code)


def test_an_exception_inside_asyncio_run_is_the_last_thing_printed(
    start_program: StartProgram,
) -> None:
    source = """
        async def main():
            async with AsyncEngine(MODEL, tp=2) as llm:
                say(pids=[w.pid for w in llm.workers])
                raise LookupError("the last words")
        asyncio.run(main())
    """
    check_end(start_program(source, before="import asyncio"), 1)


def test_a_program_that_ends_while_an_engine_opens_leaves_nothing(
    start_program: StartProgram,
) -> None:
    program = start_program("""
        llm = Engine(MODEL, tp=2)
        threading.Thread(target=llm.open, daemon=True).start()
        while not any(e.phase == "importing" for e in llm.timeline):
            threading.Event().wait(0.005)
        say(pids=[int(llm.timeline[0].detail.split()[-1])])
        sys.exit(7)
    """)
    check_end(program, 7)


def test_a_callback_that_never_returns_does_not_keep_the_program(
    start_program: StartProgram,
) -> None:
    program = start_program("""
        llm = Engine(MODEL, tp=2).open()
        is_stuck = threading.Event()
        def stick(future):
            is_stuck.set()
            threading.Event().wait()
        llm.submit("a", SHORT).add_done_callback(stick)
        is_stuck.wait()
        say(pids=[w.pid for w in llm.workers])
        sys.exit(7)
    """)
    check_end(program, 7)


@pytest.mark.parametrize("model", ["/no/such/dir", "{empty}"])
def test_a_model_that_is_not_there_is_one_error_and_nothing_ignored(
    start_program: StartProgram, tmp_path_factory: pytest.TempPathFactory, model: str
) -> None:
    model = model.format(empty=tmp_path_factory.mktemp("empty"))
    program = start_program(f"""
        with Engine({model!r}) as llm:
            pass
    """)
    stderr = program.finish()
    assert program.process.returncode == 1
    assert stderr.count("Traceback") == 1
    assert model in stderr.splitlines()[-1]
    assert "ConfigError" in stderr.splitlines()[-1]
