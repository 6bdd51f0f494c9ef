"""Workers with a fault in a phase of the test's choice: a light one without torch, and the real.

Engine(model, tp=2, backend=Rigged("light", load="hang", rank=1))
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace

from llmrt.config import Timeouts
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.launchers.mp import GuardHandle, MpLauncher

VARIABLE = "LLMRT_TESTS_RIGGED"
ENTRIES = {
    "light": "tests.support.light_worker:LightWorker",
    "real": "tests.support.rigged_worker:RiggedWorker",
}
PRELOAD = {"light": ("tests.support.light_worker",), "real": ("torch", "llmrt.worker.worker")}


class Rigged(MpLauncher):
    """Launches workers of one kind with a fault in one of their phases.

    Args:
        kind: `light` or `real`.
        rank: Whose fault it is; None for all.
        **faults: A function below, by phase: `init`, `load`, `allocate`, `execute`, `call`, `stop`.
    """

    def __init__(self, kind: str = "light", rank: int | None = None, **faults: str) -> None:
        super().__init__()
        self._kind = kind
        self._rigging = json.dumps({"rank": rank, "faults": faults})

    def launch(self, spec: GroupSpec, timeouts: Timeouts) -> GuardHandle:
        rigged = replace(
            spec,
            entry=ENTRIES[self._kind],
            preload=PRELOAD[self._kind],
            env={**spec.env, VARIABLE: self._rigging},
        )
        return super().launch(rigged, timeouts)


def come_to(phase: str, rank: int) -> None:
    """Do what this process is rigged to do in this phase."""
    rigging = json.loads(os.environ.get(VARIABLE, "{}"))
    if rigging and rigging["rank"] in (None, rank) and phase in rigging["faults"]:
        globals()[rigging["faults"][phase]](phase)


def hang(phase: str) -> None:
    threading.Event().wait()


def refuse(phase: str) -> None:
    raise ValueError(f"no {phase} today")


def kill(phase: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(phase: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_7(phase: str) -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


def freeze(phase: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
