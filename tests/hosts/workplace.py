"""A directory with a user's programs in it, and what they wrote when a host ran them.

LLMRT_TEST_START_METHOD=fork or spawn runs every host with that start method asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrt.runtime.start_method_rows import METHOD_VARIABLE
from tests.support.leaks import wait_until_gone

BEGINNING = Path(__file__).with_name("user_program.py").read_text()
OPEN_AND_USE = """
with Engine(MODEL, tp=2, progress=False) as llm:
    facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
finish(facts)
"""
PROGRAM = BEGINNING + OPEN_AND_USE
"""What is written at the top level of a file, without any guard."""
RETURNED = [[rank, "known in the user's program alone"] for rank in (0, 1)]


class Workplace:
    """A user's directory: a program in every form in which Python runs one."""

    def __init__(self, directory: Path, model: Path, tokens: list[int]) -> None:
        self.directory = directory
        self._tokens = tokens
        self._facts_file = directory / "facts.jsonl"
        self._asked_for = os.environ.get("LLMRT_TEST_START_METHOD")
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("LLMRT_", "PYTEST_"))},
            "HOSTS_MODEL": str(model),
            "HOSTS_FACTS": str(self._facts_file),
            "IPYTHONDIR": str(directory / "ipython"),
            "JUPYTER_PLATFORM_DIRS": "1",
        }
        if self._asked_for:
            self.environ[METHOD_VARIABLE] = self._asked_for
        self.write("program.py", PROGRAM)
        self.write("beginning.py", BEGINNING)

    def write(self, name: str, text: str) -> Path:
        """Write a file and return its path."""
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def run(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        seconds: float = 100.0,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; fail unless it succeeds and stays quiet on stderr."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            **({"input": ""} | options),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def facts(self) -> list[dict[str, Any]]:
        """Return what each run of a program saw."""
        lines = self._facts_file.read_text().splitlines() if self._facts_file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_facts(self, seconds: float = 60.0) -> None:
        """Wait until a program has written what it saw."""
        deadline = time.monotonic() + seconds
        while not self._facts_file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def assert_worked(self, method: str, reason: str, times: int = 1) -> None:
        """Check that every run opened, answered, shipped its function and left nothing.

        Args:
            method: what `auto` chooses here.
            reason: a part of the reason it gives.
            times: how often the program ran.
        """
        facts = self.facts()
        assert len(facts) == times, "the program ran too often, or not to its end"
        for seen in facts:
            if not self._asked_for:
                assert (seen["method"], seen["tokens"]) == (method, self._tokens), seen
                assert reason in seen["reason"]
            else:
                assert seen["tokens"] == self._tokens
                self._assert_method_asked_for(seen, method, reason)
            assert seen["returned"] == RETURNED
            assert seen["left"] == []
            assert not seen["torch came"]
            wait_until_gone(seen["pids"], 5.0)

    def _assert_method_asked_for(self, seen: dict[str, Any], method: str, reason: str) -> None:
        if METHOD_VARIABLE not in seen["reason"] or seen["method"] != self._asked_for:
            assert seen["method"] == method  # start_method= goes first, and some refuse a fork
            assert reason.lower() in seen["reason"].lower()
