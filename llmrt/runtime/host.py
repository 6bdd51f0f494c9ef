"""Finds what runs the user's code: a notebook, a prompt, a debugger, a script.

Nothing is imported in order to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from llmrt.runtime.environment import Host

_DEBUGGERS = frozenset({"pdb", "ipdb", "pudb", "debugpy", "pydevd"})
_TEST_RUNNERS = frozenset({"pytest", "unittest", "nose2", "trial"})


@dataclass(frozen=True, slots=True)
class _Target:
    """What the command line told the interpreter to run."""

    kind: Literal["-m", "-c", "stdin", "file"]
    name: str = ""
    """The module of -m, or the file's name without its last suffix."""


def find_host(interpreter: Any, environ: Mapping[str, str]) -> Host:
    """Return the host of the process whose `sys` is given; the most particular wins.

    A prompt counts before all else: a debugger or a test runner that opens one is a prompt.
    """
    target = _find_target(interpreter.orig_argv)
    prompt = _find_prompt(interpreter, target)
    if prompt is not None:
        return prompt
    if is_frozen(interpreter):
        return Host.FROZEN
    if target.name in _DEBUGGERS or _is_traced(interpreter):
        return Host.DEBUGGER
    if target.name in _TEST_RUNNERS or _pytest_runs(interpreter, environ):
        return Host.TEST_RUNNER
    return {
        "-m": Host.MODULE,
        "-c": Host.COMMAND,
        "stdin": Host.STDIN,
        "file": Host.SCRIPT,
    }[target.kind]


def is_frozen(interpreter: Any) -> bool:
    """Return whether this is an application made by PyInstaller, cx_Freeze, Nuitka or the like."""
    main = interpreter.modules.get("__main__")
    return bool(getattr(interpreter, "frozen", False)) or hasattr(main, "__compiled__")


def _find_prompt(interpreter: Any, target: _Target) -> Host | None:
    modules = interpreter.modules
    shell = _ipython_shell(modules)
    if target.name == "pydevconsole" or "idlelib.run" in modules or "thonny.backend" in modules:
        return Host.IDE_WINDOW
    if shell is not None and "spyder_kernels" in modules:
        return Host.IDE_WINDOW
    if shell is not None:
        return Host.JUPYTER if hasattr(shell, "kernel") else Host.IPYTHON
    if interpreter.flags.interactive or interpreter.flags.inspect:
        return Host.PYTHON_I
    return Host.REPL if hasattr(interpreter, "ps1") else None


def _ipython_shell(modules: Mapping[str, Any]) -> Any:
    """Return the running shell as IPython's `get_ipython` finds it; None where there is none."""
    shell_class = getattr(modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if shell_class is None or not shell_class.initialized():
        return None
    return shell_class.instance()


def _is_traced(interpreter: Any) -> bool:
    trace = interpreter.gettrace()
    bdb = getattr(interpreter.modules.get("bdb"), "Bdb", None)
    if bdb is not None and isinstance(getattr(trace, "__self__", None), bdb):
        return True
    if str(getattr(trace, "__module__", "")).startswith(("_pydevd", "pydevd")):
        return True
    # From 3.12 a debugger can watch without a trace function.
    monitoring = getattr(interpreter, "monitoring", None)
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def _pytest_runs(interpreter: Any, environ: Mapping[str, str]) -> bool:
    # The variables alone are inherited by whatever a test starts.
    return "_pytest.config" in interpreter.modules and (
        "PYTEST_VERSION" in environ or "PYTEST_CURRENT_TEST" in environ
    )


def _find_target(command_line: Sequence[str]) -> _Target:
    """Read the interpreter's own options, which `sys.argv` no longer shows."""
    if not command_line:  # an application that embeds Python
        return _Target("file")
    arguments = iter(command_line[1:])
    for argument in arguments:
        if argument == "-":
            return _Target("stdin")
        if argument == "--":
            return _file(next(arguments, ""))
        if not argument.startswith("-"):
            return _file(argument)
        if argument == "--check-hash-based-pycs":
            next(arguments, None)
        if argument.startswith("--"):
            continue
        for position, letter in enumerate(argument[1:], start=2):
            rest = argument[position:]
            if letter == "c":
                return _Target("-c")
            if letter == "m":
                return _Target("-m", rest or next(arguments, ""))
            if letter in "WX":
                if not rest:
                    next(arguments, None)
                break
    return _Target("stdin")


def _file(path: str) -> _Target:
    return _Target("file", PurePath(path).stem) if path else _Target("stdin")
