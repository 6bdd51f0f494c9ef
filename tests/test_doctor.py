"""The report of `llmrt doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrt import doctor
from llmrt.runtime.cores import available_cores
from llmrt.runtime.observe import observe
from llmrt.version import __version__


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the choice to what a small test runner is."""
    monkeypatch.delenv("LLMRT_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setattr(doctor, "observe", lambda: replace(observe(), anonymous_bytes=1 << 20))


def report(**options: Any) -> dict[str, Any]:
    return doctor.report(**options)


def test_the_report_is_plain_data(auto: None) -> None:
    made = report(cache_folder=Path("/caches/llmrt"))
    assert json.loads(json.dumps(made)) == made
    assert made["llmrt"] == __version__
    assert made["python"]["worker_command"][0] == sys.executable
    assert made["machine"]["cores"] == available_cores()
    assert made["process"]["host"] == "a test runner"
    assert made["packages"]["cloudpickle"] is not None
    assert made["cache_folder"] == "/caches/llmrt"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OPTIONAL", ("no-such-package-anywhere",))
    assert report()["extras"] == {"no-such-package-anywhere": None}


def test_the_start_method_is_shown_with_every_row(auto: None) -> None:
    shown = report()["start_method"]
    assert shown["name"] == "spawn"
    assert shown["reason"].startswith("This is a test runner")
    assert [row["row"] for row in shown["rows"]] == list(range(1, 9))
    assert [row["row"] for row in shown["rows"] if row["decides"]] == [8]


def test_a_bad_variable_is_reported_and_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMRT_WORKER_MULTIPROC_METHOD", "bogus")
    made = report()
    assert "'bogus'" in made["start_method"]["error"]
    assert "'bogus'" in doctor.as_text(made)


def test_a_warning_of_the_deciding_row_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRT_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr("llmrt.runtime.observe.ACCELERATOR_FILES", ("*",))
    made = report()
    assert made["start_method"]["name"] == "spawn"
    assert made["start_method"]["warning"] in doctor.as_text(made)


def test_a_frozen_program_is_reported_and_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    made = report()
    assert "frozen" in made["python"]["worker_command"]["error"]
    assert made["process"]["host"] == "a frozen program"
    assert "frozen" in doctor.as_text(made)


@pytest.mark.parametrize(
    ("num_cores", "load", "advice"),
    [
        (1, 3.0, "tp=1: "),
        (2, 0.1, "tp=1, num_threads=2 (the default): "),
        (2, 1.0, "tp=2, num_threads=1: other programs keep 1.0 of 2 cores busy"),
        (16, 0.6, "tp=1, num_threads=16 (the default): "),
    ],
)
def test_the_advice_does_not_fit_the_machine(num_cores: int, load: float, advice: str) -> None:
    assert doctor.layout_advice(num_cores, load).startswith(advice)


@pytest.mark.parametrize("compiler", [sys.executable, "no-such-compiler"])
def test_a_compiler_that_is_not_there_is_shown(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    made = report()
    is_there = compiler == sys.executable
    assert made["machine"]["c_compiler"] == ([compiler] if is_there else None)
    lines = [line for line in doctor.as_text(made).splitlines() if "c compiler" in line]
    assert [line.split()[-1] for line in lines] == [compiler if is_there else "-"]


def test_the_text_shows_the_choice_and_marks_the_row_that_made_it(auto: None) -> None:
    lines = doctor.as_text(report()).splitlines()
    assert f"llmrt         {__version__}" in lines
    assert any(line.startswith("start method  spawn: This is a test runner") for line in lines)
    assert [line for line in lines if line.startswith("  > ")] == [
        "  > 8. a program: a test runner"
    ]


def test_asking_imports_no_torch_and_nothing_else_heavy() -> None:
    code = (
        "import sys\nfrom llmrt.doctor import as_text, report\nas_text(report())\n"
        "print({'torch', 'numpy', 'ray', 'cloudpickle', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
