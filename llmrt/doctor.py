"""What `llmrt doctor` shows: this machine, this Python, and how an engine would start here.

Nothing heavy is imported for it, torch least of all: versions are read from the installed metadata.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from llmrt.c_compiler import compiler_command
from llmrt.errors import ConfigError
from llmrt.runtime.cores import (
    available_cores,
    available_memory_bytes,
    cgroup_version,
    threads_per_rank,
)
from llmrt.runtime.environment import (
    Environment,
    StartMethodRow,
    deciding_row,
    explain_start_method,
)
from llmrt.runtime.interpreter import python_command
from llmrt.runtime.observe import observe
from llmrt.version import __version__

_REQUIRED = ("torch", "tokenizers", "safetensors", "gguf", "huggingface-hub", "cloudpickle")
_OPTIONAL = ("ray",)
_BUSY_CORES = 0.7
"""From so many busy cores on other programs get in the way; one busy process is a load of 1."""


def report(*, cache_folder: Path | None = None) -> dict[str, object]:
    """Return what an engine would find here, as plain data that json can write.

    What cannot be told is None, or `{"error": ...}` where somebody can do something about it.
    """
    environment = observe()
    return {
        "llmrt": __version__,
        "python": _python(),
        "platform": f"{environment.platform} {os.uname().release} {environment.machine}",
        "packages": {name: _version(name) for name in _REQUIRED},
        "extras": {name: _version(name) for name in _OPTIONAL},
        "machine": {
            "cores": available_cores(),
            "threads_per_rank_at_tp_1": threads_per_rank(1),
            "available_memory_bytes": _or_error(available_memory_bytes),
            "cgroup_version": cgroup_version(),
            "c_compiler": compiler_command(),
        },
        "advice": layout_advice(available_cores(), os.getloadavg()[0]),
        "process": _process(environment),
        "start_method": _start_method(environment),
        "cache_folder": None if cache_folder is None else str(cache_folder),
    }


def as_text(report: Mapping[str, object]) -> str:
    """Return a report as lines for a terminal; the start method's rows come last, as a table."""
    rest = {name: value for name, value in report.items() if name != "start_method"}
    chosen = cast("dict[str, Any]", report["start_method"])
    verdict = chosen["error"] if "error" in chosen else f"{chosen['name']}: {chosen['reason']}"
    lines = [*_lines(rest, ""), "", f"start method  {verdict}"]
    lines += [f"warning       {chosen['warning']}"] if chosen["warning"] else []
    return "\n".join([*lines, *(_row_line(row) for row in chosen["rows"])])


def layout_advice(num_cores: int, load: float) -> str:
    """Return which ranks and threads are fastest on this machine's cores; `tp` splits a model.

    The rule is what `docs/performance.md` has measured on two cores, under "Threads and ranks".

    Args:
        num_cores: how many this process may use.
        load: how many cores other programs keep busy.
    """
    if num_cores == 1:
        return "tp=1: there is one core"
    if load < _BUSY_CORES:
        return f"tp=1, num_threads={num_cores} (the default): threads of one rank are fastest here"
    return (
        f"tp={num_cores}, num_threads=1: other programs keep {load:.1f} of {num_cores} cores busy, "
        "and threads of one rank would wait for one another at every step"
    )


def _python() -> dict[str, object]:
    return {
        "version": ".".join(map(str, sys.version_info[:3])),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "worker_command": _or_error(lambda: list(python_command())),
    }


def _process(environment: Environment) -> dict[str, object]:
    opened = environment.open_accelerators
    return {
        "host": environment.host.value,
        "interactive": environment.is_interactive,
        "ray": environment.ray,
        "open_accelerators": None if opened is None else list(opened),
        "anonymous_bytes": environment.anonymous_bytes,
        "native_threads": environment.num_native_threads,
    }


def _start_method(environment: Environment) -> dict[str, object]:
    rows = explain_start_method(environment)
    decider = deciding_row(rows)
    if decider.start_method is None:
        verdict = {"error": decider.error}
    else:
        verdict = {"name": decider.start_method.name, "reason": decider.start_method.reason}
    return {**verdict, "warning": decider.warning, "rows": [_row(row) for row in rows]}


def _row(row: StartMethodRow) -> dict[str, object]:
    return {
        "row": row.number,
        "asks": row.question,
        "saw": row.saw,
        "matches": row.matches,
        "decides": row.decides,
    }


def _row_line(row: Mapping[str, Any]) -> str:
    mark = ">" if row["decides"] else "+" if row["matches"] else " "
    return f"  {mark} {row['row']}. {row['asks']}: {row['saw']}"


def _lines(values: Mapping[str, object], indent: str) -> Iterator[str]:
    width = max(len(_label(name)) for name in values)
    for name, value in values.items():
        label = f"{indent}{_label(name):{width}}"
        match value:
            case dict():
                yield label.rstrip()
                yield from _lines(cast("dict[str, object]", value), indent + "  ")
            case _:
                yield f"{label}  {_readable(name, value)}"


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _readable(name: str, value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_bytes"):
            return f"{value / (1 << 30):.2f} GiB"
        case list():
            return " ".join(map(str, cast("list[object]", value))) or "none"
        case _:
            return str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _or_error(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except ConfigError as error:
        return {"error": str(error)}
