"""A program of a user's that runs as a process of its own, and what it and its children come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.leaks import wait_until_gone

ROOT = Path(__file__).parents[2]
PRELUDE = """
import json, os, signal, sys, threading
import llmrt
from llmrt import AsyncEngine, Engine, EngineState, SamplingParams
MODEL = {model!r}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())
"""


class Program:
    """A running program. What it says with `say(name=value)` is read as facts."""

    def __init__(
        self,
        source: str,
        model: Path,
        directory: Path,
        *,
        python: tuple[str, ...] = (),
        before: str = "",
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        path = directory / "program.py"
        prelude = PRELUDE.format(model=str(model))
        path.write_text(textwrap.dedent(before) + prelude + textwrap.dedent(source))
        self._stderr = (directory / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *python, str(path)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        self.facts: dict[str, Any] = {}

    def wait_for(self, name: str) -> Any:
        """Read what it says until it has said this."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.facts.update(json.loads(line))
            if name in self.facts:
                return self.facts[name]
        raise AssertionError(f"never said {name}: {self.stderr}")

    @property
    def stderr(self) -> str:
        """What it has written to stderr."""
        self._stderr.seek(0)
        return self._stderr.read()

    def descendants(self) -> list[int]:
        """Return the pids of everything it has started."""
        return [p.pid for p in psutil.Process(self.process.pid).children(recursive=True)]

    def type(self, line: str) -> None:
        """Write a line to its stdin, which must be a pipe."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def finish(self, seconds: float = 60.0) -> str:
        """Wait for its end, killing it when the time is up; note the rest of what it says.

        Returns what it wrote to stderr.
        """
        assert self.process.stdout is not None
        limit = threading.Timer(seconds, self.process.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                self.facts.update(json.loads(line))
            self.process.wait()
        finally:
            limit.cancel()
            limit.join()
        return self.stderr

    def kill_and_wait_for_everything(self, seconds: float = 5.0) -> float:
        """SIGKILL it; fail unless what it started ends by itself. Return how long that took."""
        pids = self.descendants()
        assert pids, "it has started nothing"
        self.process.kill()
        self.process.wait()
        return wait_until_gone(pids, seconds)

    def release(self) -> None:
        """End it, whatever it does."""
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._stderr.close()
