"""The beginning of a user's program that opens an engine wherever it happens to run.

Its text is what the hosts are given, as a file, typed or piped: it may use nothing of the tests.
`use` asks everything of an open engine, `finish` writes what was seen as one line of JSON, with
what the engine left in this process.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable

import psutil

from llmrt import Engine, SamplingParams

MODEL = os.environ["HOSTS_MODEL"]
TYPED_HERE = "known in the user's program alone"


def things_of_this_process() -> Counter:
    """Count what an engine could leave behind."""
    things = Counter(f"process {p.pid}" for p in psutil.Process().children(recursive=True))
    things.update(["a native thread"] * len(os.listdir("/proc/self/task")))
    things.update(kinds_of_descriptors())
    return things


def kinds_of_descriptors() -> list:
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        # An eventfd is none of ours: ipykernel keeps one for every thread that printed.
        if target.startswith(("anon_inode:[eventpoll]", "anon_inode:[pidfd]", "/memfd:llmrt")):
            kinds.append(target)
        elif target.startswith(("socket:", "pipe:")):
            kinds.append(target.partition("[")[0])
    return kinds


def use(llm: Engine, function: Callable) -> dict:
    """Ask an open engine for an answer and for what the function finds in its workers."""
    answer = llm.generate("a", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    return {
        "tokens": answer.token_ids,
        "returned": llm.collective_rpc(function),
        "method": llm.start_method.name,
        "reason": llm.start_method.reason,
        "pids": [worker.pid for worker in llm.workers],
    }


def finish(facts: dict) -> None:
    """Write what was seen, after the engine was closed."""
    deadline = time.monotonic() + 3.0
    while (left := things_of_this_process() - BEFORE) and time.monotonic() < deadline:
        time.sleep(0.02)
    facts["left"] = sorted(left)
    facts["torch came"] = "torch" in sys.modules and not HAD_TORCH
    with open(os.environ["HOSTS_FACTS"], "a") as file:
        file.write(json.dumps(facts) + "\n")


BEFORE = things_of_this_process()
HAD_TORCH = "torch" in sys.modules
