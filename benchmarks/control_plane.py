"""What a step costs beside the model: scheduler, messages, channel and worker loop.

    python -m benchmarks.control_plane [--tp 1,2,4,8] [--sequences 1,32,256,1000] [--waiting 0]

The workers are real processes that answer at once. One line of JSON for each combination: the
median and best of several rounds, in microseconds per step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from llmrt.config import Timeouts
from llmrt.messages import Batch, BatchResult, Execute
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.launchers.mp import MpLauncher
from llmrt.runtime.rank_view import PendingCall
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.worker_group import WorkerGroup
from llmrt.sampling import SamplingParams
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.scheduler.loop import StepLoop
from llmrt.scheduler.request import Request
from llmrt.scheduler.scheduler import Scheduler

NUM_ROUNDS = 7
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 100_000


class GroupSteps:
    """Runs steps on a worker group, as a session does."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def start(self, batch: Batch) -> PendingCall:
        return self._group.submit(Execute(batch=batch))

    def finish(self, handle: PendingCall) -> BatchResult:
        return cast("BatchResult", self._group.wait(handle, 60.0)[0])


@contextmanager
def instant_workers(tp: int) -> Iterator[WorkerGroup]:
    spec = GroupSpec(
        entry="benchmarks.instant_worker:InstantWorker",
        configs=(None,) * tp,
        start_method=StartMethod(name="spawn", reason="a benchmark"),
    )
    group = WorkerGroup(
        spec, MpLauncher(), Timeouts(), on_output=lambda _: None, on_phase=lambda *_: None
    )
    group.start()
    try:
        yield group
    finally:
        group.close(10.0)


def make_scheduler(num_sequences: int, num_waiting: int) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=num_sequences * 128,
        block_size=16,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, num_sequences),
        max_model_len=200_000,
        prefix_caching=True,
    )
    scheduler = Scheduler(config)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for i in range(num_sequences + num_waiting):
        prompt = tuple((i * 7_919 + j * 104_729) % 40_000 for j in range(PROMPT_TOKENS))
        scheduler.add(
            Request(
                request_id=str(i), prompt_token_ids=prompt, params=params, seed=0, eos_token_ids=()
            )
        )
    return scheduler


def measure(group: WorkerGroup, num_sequences: int, num_waiting: int) -> list[float]:
    scheduler = make_scheduler(num_sequences, num_waiting)
    loop = StepLoop(scheduler, GroupSteps(group), lambda updates: None)
    while scheduler.stats().num_running < num_sequences:
        loop.run_once()
    for _ in range(5):
        loop.run_once()
    num_steps = 200 if num_sequences <= 32 else 20
    rounds: list[float] = []
    for _ in range(NUM_ROUNDS):
        started = time.perf_counter()
        for _ in range(num_steps):
            loop.run_once()
        rounds.append((time.perf_counter() - started) / num_steps * 1e6)
    for i in range(num_sequences + num_waiting):
        scheduler.abort(str(i))
    loop.drain()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tp", default="1,2,4,8")
    parser.add_argument("--sequences", default="1,32,256,1000")
    parser.add_argument("--waiting", type=int, default=0, help="more requests, in the queue")
    options = parser.parse_args()
    for tp in map(int, options.tp.split(",")):
        with instant_workers(tp) as group:
            for num_sequences in map(int, options.sequences.split(",")):
                rounds = measure(group, num_sequences, options.waiting)
                line = {
                    "tp": tp,
                    "sequences": num_sequences,
                    "waiting": options.waiting,
                    "best_us": round(min(rounds), 1),
                    "median_us": round(statistics.median(rounds), 1),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
