"""The compiled library: made once, whole or not at all, and never needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from llmrt.config import WorkerContext
from llmrt.messages import AllocateCache, Load, Stop
from llmrt.worker.matrices.grouped_codes import quantize_to_groups
from llmrt.worker.native import library
from llmrt.worker.native.library import NoKernelsError
from llmrt.worker.native.packing import pack_codes
from llmrt.worker.native.trial import load_kernels
from llmrt.worker.worker import Worker
from tests.support.checkpoints import Checkpoint
from tests.support.native import require_compiler
from tests.support.tiny_driver import worker_config

LOAD = """
from llmrt.worker.native.trial import load_kernels
import torch
load_kernels(print)
print("loaded")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; returns where libraries are kept in it."""
    monkeypatch.setenv("LLMRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's compiler behind a script that writes down each call; returns what it wrote."""
    command = require_compiler()
    calls = tmp_path / "calls"
    write_compiler(tmp_path, f'echo "$@" >> {calls}\nexec {" ".join(command)} "$@"', monkeypatch)
    return calls


def write_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def test_a_library_is_compiled_twice(folder: Path, compiler: Path) -> None:
    said: list[str] = []
    load_kernels(said.append)
    first = compiler.read_text().splitlines()
    assert len(first) == 2  # compiled, and linked
    assert set(said) == {"compiling kernels"}
    (entry,) = folder.glob("*.so")
    assert sorted(p.suffix for p in folder.iterdir()) == [".lock", ".so"]
    load_kernels(said.append)
    assert compiler.read_text().splitlines() == first
    assert entry.stat().st_size > 10_000


@pytest.mark.slow
def test_ranks_that_start_together_compile_one_by_one(folder: Path, compiler: Path) -> None:
    def load(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", LOAD], capture_output=True, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(load, range(3)))
    assert all(s.endswith("loaded\n") for s in said)
    assert len(compiler.read_text().splitlines()) == 2
    assert len(list(folder.glob("*.so"))) == 1


@pytest.mark.slow
def test_a_processor_of_another_kind_gets_the_same_library(
    folder: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernels(lambda phase: None)
    monkeypatch.setattr(library, "_processor", lambda: "another")
    load_kernels(lambda phase: None)
    assert len(list(folder.glob("*.so"))) == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'rows.c:1: error: no such vector' >&2; exit 1", "no such vector"),
        ("exit 3", "ended with 3: it said nothing"),
        ("kill -9 $$", "ended with -9"),
        ('[ "$1" != -shared ] || echo nonsense > kernels.so', "file too short"),
    ],
)
def test_a_compiler_that_fails_leaves_something(
    script: str, reason: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, script, monkeypatch)
    with pytest.raises(NoKernelsError, match=reason):
        load_kernels(lambda phase: None)
    assert [p for p in folder.iterdir() if p.name.endswith(".partial")] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 64, 4096, -100])
def test_a_library_of_which_a_part_is_missing_is_loaded(
    size: int, folder: Path, compiler: Path
) -> None:
    load_kernels(lambda phase: None)
    (entry,) = folder.glob("*.so")
    whole = entry.read_bytes()
    entry.unlink()  # this process has it mapped
    entry.write_bytes(whole[:size])
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded\n")
    assert entry.stat().st_size == len(whole)


def test_helpers_that_a_compiler_leaves_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    write_compiler(tmp_path, f"sleep 1000 & echo $! >> {pids}; exit 1", monkeypatch)
    for _ in range(2):
        with pytest.raises(NoKernelsError, match="ended with 1"):
            load_kernels(lambda phase: None)
    for pid in map(int, pids.read_text().split()):
        os.kill(pid, signal.SIGKILL)


def test_what_a_compiler_says_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, "printf 'ung\\374ltig' >&2; exit 1", monkeypatch)
    with pytest.raises(NoKernelsError, match="ung"):
        load_kernels(lambda phase: None)


def test_a_user_without_a_home_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: int | str) -> object:
        raise KeyError(name)

    for name in ("LLMRT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(NoKernelsError, match="home"):
        load_kernels(lambda phase: None)


@pytest.mark.slow
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_spoils_the_kernels(default: torch.dtype, compiler: Path) -> None:
    torch.set_default_dtype(default)
    try:
        made = load_kernels(lambda phase: None)
        codes = quantize_to_groups(torch.ones(16, 32, dtype=torch.float32))
        x = torch.ones(1, 32, dtype=torch.bfloat16)
        assert (made.multiply_codes(x, pack_codes(codes), None) == 32).all()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_compiler_that_hangs_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, "exec sleep 1000", monkeypatch)
    monkeypatch.setattr(library, "_MOST_SECONDS", 0.2)
    with pytest.raises(NoKernelsError, match="took more than"):
        load_kernels(lambda phase: None)
    assert list(folder.glob("*.so")) == []


@pytest.mark.parametrize("command", ["no-such-compiler --fast", "gcc 'without an end"])
def test_a_machine_without_a_compiler_has_kernels(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(NoKernelsError, match="no C compiler was found"):
        load_kernels(lambda phase: None)


def test_a_cache_folder_that_cannot_be_written_stops_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMRT_CACHE", str(tmp_path / "file"))
    with pytest.raises(NoKernelsError, match="cannot be written"):
        load_kernels(lambda phase: None)


@pytest.mark.parametrize(
    ("options", "compiler_works", "has_kernels"),
    [
        ({"dtype": "bfloat16"}, True, True),
        ({"dtype": "bfloat16"}, False, False),
        ({"dtype": "bfloat16", "compiled_kernels": False}, True, False),
        ({"dtype": "float32"}, True, False),
    ],
)
def test_which_workers_have_kernels(
    checkpoints: dict[str, Checkpoint],
    options: dict[str, object],
    compiler_works: bool,
    has_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler()
    if not compiler_works:
        monkeypatch.setenv("CC", "no-such-compiler")
    checkpoint = checkpoints["llama"]
    config = worker_config(checkpoint.config, weights=str(checkpoint.directory), **options)
    said: list[str] = []
    worker = Worker(
        config, WorkerContext(rank=0, world_size=1, report=lambda phase, *_: said.append(phase))
    )
    try:
        worker.handle(Load())
        worker.handle(AllocateCache(num_blocks=10))
        assert worker.model is not None
        assert (worker.model.norm._kernels is not None) == has_kernels
        assert ("compiling kernels" in said) == has_kernels
    finally:
        worker.stop(Stop())


@pytest.mark.slow
def test_the_library_brings_threads_of_its_own(compiler: Path) -> None:
    program = f"""
import torch
from pathlib import Path
def runtimes():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {{line.split()[-1] for line in maps if "omp" in line.split()[-1]}}
before = runtimes()
{LOAD}
print(len(before), runtimes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 set()"
