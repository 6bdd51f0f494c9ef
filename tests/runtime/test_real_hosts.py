"""What start methods come to in the real hosts that users work in, with workers without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import open_kernel
from tests.support.terminal import open_terminal

ROOT = Path(__file__).parents[2]
PROBE = """
import json, os, sys
sys.path.append(os.environ["PROBE_ROOT"])
from llmrt.by_value import dumps_call
from llmrt.config import Timeouts
from llmrt.runtime.environment import choose_start_method
from llmrt.runtime.interpreter import python_command
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.launchers.mp import MpLauncher
from llmrt.runtime.observe import observe
from llmrt.runtime.worker_group import WorkerGroup
from tests.support.fake_workers import Ask, FakeConfig

HERE = "known in this program alone"

def say_where(rank):
    return [rank, HERE]

def look():
    imported = set(sys.modules)
    environment = observe()
    seen = {"host": environment.host.name, "imported": sorted(set(sys.modules) - imported)}
    for requested in ("auto", "fork", "spawn"):
        seen[requested] = use_a_group(choose_start_method(environment, requested))
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps(seen) + chr(10))

def use_a_group(method):
    spec = GroupSpec(
        entry="tests.support.fake_workers:FakeWorker",
        configs=(FakeConfig(),) * 2,
        start_method=method,
        python=python_command(),
    )
    def ignore(*facts):
        pass
    group = WorkerGroup(spec, MpLauncher(), Timeouts(), on_output=ignore, on_phase=ignore)
    group.start()
    answers = group.call(Ask(what="result", arguments=(dumps_call(say_where),)), 20)
    report = group.close()
    return [group.start_method.name, answers, [worker.ended_by for worker in report.workers]]
