"""The owner of a group ends, or is peculiar: it runs as a process of its own here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.leaks import wait_until_gone

ROOT = Path(__file__).parents[2]
METHODS = pytest.mark.parametrize("method", ["spawn", "fork"])


class Owner:
    """A running `tests.support.owner`."""

    def __init__(self, *, python: tuple[str, ...] = (), **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *python, "-m", "tests.support.owner", json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.pids: list[int] = []
        self.facts: dict[str, Any] = {}

    def read_until(self, name: str, value: object = None) -> Any:
        """Read what it says until it has said this."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(json.loads(line))
            if name in self.facts and value in (None, self.facts[name]):
                return self.facts[name]
        raise AssertionError(f"never said {name}: {self.process.communicate()[1]}")

    def _note(self, facts: dict[str, Any]) -> None:
        self.facts.update(facts)
        if facts.get("pid"):
            self.pids.append(facts["pid"])

    def finish(self, seconds: float = 30) -> str:
        """Wait for its end, note all it says, and return what it wrote to stderr."""
        out, err = self.process.communicate(timeout=seconds)
        for line in out.splitlines():
            self._note(json.loads(line))
        return err

    def release(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def start_owner() -> Iterator[Any]:
    with ExitStack() as stack:

        def start(**options: Any) -> Owner:
            owner = Owner(**options)
            stack.callback(owner.release)
            return owner

        yield start


KILLED_WHILE = {
    "importing": ({"then": "hang_in_start", "preload": ["tests.support.slow_import"]}, "importing"),
    "in a constructor": (
        {"then": "hang_in_start", "config": {"fault": "hang", "phase": "start"}},
        "started",
    ),
    "idle": ({"then": "idle"}, None),
    "in a call": ({"then": "hang_in_call"}, None),
    "in a deaf loop": ({"then": "spin_in_call"}, None),
    "stopping": ({"then": "hang_in_close", "config": {"fault": "spin", "phase": "stop"}}, None),
}


@METHODS
@pytest.mark.parametrize("moment", KILLED_WHILE)
def test_nothing_outlives_a_killed_owner(start_owner: Any, moment: str, method: str) -> None:
    options, phase = KILLED_WHILE[moment]
    owner = start_owner(method=method, **options)
    if phase is None:
        owner.read_until("ready")
    else:
        owner.read_until("phase", phase)
    owner.process.kill()
    owner.finish()
    assert owner.pids
    wait_until_gone(owner.pids, 5)


@METHODS
def test_nothing_outlives_an_owner_whose_sockets_live_on(start_owner: Any, method: str) -> None:
    owner = start_owner(method=method, then="lend_descriptors")
    holder = owner.read_until("lent_to")
    try:
        owner.process.kill()
        owner.process.wait()
        wait_until_gone(owner.pids, 5)
    finally:
        os.kill(holder, signal.SIGKILL)


@METHODS
@pytest.mark.parametrize(
    ("scenario", "code"), [("exit_without_close", 7), ("exit_hard", 9)], ids=["exit", "_exit"]
)
@pytest.mark.parametrize("python", [(), ("-W", "error"), ("-X", "dev")], ids=["", "error", "dev"])
def test_a_program_that_never_closes_ends_quietly(
    start_owner: Any, method: str, scenario: str, code: int, python: tuple[str, ...]
) -> None:
    owner = start_owner(method=method, then=scenario, python=python)
    assert owner.finish(10) == ""
    assert owner.process.returncode == code
    assert len(owner.pids) == 3
    wait_until_gone(owner.pids, 5)


@METHODS
def test_an_ignored_sigchld_loses_no_exit_code(start_owner: Any, method: str) -> None:
    owner = start_owner(method=method, then="kill_a_worker", ignore_sigchld=True)
    assert owner.finish() == ""
    assert owner.facts["error"] == "WorkerDiedError"
    assert owner.facts["signal"] == "SIGKILL"
    wait_until_gone(owner.pids, 1)


@METHODS
def test_closed_standard_streams_are_left_closed(tmp_path: Path, method: str) -> None:
    out = tmp_path / "out"
    options = json.dumps({"method": method, "then": "answer_and_close", "out": str(out)})
    command = 'exec "$0" -m tests.support.owner "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, sys.executable, options], cwd=ROOT, timeout=30, check=True)
    facts: dict[str, Any] = {}
    for line in out.read_text().splitlines():
        facts.update(json.loads(line))
    assert facts["answers"] == ["llmrt-rank0", "llmrt-rank1"]
    assert facts["ended_by"] == ["asked", "asked"]
    assert facts["same_descriptors"]


@METHODS
def test_a_daemonic_process_may_own_a_group(start_owner: Any, method: str) -> None:
    owner = start_owner(method=method, then="answer_and_close", in_a_pool=True)
    assert owner.finish() == ""
    assert owner.facts["ended_by"] == ["asked", "asked"]


@METHODS
def test_the_thread_that_started_a_group_may_end(start_owner: Any, method: str) -> None:
    owner = start_owner(method=method, then="exit_of_the_starting_thread")
    assert owner.finish() == ""
    assert owner.facts["answers"] == [1, 1]


@METHODS
def test_busy_threads_and_strict_warnings_make_no_noise(start_owner: Any, method: str) -> None:
    owner = start_owner(
        method=method, then="answer_and_close", num_busy_threads=20, python=("-W", "error")
    )
    assert owner.finish() == ""
    assert owner.facts["method"] == method
    assert owner.facts["exits"] == [0, 0]
    assert "output" not in owner.facts


def test_time_in_which_the_owner_was_stopped_does_not_count(start_owner: Any) -> None:
    owner = start_owner(then="measure_patience")
    owner.read_until("ready")
    time.sleep(0.2)
    owner.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    owner.process.send_signal(signal.SIGCONT)
    assert owner.finish() == ""
    assert owner.facts["error"] == "WorkerHungError"
    assert owner.facts["seconds"] > 2.5


@METHODS
@pytest.mark.parametrize("max_files", range(8, 24, 3))
def test_too_few_descriptors_are_a_start_error_that_leaves_nothing(
    start_owner: Any, method: str, max_files: int
) -> None:
    owner = start_owner(method=method, then="start_and_say_error", max_files=max_files)
    assert owner.finish() == ""
    assert owner.facts["same_descriptors"]
    if "error" in owner.facts:
        assert owner.facts["error"] == "EngineStartError"
        assert "Too many open files" in owner.facts["message"]
    wait_until_gone(owner.pids, 1)


def test_a_fork_after_a_parallel_region_works(start_owner: Any) -> None:
    owner = start_owner(method="fork", then="run_a_pool_first")
    assert owner.finish() == ""
    assert owner.facts["pool"] == 2
    assert owner.facts["method"] == "fork"
    assert owner.facts["history"] is None


def test_a_fork_that_does_not_prove_itself_becomes_a_spawn(start_owner: Any) -> None:
    owner = start_owner(
        method="fork", then="run_a_pool_first", break_release=True, timeouts={"fork_probe": 0.5}
    )
    assert owner.finish() == ""
    assert owner.facts["answers"] == ["llmrt-rank0", "llmrt-rank1"]
    assert owner.facts["method"] == "spawn"
    assert "no sign of life from forked rank 0, 1" in owner.facts["history"]
    wait_until_gone(owner.pids, 1)
