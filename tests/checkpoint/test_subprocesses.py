from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmrt.checkpoint.subprocesses import run_module


def test_a_module_runs_with_this_process_s_import_path(packages: Path) -> None:
    (packages / "said.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    finished = run_module("said", ["a", "b c"], stall_seconds=30)
    assert (finished.exit_code, finished.output) == (3, "['a', 'b c']\n")


def test_it_keeps_the_descriptors_it_is_given(packages: Path) -> None:
    (packages / "look.py").write_text("import os, sys; os.fstat(int(sys.argv[1]))")
    reading, writing = os.pipe()
    try:
        given = run_module("look", [str(writing)], inherit_fds=[writing], stall_seconds=30)
        kept = run_module("look", [str(writing)], stall_seconds=30)
    finally:
        os.close(reading)
        os.close(writing)
    assert (given.exit_code, kept.exit_code) == (0, 1)


def test_a_file_in_the_current_folder_is_not_taken_for_a_library(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runpy.py").write_text("raise SystemExit('the wrong one')")
    (packages / "fine.py").write_text("print('fine')")
    monkeypatch.chdir(tmp_path)
    assert run_module("fine", [], stall_seconds=30).output == "fine\n"


def test_one_that_stands_still_is_ended(packages: Path) -> None:
    (packages / "stuck.py").write_text("import time; time.sleep(100)")
    finished = run_module("stuck", [], stall_seconds=0.3)
    assert finished.exit_code == -9
    assert "no progress" in finished.last_error_line


def test_an_interrupt_ends_it(packages: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (packages / "slow.py").write_text(
        "import os, sys, time\n"
        "open(sys.argv[1] + '~', 'w').write(str(os.getpid()))\n"
        "os.rename(sys.argv[1] + '~', sys.argv[1]); time.sleep(100)"
    )

    def interrupt() -> int:
        if pid_file.exists():
            raise KeyboardInterrupt
        return 0

    with pytest.raises(KeyboardInterrupt):
        run_module("slow", [str(pid_file)], progress=interrupt, stall_seconds=30)
    assert not os.path.exists(f"/proc/{pid_file.read_text()}")


def test_a_lot_of_output_blocks_nobody(packages: Path) -> None:
    (packages / "loud.py").write_text("import sys; sys.stderr.write('x' * 10**6 + '\\nlast\\n')")
    finished = run_module("loud", [], stall_seconds=30)
    assert finished.last_error_line == "last"
