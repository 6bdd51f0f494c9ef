"""The command that starts this Python again, and programs that are no Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmrt.errors import ConfigError
from llmrt.runtime import interpreter as interpreter_module
from llmrt.runtime.interpreter import find_executable, interpreter_flags, python_command

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYTHON = f"python{VERSION}{sys.abiflags}"

SHOW_FLAGS = """
import json, sys, warnings
from llmrt.runtime.interpreter import python_command
print(json.dumps({
    "flags": list(sys.flags),
    "x": {k: v for k, v in sys._xoptions.items()},
    "filters": [repr(f) for f in warnings.filters],
    "executable": sys.executable,
    "prefix": sys.prefix,
    "command": python_command(),
}))
"""


def show_flags(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, "-c", SHOW_FLAGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["-B", "-O"],
        ["-OO"],
        ["-I"],
        ["-E", "-s"],
        ["-b"],
        ["-bb"],
        ["-W", "error::DeprecationWarning", "-W", "ignore::UserWarning:json"],
        ["-X", "dev", "-W", "default"],
        ["-X", "utf8"],
        ["-X", "faulthandler", "-X", "int_max_str_digits=0", "-X", "pycache_prefix=/nowhere"],
        *([["-P"]] if sys.version_info >= (3, 11) else []),
    ],
    ids=" ".join,
)
def test_a_new_process_has_the_flags_of_this_one(flags: list[str]) -> None:
    first = show_flags([sys.executable, *flags])
    second = show_flags(first["command"])
    assert second == first


def test_flags_from_the_environment_reach_an_interpreter_that_ignores_it() -> None:
    environ = os.environ | {"PYTHONUTF8": "1", "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_FLAGS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    command = json.loads(done.stdout)["command"]
    assert "-O" in command
    assert "utf8" in command


def test_an_ordinary_python_starts_itself() -> None:
    assert python_command()[0] == sys.executable


def make_executable(path: Path, text: str = "#!/bin/sh\nexit 1\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "started.log"


@pytest.fixture
def application(tmp_path: Path, log: Path) -> str:
    """An application that logs each time it is started."""
    return make_executable(tmp_path / "app/app", f'#!/bin/sh\necho "$0 $@" >> {log}\n')


def program(executable: str | None, prefix: Path, **changes: Any) -> Any:
    """Stand in for the `sys` of a program that is installed at this prefix."""
    facts: dict[str, Any] = {
        "executable": executable,
        "_base_executable": executable,
        "prefix": str(prefix),
        "base_prefix": str(prefix),
        "version_info": sys.version_info,
        "abiflags": sys.abiflags,
        "flags": sys.flags,
        "warnoptions": [],
        "modules": {},
    }
    return SimpleNamespace(**(facts | changes))


def test_a_frozen_program_is_never_started(application: str, log: Path, tmp_path: Path) -> None:
    frozen = program(application, tmp_path / "bundle", frozen=True)
    with pytest.raises(ConfigError) as caught:
        python_command(frozen)
    message = str(caught.value)
    assert "frozen" in message
    assert application in message
    assert "start_method='fork'" in message
    assert "multiprocessing.set_executable" in message
    assert not log.exists()


def test_a_frozen_program_named_like_python_is_never_started(tmp_path: Path) -> None:
    named = make_executable(tmp_path / "bin" / PYTHON)
    with pytest.raises(ConfigError):
        find_executable(program(named, tmp_path, frozen=True))


def test_a_frozen_program_uses_the_interpreter_it_was_started_from(
    application: str, tmp_path: Path
) -> None:
    """So does a test that pretends to be frozen: the real interpreter is underneath."""
    python = make_executable(tmp_path / "python/bin" / PYTHON)
    frozen = program(application, tmp_path / "bundle", frozen=True, _base_executable=python)
    assert find_executable(frozen) == python


def test_a_program_frozen_with_llmrt_inside_needs_an_interpreter_that_has_llmrt(
    application: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_executable(tmp_path / "python/bin" / PYTHON)
    monkeypatch.setattr(interpreter_module, "__file__", "/bundle/llmrt/runtime/interpreter.pyc")
    frozen = program(application, tmp_path, frozen=True, _base_executable=python)
    with pytest.raises(ConfigError, match="can import llmrt"):
        find_executable(frozen)


@pytest.mark.parametrize("executable", [None, "", "uwsgi", "/no/such/python3"])
def test_an_application_that_embeds_python_uses_the_python_of_its_prefix(
    executable: str | None, tmp_path: Path
) -> None:
    python = make_executable(tmp_path / "bin" / PYTHON)
    assert find_executable(program(executable, tmp_path)) == python


def test_an_application_that_embeds_python_in_a_virtual_environment(
    application: str, tmp_path: Path
) -> None:
    base = make_executable(tmp_path / "usr/bin" / PYTHON)
    link = tmp_path / "venv/bin" / PYTHON
    link.parent.mkdir(parents=True)
    link.symlink_to(base)
    embedded = program(application, tmp_path / "venv", base_prefix=str(tmp_path / "usr"))
    assert find_executable(embedded) == str(link)


def test_an_application_without_any_python_is_an_error_and_is_not_started(
    application: str, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="embeds Python") as caught:
        find_executable(program(application, tmp_path))
    assert PYTHON.rstrip("td") in str(caught.value)
    assert not log.exists()


def test_a_python_of_another_version_is_not_taken(tmp_path: Path) -> None:
    other = make_executable(tmp_path / "usr/bin/python3.7")
    link = tmp_path / "usr/bin/python3"
    link.symlink_to(other)
    with pytest.raises(ConfigError):
        find_executable(program(None, tmp_path, _base_executable=str(link)))


@pytest.mark.parametrize("name", ["python", "python3", PYTHON, "pypy3", "python3-dbg"])
def test_a_python_may_have_any_of_pythons_names(name: str, tmp_path: Path) -> None:
    python = make_executable(tmp_path / "bin" / name)
    assert find_executable(program(python, tmp_path)) == python


@pytest.mark.parametrize("name", ["pythonapp", "ipython", "python3-config", "uwsgi-python3"])
def test_a_program_with_python_in_its_name_is_no_python(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_executable(program(make_executable(tmp_path / "bin" / name), tmp_path))


def test_a_link_of_any_name_to_a_python_is_kept_as_it_is(tmp_path: Path) -> None:
    """A virtual environment is found by the link's folder, so that it must not be resolved."""
    python = make_executable(tmp_path / "usr/bin" / PYTHON)
    link = tmp_path / "venv/bin/my-service"
    link.parent.mkdir(parents=True)
    link.symlink_to(python)
    assert find_executable(program(str(link), tmp_path / "venv")) == str(link)