"""
LOOK = PROBE + "\nlook()\n"
HERE = "known in this program alone"
INTERACTIVE = {"JUPYTER", "IPYTHON", "PYTHON_I", "REPL"}


@pytest.fixture
def seen_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "seen.json"
    monkeypatch.setenv("PROBE_FILE", str(path))
    monkeypatch.setenv("PROBE_ROOT", str(ROOT))
    monkeypatch.delenv("LLMRT_WORKER_MULTIPROC_METHOD", raising=False)
    (tmp_path / "probe.py").write_text(LOOK)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/program.py").write_text(LOOK)
    (tmp_path / "package/__main__.py").write_text(LOOK)
    return path


def assert_seen(seen_file: Path, host: str) -> None:
    """Check that it ran once, and what each start method came to there."""
    answers = [[[0, HERE], [1, HERE]], ["asked", "asked"]]
    assert json.loads(seen_file.read_text()) == {
        "host": host,
        "imported": [],
        "auto": ["fork" if host in INTERACTIVE else "spawn", *answers],
        "fork": ["fork", *answers],
        "spawn": ["spawn", *answers],
    }


def run(arguments: Sequence[str], cwd: Path, **options: Any) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        **({"input": ""} | options),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "host"),
    [
        (["probe.py"], "SCRIPT"),
        (["-W", "error::DeprecationWarning", "-E", "probe.py"], "SCRIPT"),
        (["-I", "probe.py"], "SCRIPT"),
        (["package/program.py"], "SCRIPT"),
        (["package"], "SCRIPT"),
        (["-m", "package"], "MODULE"),
        (["-m", "package.program"], "MODULE"),
        (["-c", LOOK], "COMMAND"),
        (["-i", "probe.py"], "PYTHON_I"),
        (["-m", "pdb", "-c", "c", "probe.py"], "DEBUGGER"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value).partition("\n")[0],
)
def test_a_program_is_told_by_how_it_was_started(
    arguments: list[str], host: str, seen_file: Path
) -> None:
    run(arguments, seen_file.parent)
    assert_seen(seen_file, host)


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_program_on_standard_input(arguments: list[str], seen_file: Path) -> None:
    run(arguments, seen_file.parent, input=LOOK)
    assert_seen(seen_file, "STDIN")


def test_a_program_read_from_a_file_on_standard_input(seen_file: Path) -> None:
    with (seen_file.parent / "probe.py").open() as file:
        run([], seen_file.parent, input=None, stdin=file)
    assert_seen(seen_file, "STDIN")


def test_a_prompt_without_a_terminal_is_interactive(seen_file: Path) -> None:
    run(["-i"], seen_file.parent, input="exec(open('probe.py').read())\n")
    assert_seen(seen_file, "PYTHON_I")


def test_pythoninspect_is_like_python_i(seen_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONINSPECT", "1")
    run(["probe.py"], seen_file.parent)
    assert_seen(seen_file, "PYTHON_I")


@pytest.mark.parametrize(
    "program",
    [
        "import __main__; del __main__.__spec__\n" + LOOK,
        "import sys; sys.argv[:] = []; del sys.modules['__main__']\n" + LOOK,
        PROBE + "import threading\nt = threading.Thread(target=look)\nt.start(); t.join()",
        PROBE + "import asyncio\nasync def main(): look()\nasyncio.run(main())",
    ],
    ids=["no spec", "no main and no argv", "thread", "event loop"],
)
def test_a_script_is_a_script_whatever_it_does(program: str, seen_file: Path) -> None:
    (seen_file.parent / "odd.py").write_text(program)
    run(["odd.py"], seen_file.parent)
    assert_seen(seen_file, "SCRIPT")


def test_a_script_with_closed_standard_files(seen_file: Path) -> None:
    command = '"$0" probe.py <&- >&- 2>&-'
    subprocess.run(
        ["sh", "-c", command, sys.executable], cwd=seen_file.parent, check=True, timeout=60
    )
    assert_seen(seen_file, "SCRIPT")


def test_a_script_that_stops_in_a_debugger(seen_file: Path) -> None:
    (seen_file.parent / "stops.py").write_text("breakpoint()\n" + LOOK)
    run(["stops.py"], seen_file.parent, input="b 1\nc\n")
    assert_seen(seen_file, "DEBUGGER")


def test_the_plain_prompt_at_a_terminal(seen_file: Path) -> None:
    with open_terminal([sys.executable], seen_file.parent) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("exec(open('probe.py').read())")
        terminal.wait_for(">>> ")
        terminal.type("exit()")
        terminal.wait_for_exit()
    assert_seen(seen_file, "REPL")


@pytest.mark.parametrize("command", ["exec(open('probe.py').read())", "%run probe.py"])
@pytest.mark.slow
def test_ipython_at_a_terminal(
    command: str, seen_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(seen_file.parent / "ipython"))
    ipython = [sys.executable, "-m", "IPython", "--no-banner", "--no-confirm-exit"]
    with open_terminal(ipython, seen_file.parent) as terminal:
        terminal.wait_for("In [")
        terminal.type(command)
        terminal.wait_for("In [")
        terminal.type("exit()")
        terminal.wait_for_exit()
    assert_seen(seen_file, "IPYTHON")


@pytest.mark.parametrize("cell", ["exec(open('probe.py').read())", "%run probe.py"])
@pytest.mark.slow
@pytest.mark.usefixtures("jupyter_loop")
def test_a_jupyter_kernel(cell: str, seen_file: Path) -> None:
    with open_kernel(seen_file.parent, os.environ) as kernel:
        assert kernel.run(cell).status == "ok"
    assert_seen(seen_file, "JUPYTER")


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
@pytest.mark.slow
def test_a_test_runner(options: list[str], seen_file: Path) -> None:
    (seen_file.parent / "test_look.py").write_text(PROBE + "def test_it():\n    look()\n")
    run(["-m", "pytest", "-p", "no:cacheprovider", *options, "test_look.py"], seen_file.parent)
    assert_seen(seen_file, "TEST_RUNNER")


def test_a_unittest_run(seen_file: Path) -> None:
    (seen_file.parent / "test_look.py").write_text(
        PROBE
        + "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        look()\n"
    )
    run(["-m", "unittest", "test_look"], seen_file.parent)
    assert_seen(seen_file, "TEST_RUNNER")


def test_a_program_that_only_imports_ipython_stays_a_script(seen_file: Path) -> None:
    (seen_file.parent / "imports.py").write_text("import IPython, ipykernel\n" + LOOK)
    run(["imports.py"], seen_file.parent)
    assert_seen(seen_file, "SCRIPT")


def test_nothing_is_written_to_the_environment_or_the_start_method(seen_file: Path) -> None:
    program = PROBE + (
        "import multiprocessing\nbefore = dict(os.environ)\nlook()\n"
        "assert dict(os.environ) == before\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
    )
    run(["-c", program], seen_file.parent, env=os.environ | {"LLMRT_WORKER_MULTIPROC_METHOD": ""})
    assert_seen(seen_file, "COMMAND")
