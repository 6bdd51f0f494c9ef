"""A process forked from the owner can neither use nor harm the engine; and may have its own."""

from __future__ import annotations

import pytest

from tests.lifecycle.conftest import StartProgram
from tests.support.leaks import wait_until_gone

pytestmark = pytest.mark.slow

USES = {
    "generate": 'llm.generate("a", SHORT)',
    "stream": 'next(llm.stream("a", SHORT))',
    "the rest of a stream": "list(stream)",
    "an earlier future": "future.result()",
    "submit": 'llm.submit("a", SHORT).result()',
    "collective_rpc": "llm.collective_rpc(lambda worker: 1)",
    "stats": "llm.stats()",
    "close": "llm.close()",
    "open": "llm.open()",
    "restart": "llm.restart()",
}

UNWARNED = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)"
"""Since 3.12 Python warns of forks of processes with threads, and is right."""

FORKED = """
llm = Engine(MODEL, tp=2).open()
expected = llm.generate("a", SHORT)[0].token_ids
stream = llm.stream("a", LONG)
next(stream)
future = llm.submit("a", LONG)
for name, use in {uses!r}.items():
    pid = os.fork()
    if pid == 0:
        try:
            eval(use)
        except llmrt.EngineClosedError as error:
            os._exit(5 if f"process {{os.getppid()}};" in str(error) else 6)
        os._exit(7)
    say(**{{name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}})
pid = os.fork()
if pid == 0:
    os._exit(8 if llm.is_healthy() else 5)
say(is_healthy=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert llm.is_healthy()
assert llm.generate("a", SHORT)[0].token_ids == expected
assert sum(len(part.token_ids) for part in stream) > 0
assert len(future.result().token_ids) == 400
llm.close()
"""


def test_a_fork_gets_a_clear_error_and_harms_nothing(start_program: StartProgram) -> None:
    program = start_program(FORKED.format(uses=USES), before=UNWARNED)
    assert program.finish() == ""
    assert program.facts == dict.fromkeys((*USES, "is_healthy"), 5)
    assert program.process.returncode == 0


def test_a_fork_that_leaves_the_block_ends_as_it_wants(start_program: StartProgram) -> None:
    program = start_program(
        """
        import gc
        with Engine(MODEL, tp=2) as llm:
            stream = llm.stream("a", LONG)
            pid = os.fork()
            if pid == 0:
                del stream
                gc.collect()
                sys.exit(5)
            _, status = os.waitpid(pid, 0)
            say(child=os.waitstatus_to_exitcode(status), answer=len(list(stream)) > 0)
    """,
        before=UNWARNED,
    )
    assert program.finish() == ""
    assert program.facts == {"child": 5, "answer": True}


def test_a_fork_opens_an_engine_of_its_own(start_program: StartProgram) -> None:
    program = start_program(
        """
        with Engine(MODEL, tp=2) as llm:
            expected = llm.generate("a", SHORT)[0].token_ids
            pid = os.fork()
            if pid == 0:
                own = Engine(MODEL, tp=2).open()
                say(own=own.generate("a", SHORT)[0].token_ids == expected)
                sys.exit(5)
            _, status = os.waitpid(pid, 0)
            say(child=os.waitstatus_to_exitcode(status), healthy=llm.is_healthy())
    """,
        before=UNWARNED,
    )
    assert program.finish() == ""
    assert program.facts == {"own": True, "child": 5, "healthy": True}


def test_an_engine_inside_a_daemonic_pool_worker_works(start_program: StartProgram) -> None:
    program = start_program("""
        import multiprocessing
        def ask():
            with Engine(MODEL, tp=2) as llm:
                return len(llm.generate("a", SHORT)[0].token_ids)
        def leave_open():
            global kept
            kept = Engine(MODEL, tp=2).open()
            return [w.pid for w in kept.workers]
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            say(answer=pool.apply(ask))
            say(pids=pool.apply(leave_open))
    """)
    assert program.finish() == ""
    assert program.facts["answer"] == 4
    wait_until_gone(program.facts["pids"], 5)


def test_the_users_own_children_are_left_alone(start_program: StartProgram) -> None:
    program = start_program("""
        import multiprocessing, subprocess
        sleeper = subprocess.Popen(["sleep", "600"])
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(int)
            for _ in range(2):
                with Engine(MODEL, tp=2) as llm:
                    llm.generate("a", SHORT)
            say(pool=pool.apply(int), sleeper=sleeper.poll())
        sleeper.kill()
        sleeper.wait()
    """)
    assert program.finish() == ""
    assert program.facts == {"pool": 0, "sleeper": None}
