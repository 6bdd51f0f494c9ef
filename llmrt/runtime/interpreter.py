"""Finds the Python interpreter that a fresh process of this program must be, and its flags.

Only names and files are looked at. No candidate is run to find out what it is: `sys.executable` of
a frozen program, or of an application that embeds Python, is the application itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from llmrt.errors import ConfigError
from llmrt.runtime.host import is_frozen

_PYTHON_NAME = re.compile(r"(?:python|pypy)(?P<version>[\d.]*)[dmtw]{0,2}(?:-dbg)?", re.ASCII)


def python_command(interpreter: Any = sys) -> tuple[str, ...]:
    """Return the command that starts this Python again, with this process's flags.

    Args:
        interpreter: What is asked instead of `sys`.

    Raises:
        ConfigError: this program is frozen or embeds Python, and no interpreter belongs to it.
    """
    return (find_executable(interpreter), *interpreter_flags(interpreter))


def find_executable(interpreter: Any = sys) -> str:
    """Return the path of the interpreter to start.

    An interpreter that the program named itself with `multiprocessing.set_executable` comes first,
    then `sys.executable` where it is a Python, then the interpreters of `sys.prefix` and of the
    installation that a virtual environment was made from.

    Raises:
        ConfigError: none of them is a Python of this version.
    """
    own = interpreter.executable or ""
    named = _named_for_multiprocessing(interpreter)
    if named != own and _is_this_python(named, interpreter):
        return named
    if not is_frozen(interpreter):
        if _is_this_python(own, interpreter):
            return own
    elif not os.path.isfile(__file__):
        # A stock interpreter cannot import what lies inside the program's own archive.
        raise ConfigError(_no_interpreter(own, interpreter))
    for path in _beside(interpreter):
        if _is_this_python(path, interpreter) and not _is_same_file(path, own):
            return path
    raise ConfigError(_no_interpreter(own, interpreter))


def interpreter_flags(interpreter: Any = sys) -> tuple[str, ...]:
    """Return the command-line flags that give a new process the flags of this one."""
    flags = interpreter.flags
    letters = "B" * flags.dont_write_bytecode + "O" * flags.optimize + "b" * flags.bytes_warning
    letters += "S" * flags.no_site
    if flags.isolated:
        letters += "I"
    else:
        letters += "E" * flags.ignore_environment + "s" * flags.no_user_site
        letters += "P" * getattr(flags, "safe_path", False)  # new in Python 3.11
    return (
        *(f"-{letter}" for letter in letters),
        *(f"-W{action}" for action in interpreter.warnoptions),
        *_x_options(interpreter),
    )


def _x_options(interpreter: Any) -> Iterator[str]:
    options = dict(getattr(interpreter, "_xoptions", {}))
    if interpreter.flags.dev_mode:
        options["dev"] = True
    if interpreter.flags.utf8_mode:
        options.setdefault("utf8", True)
    for name, value in options.items():
        yield from ("-X", name if value is True else f"{name}={value}")


def _named_for_multiprocessing(interpreter: Any) -> str:
    """Return what multiprocessing starts: `sys.executable` unless the program said otherwise."""
    get_executable = getattr(
        interpreter.modules.get("multiprocessing.spawn"), "get_executable", None
    )
    return os.fsdecode(get_executable() or "") if get_executable is not None else ""


def _beside(interpreter: Any) -> Iterator[str]:
    major, minor = interpreter.version_info[:2]
    name = f"python{major}.{minor}{getattr(interpreter, 'abiflags', '')}"
    yield os.path.join(interpreter.prefix, "bin", name)
    yield getattr(interpreter, "_base_executable", None) or ""
    yield os.path.join(interpreter.base_prefix, "bin", name)


def _is_this_python(path: str, interpreter: Any) -> bool:
    """Return whether the file is a Python of this version, as far as its names tell.

    The path may be a link, as in a virtual environment: what it points at has the version.
    """
    if not (os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)):
        return False
    final = _PYTHON_NAME.fullmatch(os.path.basename(os.path.realpath(path)))
    if final is None:
        return False
    version = [int(part) for part in final["version"].split(".") if part][:2]
    return version == list(interpreter.version_info[: len(version)])


def _is_same_file(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _no_interpreter(own: str, interpreter: Any) -> str:
    major, minor = interpreter.version_info[:2]
    kind = "is frozen" if is_frozen(interpreter) else "embeds Python"
    return (
        f"This program {kind}: its executable {own or '(none)'!r} is not an interpreter that could "
        f"run a worker, and no python{major}.{minor} that can import llmrt belongs to it. "
        "Use Engine(start_method='fork'), which copies this process instead, or name an "
        f"interpreter with multiprocessing.set_executable('/path/to/python{major}.{minor}') first."
    )