def multiprocessing_spawn(executable: str | bytes | None) -> dict[str, ModuleType]:
    module = ModuleType("multiprocessing.spawn")
    vars(module)["get_executable"] = lambda: executable
    return {"multiprocessing.spawn": module}


@pytest.mark.parametrize("encode", [str, os.fsencode])
def test_an_interpreter_named_for_multiprocessing_is_the_way_out(
    encode: Any, application: str, tmp_path: Path
) -> None:
    python = make_executable(tmp_path / "python/bin" / PYTHON)
    modules = multiprocessing_spawn(encode(python))
    frozen = program(application, tmp_path / "bundle", frozen=True, modules=modules)
    assert find_executable(frozen) == python


@pytest.mark.parametrize("named", ["application", None])
def test_multiprocessing_naming_the_application_itself_is_not_followed(
    named: str | None, application: str, tmp_path: Path
) -> None:
    """It takes `sys.executable` when it is imported, before a program may have set that right."""
    python = make_executable(tmp_path / "python/bin" / PYTHON)
    modules = multiprocessing_spawn(application if named else None)
    assert find_executable(program(python, tmp_path, modules=modules)) == python


def test_the_real_set_executable_is_understood() -> None:
    code = (
        "import multiprocessing, sys\n"
        "from llmrt.runtime.interpreter import find_executable\n"
        "python, sys.executable, sys.frozen = sys.executable, '/opt/app', True\n"
        "multiprocessing.set_executable(python)\n"
        "assert find_executable() == python\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_each_flag_is_carried_over() -> None:
    stand_in = program(
        "python",
        Path("/"),
        flags=SimpleNamespace(
            dont_write_bytecode=True,
            optimize=2,
            bytes_warning=0,
            no_site=0,
            isolated=0,
            ignore_environment=1,
            no_user_site=1,
            safe_path=True,
            dev_mode=False,
            utf8_mode=1,
        ),
        warnoptions=["error"],
        _xoptions={"frozen_modules": "off"},
    )
    expected = "-B -O -O -E -s -P -Werror -X frozen_modules=off -X utf8"
    assert " ".join(interpreter_flags(stand_in)) == expected
