"""Telling hosts apart by a made-up `sys`; the real ones are in test_real_hosts."""

from __future__ import annotations

import bdb
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmrt.runtime.environment import Host
from llmrt.runtime.host import find_host, is_frozen


def interpreter(*command_line: str, **changes: Any) -> Any:
    facts: dict[str, Any] = {
        "orig_argv": ["python", *command_line],
        "modules": {},
        "flags": SimpleNamespace(interactive=0, inspect=0),
        "gettrace": lambda: None,
    }
    return SimpleNamespace(**(facts | changes))


def shell_modules(shell: object | None, *others: str) -> dict[str, Any]:
    shell_class = SimpleNamespace(initialized=lambda: shell is not None, instance=lambda: shell)
    module = SimpleNamespace(InteractiveShell=shell_class)
    return {"IPython.core.interactiveshell": module} | {name: object() for name in others}


NOTEBOOK_SHELL = SimpleNamespace(kernel=object())
TERMINAL_SHELL = SimpleNamespace()


@pytest.mark.parametrize(
    ("command_line", "host"),
    [
        (["script.py"], Host.SCRIPT),
        (["-u", "-Wd", "-X", "dev", "-W", "error", "script.py", "-c", "-m"], Host.SCRIPT),
        (["-Xutf8", "--check-hash-based-pycs", "always", "script.py"], Host.SCRIPT),
        (["--", "-odd-name.py"], Host.SCRIPT),
        (["-c", "print()"], Host.COMMAND),
        (["-Ic", "print()"], Host.COMMAND),
        (["-m", "package.module"], Host.MODULE),
        (["-Bm", "package"], Host.MODULE),
        (["-mpackage"], Host.MODULE),
        (["-"], Host.STDIN),
        (["-", "argument.py"], Host.STDIN),
        ([], Host.STDIN),
        (["-I", "-W", "error"], Host.STDIN),
        (["-m", "pdb", "script.py"], Host.DEBUGGER),
        (["-m", "pdb", "-c", "c", "-m", "package"], Host.DEBUGGER),
        (["/site-packages/debugpy", "--connect", "x", "script.py"], Host.DEBUGGER),
        (["-m", "pytest", "tests"], Host.TEST_RUNNER),
        (["/venv/bin/pytest"], Host.TEST_RUNNER),
        (["-m", "unittest"], Host.TEST_RUNNER),
        (["/opt/pycharm/pydev/pydevconsole.py", "--mode=client"], Host.IDE_WINDOW),
    ],
)
def test_the_command_line_tells_programs_apart(command_line: list[str], host: Host) -> None:
    assert find_host(interpreter(*command_line), {}) is host


def test_an_application_that_embeds_python_has_no_command_line() -> None:
    assert find_host(interpreter(orig_argv=[]), {}) is Host.SCRIPT


def test_a_prompt_is_a_repl() -> None:
    assert find_host(interpreter(ps1=">>> "), {}) is Host.REPL


@pytest.mark.parametrize("flag", ["interactive", "inspect"])
def test_python_i_is_interactive_while_its_script_still_runs(flag: str) -> None:
    flags = SimpleNamespace(**({"interactive": 0, "inspect": 0} | {flag: 1}))
    assert find_host(interpreter("-i", "script.py", flags=flags), {}) is Host.PYTHON_I


@pytest.mark.parametrize(
    ("modules", "host"),
    [
        (shell_modules(NOTEBOOK_SHELL), Host.JUPYTER),
        (shell_modules(TERMINAL_SHELL), Host.IPYTHON),
        (shell_modules(NOTEBOOK_SHELL, "spyder_kernels"), Host.IDE_WINDOW),
        ({"idlelib.run": object()}, Host.IDE_WINDOW),
        ({"thonny.backend": object()}, Host.IDE_WINDOW),
        (shell_modules(None), Host.SCRIPT),
        ({"IPython": ModuleType("IPython")}, Host.SCRIPT),
        ({"IPython.core.interactiveshell": ModuleType("half imported")}, Host.SCRIPT),
    ],
)
def test_only_a_running_shell_makes_a_notebook(modules: dict[str, Any], host: Host) -> None:
    assert find_host(interpreter("script.py", modules=modules), {}) is host


def test_a_prompt_counts_more_than_what_opened_it() -> None:
    modules = shell_modules(NOTEBOOK_SHELL, "_pytest.config")
    inside = interpreter("-m", "pdb", modules=modules, frozen=True)
    assert find_host(inside, {"PYTEST_VERSION": "8"}) is Host.JUPYTER


@pytest.mark.parametrize(
    "changes",
    [
        {"frozen": True},
        {"frozen": "macosx_app"},
        {"modules": {"__main__": SimpleNamespace(__compiled__=object())}},
    ],
    ids=["PyInstaller and cx_Freeze", "py2app", "Nuitka"],
)
def test_a_frozen_program_is_recognised(changes: dict[str, Any]) -> None:
    program = interpreter("app", **changes)
    assert is_frozen(program)
    assert find_host(program, {}) is Host.FROZEN


def test_an_ordinary_program_is_not_frozen() -> None:
    assert not is_frozen(interpreter("script.py", modules={"__main__": ModuleType("__main__")}))


def test_a_script_that_a_debugger_traces_is_being_debugged() -> None:
    debugger = bdb.Bdb()
    traced = interpreter(
        "script.py", modules={"bdb": bdb}, gettrace=lambda: debugger.trace_dispatch
    )
    assert find_host(traced, {}) is Host.DEBUGGER


def test_a_debugger_that_monitors_instead_of_tracing_is_seen() -> None:
    tools = {0: "pydevd"}
    monitoring = SimpleNamespace(DEBUGGER_ID=0, get_tool=tools.get)
    assert find_host(interpreter("script.py", monitoring=monitoring), {}) is Host.DEBUGGER
    tools.clear()
    assert find_host(interpreter("script.py", monitoring=monitoring), {}) is Host.SCRIPT


def test_a_coverage_tracer_is_no_debugger() -> None:
    def trace(*_: object) -> None: ...

    traced = interpreter("script.py", modules={"bdb": bdb}, gettrace=lambda: trace)
    assert find_host(traced, {}) is Host.SCRIPT


def test_a_worker_of_xdist_is_a_test_runner() -> None:
    worker = interpreter("-c", "execnet", modules={"_pytest.config": object()})
    assert find_host(worker, {"PYTEST_CURRENT_TEST": "test_x (call)"}) is Host.TEST_RUNNER


def test_a_program_started_by_a_test_is_no_test_runner() -> None:
    assert find_host(interpreter("script.py"), {"PYTEST_CURRENT_TEST": "x"}) is Host.SCRIPT
