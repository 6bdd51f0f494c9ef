"""What Ray costs: to open, to close, and for each step, beside mp and beside Ray's own calls.

    python -m benchmarks.ray_backend [MODEL] [--tp 2] [--repeat 3]

Starts a Ray of its own. One line of JSON for each thing measured: seconds for opening and closing
(medians; actors of Ray are started afresh each time), microseconds for one round trip.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray

from llmrt import Engine
from llmrt.config import Timeouts
from llmrt.messages import Batch, Execute
from llmrt.runtime.launchers.base import GroupSpec, Launcher
from llmrt.runtime.launchers.mp import MpLauncher
from llmrt.runtime.launchers.ray import RayLauncher
from llmrt.runtime.ray_crew import RayRequest
from llmrt.runtime.start_method import StartMethod
from llmrt.runtime.worker_group import WorkerGroup

NUM_TRIPS = 2000


class Echo:
    """An actor that answers at once."""

    def call(self, value: object) -> object:
        return value


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def microseconds(trip: Callable[[], object]) -> float:
    for _ in range(NUM_TRIPS // 10):
        trip()
    times = []
    for _ in range(NUM_TRIPS):
        started = time.perf_counter()
        trip()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


def measure_engine(model: str | None, tp: int, backend: str, repeat: int) -> None:
    opening, closing = [], []
    for _ in range(repeat):
        started = time.perf_counter()
        llm = Engine(model, tp=tp, backend=backend, progress=False).open()
        opening.append(time.perf_counter() - started)
        closing.append(llm.close().seconds)
    say(
        backend=backend,
        tp=tp,
        open_s=round(statistics.median(opening), 3),
        close_s=round(statistics.median(closing), 3),
    )


def measure_step(launcher: Launcher, tp: int) -> None:
    spec = GroupSpec(
        entry="benchmarks.instant_worker:InstantWorker",
        configs=(None,) * tp,
        start_method=StartMethod(name="spawn", reason="a benchmark"),
    )
    group = WorkerGroup(
        spec, launcher, Timeouts(), on_output=lambda _: None, on_phase=lambda *_: None
    )
    group.start()
    try:
        batch = Execute(batch=Batch(step=0))
        say(backend=launcher.name, tp=tp, step_us=microseconds(lambda: group.call(batch, 60.0)))
    finally:
        group.close(10.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    ray.init(num_cpus=options.tp + 1, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(Echo).remote()
    say(ray_actor_call_us=microseconds(lambda: ray.get(actor.call.remote(1))))
    ray.kill(actor)
    for launcher in (MpLauncher(), RayLauncher(RayRequest(group=None))):
        measure_step(launcher, options.tp)
    for backend in ("mp", "ray"):
        measure_engine(options.model, options.tp, backend, options.repeat)


if __name__ == "__main__":
    main()
