"""The same lines typed at a prompt: all of them are interactive, so all of them fork."""

from __future__ import annotations

import sys

import pytest

from tests.hosts.workplace import Workplace
from tests.support.terminal import open_terminal

pytestmark = pytest.mark.slow

READ_BEGINNING = "exec(open('beginning.py').read())"
TYPED = [
    READ_BEGINNING,
    "function = lambda worker: [worker.rank, TYPED_HERE]",
    "llm = Engine(MODEL, tp=2).open()",
    "facts = use(llm, function)",
    "report = llm.close()",
    "finish(facts)",
]


def test_the_python_prompt_at_a_terminal(workplace: Workplace) -> None:
    with open_terminal([sys.executable], workplace.directory, workplace.environ) as terminal:
        for line in TYPED:
            terminal.wait_for(">>> ")
            terminal.type(line)
        terminal.wait_for(">>> ")
        terminal.type("exit()")
        assert terminal.wait_for_exit() == 0
    workplace.assert_worked("fork", "This is the Python REPL")


@pytest.mark.parametrize("arguments", [["-i"], ["-W", "error", "-i"]], ids=" ".join)
def test_a_prompt_without_a_terminal(arguments: list[str], workplace: Workplace) -> None:
    workplace.run(*arguments, input="\n".join(TYPED) + "\n")
    workplace.assert_worked("fork", "This is python -i")


def test_a_program_that_ends_at_a_prompt(workplace: Workplace) -> None:
    workplace.run("-i", "program.py")
    workplace.assert_worked("fork", "This is python -i")


IPYTHON = [sys.executable, "-m", "IPython", "--no-banner", "--no-confirm-exit"]


def test_lines_typed_in_ipython(workplace: Workplace) -> None:
    command = [*IPYTHON, "--simple-prompt"]
    with open_terminal(command, workplace.directory, workplace.environ) as terminal:
        for number, line in enumerate([*TYPED, "exit()"], 1):
            terminal.wait_for(f"In [{number}]: ")
            terminal.type(line)
        assert terminal.wait_for_exit() == 0
    workplace.assert_worked("fork", "This is IPython")


def test_a_program_run_in_ipython(workplace: Workplace) -> None:
    with open_terminal(IPYTHON, workplace.directory, workplace.environ) as terminal:
        terminal.wait_for("In [")
        terminal.type("%run program.py")
        workplace.wait_for_facts()
        terminal.type("exit()")
        assert terminal.wait_for_exit() == 0
    workplace.assert_worked("fork", "This is IPython")
