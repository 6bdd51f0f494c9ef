"""The same lines in every kind of program: none of them is interactive, so all of them spawn."""

from __future__ import annotations

import sys

import pytest

from tests.hosts.workplace import BEGINNING, OPEN_AND_USE, PROGRAM, Workplace

pytestmark = pytest.mark.slow


def indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["program.py"], "This is a script"),
        (["package/program.py"], "This is a script"),
        (["-m", "package.program"], "This is python -m"),
        (["-c", PROGRAM], "This is python -c"),
        (["-m", "pdb", "-c", "c", "program.py"], "This is a debugger"),
        (["-W", "error::DeprecationWarning", "program.py"], "This is a script"),
        (["-I", "program.py"], "This is a script"),
        (["-E", "program.py"], "This is a script"),
    ],
    ids=lambda value: value.removeprefix("This is ") if isinstance(value, str) else value[0],
)
def test_a_program(arguments: list[str], reason: str, workplace: Workplace) -> None:
    workplace.write("package/__init__.py", "")
    workplace.write("package/program.py", PROGRAM)
    workplace.run(*arguments)
    workplace.assert_worked("spawn", reason)


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_program_piped_to_standard_input(arguments: list[str], workplace: Workplace) -> None:
    workplace.run(*arguments, input=PROGRAM)
    workplace.assert_worked("spawn", "a program on standard input")


def test_a_program_redirected_to_standard_input(workplace: Workplace) -> None:
    with (workplace.directory / "program.py").open() as file:
        workplace.run(input=None, stdin=file)
    workplace.assert_worked("spawn", "a program on standard input")


def test_a_program_without_standard_files(workplace: Workplace) -> None:
    program = workplace.write("program.py", PROGRAM)
    command = [sys.executable, str(program)]
    workplace.run("-c", f"import os; os.closerange(0, 3); os.execv({command[0]!r}, {command!r})")
    workplace.assert_worked("spawn", "This is a script")


def test_a_program_whose_main_module_has_no_spec(workplace: Workplace) -> None:
    workplace.write("program.py", "import __main__\ndel __main__.__spec__\n" + PROGRAM)
    workplace.run("program.py")
    workplace.assert_worked("spawn", "This is a script")


CONSOLE_SCRIPT = """
import sys
from package.commands import main
if __name__ == "__main__":
    sys.exit(main())
"""


def test_a_console_script(workplace: Workplace) -> None:
    workplace.write("package/__init__.py", "")
    function = "def main():\n" + indented(OPEN_AND_USE)
    workplace.write("package/commands.py", BEGINNING + function)
    workplace.write("bin/command", CONSOLE_SCRIPT)
    workplace.run("bin/command", environ={"PYTHONPATH": str(workplace.directory)})
    workplace.assert_worked("spawn", "This is a script")


IN_A_THREAD = """
from concurrent.futures import ThreadPoolExecutor
def work():
    with Engine(MODEL, tp=2, progress=False) as llm:
        return use(llm, lambda worker: [worker.rank, TYPED_HERE])
with ThreadPoolExecutor(1) as pool:
    facts = pool.submit(work).result()
finish(facts)
"""
IN_A_LOOP = """
import asyncio
async def tick(ticks):
    while True:
        ticks.append(1)
        await asyncio.sleep(0.001)
async def main():
    ticks = []
    ticking = asyncio.ensure_future(tick(ticks))
    with Engine(MODEL, tp=2, progress=False) as llm:
        facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
    await asyncio.sleep(0.01)
    assert ticks
    ticking.cancel()
    return facts
finish(asyncio.run(main()))
"""
IN_A_POOL = """
import multiprocessing
def work():
    global BEFORE
    BEFORE = things_of_this_process()
    with Engine(MODEL, tp=2, progress=False) as llm:
        facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
    finish(facts)
with multiprocessing.get_context("fork").Pool(1) as pool:
    pool.apply(work)
"""


@pytest.mark.parametrize(
    "text", [IN_A_THREAD, IN_A_LOOP, IN_A_POOL], ids=["thread", "event loop", "process pool"]
)
def test_a_program_that_opens_it_elsewhere(text: str, workplace: Workplace) -> None:
    workplace.write("program.py", BEGINNING + text)
    workplace.run("-W", "error", "program.py")
    workplace.assert_worked("spawn", "This is a script")


TEST = """
import pytest
@pytest.mark.parametrize("number", range({num_tests}))
def test_it(number):
    with Engine(MODEL, tp=2, progress=False) as llm:
        llm.collective_rpc(lambda worker: print("x" * 100_000))
        facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
    finish(facts)
"""


@pytest.mark.parametrize("num_workers", [0, 4], ids=["alone", "xdist"])
def test_a_test_runner(num_workers: int, workplace: Workplace) -> None:
    workplace.write("test_it.py", BEGINNING + TEST.format(num_tests=num_workers or 1))
    options = ["-n", str(num_workers)] if num_workers else []
    workplace.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py")
    workplace.assert_worked("spawn", "This is a test runner", times=num_workers or 1)
