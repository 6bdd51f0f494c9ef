"""From the C files here to a loaded library: compiled once for each kind of processor, then kept.

The entry in the cache folder has a name that tells the source, the flags and the processor apart,
so a home directory that machines share holds one for each of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

from llmrt.c_compiler import compiler_command
from llmrt.cache_entries import Build, building, cache_folder
from llmrt.errors import ConfigError

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = (
    "-O3",
    "-march=native",
    # Without the two, no loop with a square root or a rounding becomes vectors.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fopenmp",
    "-fPIC",
)
_X86_FLAGS = ("-mprefer-vector-width=512",)
_MOST_SECONDS = 45.0
"""Less than an engine waits for a rank that says nothing; on two busy cores it takes five."""
_DIGEST_SIZE = hashlib.sha256().digest_size


class NoKernelsError(Exception):
    """There is no library; says why."""


def load_library(report: Callable[[str], None]) -> ctypes.CDLL:
    """Return the library, compiled if nobody has yet.

    Args:
        report: told that compiling, or waiting for another rank that compiles, goes on.

    Raises:
        NoKernelsError: there is no compiler, it fails, or its result cannot be kept or loaded.
    """
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ()))
    try:
        entry = cache_folder() / "kernels" / f"{_key(flags)}.so"
        if not _is_whole(entry):
            _compile(entry, flags, report)
        return ctypes.CDLL(str(entry))
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: nobody's home directory
        raise NoKernelsError(str(error)) from error


def _is_whole(entry: Path) -> bool:
    """Return whether *entry* is there, with all its bytes: a part of a library ends the process."""
    try:
        data = entry.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_SIZE]).digest() == data[-_DIGEST_SIZE:]


def _key(flags: tuple[str, ...]) -> str:
    sources = [path.read_bytes() for path in _SOURCES]
    parts = (*sources, " ".join(flags).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Return what -march=native depends on: the processor's model, and what it can do."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    first = dict.fromkeys(line for line in lines if line.split("\t")[0].rstrip(" :") in names)
    return "\n".join((platform.machine(), *first))


def _compile(entry: Path, flags: tuple[str, ...], report: Callable[[str], None]) -> None:
    compiler = compiler_command()
    if compiler is None:
        raise NoKernelsError("no C compiler was found (gcc, cc or $CC)")
    report("compiling kernels")
    with building(entry, on_wait=lambda: report("compiling kernels")) as build:
        if _is_whole(entry):
            return
        units = [path for path in _SOURCES if path.suffix == ".c"]
        _run([*compiler, *flags, "-c", *map(str, units)], build)
        # Without -fopenmp: a second OpenMP beside the one that torch has loaded would bring
        # threads of its own. What is missing is found in torch's.
        objects = [path.with_suffix(".o").name for path in units]
        _run([*compiler, "-shared", *objects, "-o", "kernels.so", "-lm"], build)
        library = build.folder / "kernels.so"
        with library.open("rb+") as file:  # what stands behind its end, a loader does not see
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(library, entry)


def _run(command: list[str], build: Build) -> None:
    # A compiler's own helpers may outlive it: they get no pipe that one would wait for, and not
    # the lock. In a folder that is gone they do no harm.
    with (build.folder / "said").open("w+b") as said:
        try:
            done = subprocess.run(
                command,
                cwd=build.folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise NoKernelsError(f"{command[0]} took more than {_MOST_SECONDS:.0f} s") from None
        if done.returncode != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            reason = lines[0] if lines else "it said nothing"
            raise NoKernelsError(f"{command[0]} ended with {done.returncode}: {reason}")
