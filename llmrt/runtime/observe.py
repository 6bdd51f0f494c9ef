"""Reads from the running process what `Environment` says of it.

Nothing is imported in order to ask, and nothing is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from llmrt.runtime.environment import Environment
from llmrt.runtime.host import find_host
from llmrt.runtime.start_method_rows import METHOD_VARIABLE

ACCELERATOR_FILES = (
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/dxg",
    "/dev/accel*",
)
"""Device files that a driver of NVIDIA, AMD, Intel, WSL or of another accelerator holds open."""
_RAY_WORKER_MODE = 1


def observe(
    *,
    interpreter: Any = sys,
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc/self"),
) -> Environment:
    """Return what kind of process this is.

    Args:
        interpreter: What is asked instead of `sys`: its modules, flags, platform and command line.
        environ: What is asked instead of `os.environ`.
        proc: Where the kernel describes the process.
    """
    status = _read_status(proc)
    return Environment(
        host=find_host(interpreter, environ),
        ray=_find_ray(interpreter.modules),
        open_accelerators=_find_accelerators(proc, interpreter.modules),
        # Old and emulated kernels do not tell anonymous memory from the rest.
        anonymous_bytes=_kib(status.get("RssAnon") or status.get("VmRSS")),
        num_native_threads=int(status["Threads"]) if "Threads" in status else None,
        platform=interpreter.platform,
        machine=os.uname().machine,
        method_variable=environ.get(METHOD_VARIABLE) or None,
    )


def _read_status(proc: Path) -> dict[str, str]:
    try:
        lines = (proc / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _kib(field: str | None) -> int | None:
    return None if field is None else int(field.split()[0]) * 1024


def _find_accelerators(proc: Path, modules: Mapping[str, Any]) -> tuple[str, ...] | None:
    try:
        links = sorted({_link(fd) for fd in (proc / "fd").iterdir()})
    except OSError:
        return None
    found = [link for link in links if any(fnmatchcase(link, p) for p in ACCELERATOR_FILES)]
    if _torch_uses_cuda(modules):
        found.append("torch.cuda")
    return tuple(found)


def _link(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed since it was listed, among them the one that listed
        return ""


def _torch_uses_cuda(modules: Mapping[str, Any]) -> bool:
    is_initialized = getattr(modules.get("torch.cuda"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _find_ray(modules: Mapping[str, Any]) -> Literal["driver", "worker"] | None:
    # Only the real Ray has loaded its compiled core; anybody's module may be called `ray`.
    if "ray._raylet" not in modules:
        return None
    is_initialized = getattr(modules.get("ray"), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    worker = getattr(modules.get("ray._private.worker"), "global_worker", None)
    return "worker" if getattr(worker, "mode", None) == _RAY_WORKER_MODE else "driver"
