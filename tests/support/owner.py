"""An owner of a group that is a process of its own, so that a test can end it in any way.

    python -m tests.support.owner '{"method": "fork", "then": "hang_in_call"}'

Prints one JSON line for every phase, and for what a scenario has to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from llmrt.config import Timeouts
from llmrt.errors import LlmrtError
from llmrt.runtime.fork_history import FORK_HISTORY
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.launchers.mp import MpLauncher
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.worker_group import WorkerGroup
from tests.support.fake_workers import Ask, Echo, FakeConfig, Misbehave

_OUT = 1
_KEPT: list[Any] = []


def say(**facts: Any) -> None:
    os.write(_OUT, (json.dumps(facts) + "\n").encode())


def new_group(options: dict[str, Any]) -> WorkerGroup:
    config = FakeConfig(**options.get("config", {}))
    spec = GroupSpec(
        entry="tests.support.fake_workers:FakeWorker",
        configs=(config,) * options.get("num_ranks", 2),
        preload=tuple(options.get("preload", ["tests.support.fake_workers"])),
        start_method=StartMethod(name=options.get("method", "spawn"), reason="a test"),
    )
    timeouts = Timeouts(**options.get("timeouts", {"close": 8.0, "close_ask": 1.0}))
    return WorkerGroup(
        spec, MpLauncher(), timeouts, on_output=lambda o: say(output=o.text), on_phase=_say_phase
    )


def _say_phase(rank: int | None, phase: str, detail: str) -> None:
    pid = int(detail.rpartition(" ")[2]) if "process" in detail else None
    say(phase=phase, rank=rank, pid=pid)


def wait_for_ever() -> None:
    threading.Event().wait()


# ---- scenarios: what happens after (or while) the group starts ----


def idle(group: WorkerGroup) -> None:
    group.start()
    say(ready=True)
    while True:
        group.poll(None)


def hang_in_call(group: WorkerGroup) -> None:
    group.start()
    call = group.submit(Misbehave(fault="hang"))
    say(ready=True)
    group.wait(call, 1000)


def spin_in_call(group: WorkerGroup) -> None:
    group.start()
    call = group.submit(Misbehave(fault="spin"))
    say(ready=True)
    group.wait(call, 1000)


def hang_in_close(group: WorkerGroup) -> None:
    group.start()
    say(ready=True)
    group.close()


def hang_in_start(group: WorkerGroup) -> None:
    group.start()


def lend_descriptors(group: WorkerGroup) -> None:
    """A process that the user forked keeps copies of all our sockets."""
    group.start()
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    say(ready=True, lent_to=pid)
    wait_for_ever()


def exit_without_close(group: WorkerGroup) -> None:
    group.start()
    _KEPT.append(group)
    sys.exit(7)


def exit_hard(group: WorkerGroup) -> None:
    group.start()
    say(ready=True)
    os._exit(9)


def exit_of_the_starting_thread(group: WorkerGroup) -> None:
    thread = threading.Thread(target=group.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    say(answers=group.call(Echo(value=1), 5))
    group.close()


def answer_and_close(group: WorkerGroup) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    group.start()
    say(answers=group.call(Ask(what="name"), 10), method=group.start_method.name)
    report = group.close()
    say(ended_by=[w.ended_by for w in report.workers], exits=[w.exit_code for w in report.workers])
    say(same_descriptors=sorted(os.listdir("/proc/self/fd")) == before)


def kill_a_worker(group: WorkerGroup) -> None:
    group.start()
    try:
        group.call(Misbehave(fault="kill", rank=1), 10)
    except LlmrtError as error:
        say(error=type(error).__name__, signal=getattr(error, "signal", None))
    group.close()


def measure_patience(group: WorkerGroup) -> None:
    group.start()
    call = group.submit(Misbehave(fault="hang"))
    say(ready=True)
    started_at = time.monotonic()
    try:
        group.wait(call, 1.0)
    except LlmrtError as error:
        say(error=type(error).__name__, seconds=time.monotonic() - started_at)
    group.close()


def start_and_say_error(group: WorkerGroup) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        group.start()
    except LlmrtError as error:
        say(error=type(error).__name__, message=str(error))
    group.close()
    say(same_descriptors=sorted(os.listdir("/proc/self/fd")) == before)


def run_a_pool_first(group: WorkerGroup) -> None:
    start_openmp_pool()
    answer_and_close(group)
    say(history=FORK_HISTORY.why_not())


def start_openmp_pool() -> None:
    import ctypes
    from importlib.util import find_spec
    from pathlib import Path

    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (path,) = Path(torch.origin).parent.glob("lib/libgomp*.so*")
    runtime = ctypes.CDLL(str(path))
    runtime.GOMP_parallel(ctypes.CDLL(None).getpid, None, 2, 0)
    num_threads = len(os.listdir("/proc/self/task"))
    say(pool=num_threads)


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("ignore_sigchld"):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if options.get("max_files"):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (options["max_files"],) * 2)
    if options.get("break_release"):
        from llmrt.runtime import openmp

        openmp.released_pools = contextlib.nullcontext  # type: ignore[assignment]
    if options.get("out"):
        global _OUT
        _OUT = os.open(options["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(options.get("num_busy_threads", 0)):
        threading.Thread(target=wait_for_ever, daemon=True).start()
    scenario = globals()[options["then"]]
    if options.get("in_a_pool"):
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(_in_pool, (options,))
        return
    scenario(new_group(options))


def _in_pool(options: dict[str, Any]) -> None:
    try:
        globals()[options["then"]](new_group(options))
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
