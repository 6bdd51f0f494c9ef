"""How long it takes until an engine is up, down, or gone, whatever happens to it.

    python -m benchmarks.lifecycle_times [MODEL] [--tp 2] [--repeat 5]

One line of JSON: seconds, the median of the repeats. Everything is measured from the moment of the
event: the call, the signal, the key.

    open_s, close_s, reopen_s                 the verbs; reopen is the same object once more
    owner_killed_s, owner_killed_in_start_s   SIGKILL of the user's process -> no process is left
    worker_killed_s                           SIGKILL of a rank in a step -> WorkerDiedError
    interrupted_s, interrupted_in_start_s     Ctrl-C in generate(), in open() -> KeyboardInterrupt
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llmrt import Engine, SamplingParams, WorkerDiedError

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = ["The capital of France is"] * 8
LONGEST_SECONDS = 60.0

OWNER = """
import json, sys, threading
from llmrt import Engine, SamplingParams
model, tp, is_to_serve = json.loads(sys.argv[1])
llm = Engine(model, tp=tp, progress=False)
def run():
    with llm:
        while True:
            llm.generate(["The capital of France is"] * 8, SamplingParams(
                temperature=0, max_tokens=400, ignore_eos=True))
threading.Thread(target=run, daemon=True).start()
def is_there():
    if is_to_serve:
        return llm.is_healthy() and llm.stats().num_generated_tokens > 0
    return any(entry.phase == "importing" for entry in llm.timeline)
while not is_there():
    threading.Event().wait(0.01)
print("ready", flush=True)
threading.Event().wait()
"""


def wait_until(condition: Callable[[], object]) -> float:
    """Wait for something that happens elsewhere; return when it did."""
    deadline = time.perf_counter() + LONGEST_SECONDS
    while not condition():
        assert time.perf_counter() < deadline, "it did not happen"
        time.sleep(0.0005)
    return time.perf_counter()


def parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of every process."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = int(fields[1]), fields[0]
    return found


def descendants(pid: int) -> set[int]:
    """Return all processes under one."""
    found, all_parents = {pid}, parents()
    while new := {p for p, (parent, _) in all_parents.items() if parent in found} - found:
        found |= new
    return found - {pid}


def is_gone(pids: set[int]) -> bool:
    """Return whether every one of some processes has ended."""
    states = parents()
    return not any(pid in states and states[pid][1] not in "ZX" for pid in pids)


# ---- what is measured ----


def verbs(llm: Engine) -> tuple[float, float, float]:
    """Return the seconds that open, close and the next open take."""
    times = [time.perf_counter()]
    for step in (llm.open, llm.close, llm.open):
        step()
        times.append(time.perf_counter())
    llm.close()
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def owner_killed(model: str | None, tp: int, *, serving: bool) -> float:
    """Return how long the engine of a killed process outlives it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, json.dumps([model, tp, serving])], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    pids = descendants(owner.pid)
    assert pids
    owner.kill()
    killed_at = time.perf_counter()
    seconds = wait_until(lambda: is_gone(pids)) - killed_at
    owner.wait()
    owner.stdout.close()
    return seconds


def worker_killed(llm: Engine) -> float:
    """Return how long a caller waits for word of a worker's death."""
    with llm:
        future = llm.submit(PROMPTS[0], ENDLESS)
        wait_until(lambda: llm.stats().num_generated_tokens)
        os.kill(llm.workers[-1].pid, signal.SIGKILL)
        killed_at = time.perf_counter()
        assert isinstance(future.exception(LONGEST_SECONDS), WorkerDiedError)
        return time.perf_counter() - killed_at


def interrupted(work: Callable[[], object], when: Callable[[], object]) -> float:
    """Return how long Ctrl-C takes to give control back to this thread."""
    pressed_at: list[float] = []

    def press() -> None:
        wait_until(when)
        pressed_at.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    try:
        thread.start()
        work()
        threading.Event().wait(LONGEST_SECONDS)
    except KeyboardInterrupt:
        back_at = time.perf_counter()
    else:
        raise AssertionError("nothing was interrupted")
    thread.join()
    return back_at - pressed_at[0]


def interrupted_in_use(llm: Engine) -> float:
    """Return how long Ctrl-C takes to get out of a generate()."""
    with llm:
        return interrupted(
            lambda: llm.generate(PROMPTS, ENDLESS), lambda: llm.stats().num_generated_tokens
        )


def interrupted_in_start(model: str | None, tp: int) -> float:
    """Return how long Ctrl-C takes to get out of an open()."""
    llm = Engine(model, tp=tp, progress=False)
    return interrupted(llm.open, lambda: any(e.phase == "importing" for e in llm.timeline))


def measure(model: str | None, tp: int) -> dict[str, float]:
    """Measure everything once."""
    llm = Engine(model, tp=tp, progress=False)
    opening, closing, reopening = verbs(llm)
    return {
        "open_s": opening,
        "close_s": closing,
        "reopen_s": reopening,
        "owner_killed_s": owner_killed(model, tp, serving=True),
        "owner_killed_in_start_s": owner_killed(model, tp, serving=False),
        "worker_killed_s": worker_killed(llm),
        "interrupted_s": interrupted_in_use(llm),
        "interrupted_in_start_s": interrupted_in_start(model, tp),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    Engine(options.model, tp=options.tp, progress=False).open().close()  # the disk cache is warm
    runs = [measure(options.model, options.tp) for _ in range(options.repeat)]
    medians = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    print(json.dumps({"model": options.model, "tp": options.tp, **medians}), flush=True)


if __name__ == "__main__":
    main()
