"""Runs workloads on an engine and times them; greedy and to the last token, whatever it says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmrt.bench.workloads import Workload
from llmrt.sampling import SamplingParams

if TYPE_CHECKING:
    from llmrt.engine import Engine

Line = dict[str, Any]
"""What is said of the start, a workload or the end: plain data for json."""


def run_workloads(
    open_engine: Callable[[], Engine], workloads: Sequence[Workload], *, repeat: int, tp: int
) -> Iterator[Line]:
    """Yield a line for the start, one for each workload and one for the end.

    Each workload runs once unmeasured, then *repeat* times, each time with new prompts.
    """
    started = time.perf_counter()
    with open_engine() as llm:
        ready = time.perf_counter() - started
        _generate(llm, [([1, 2, 3], 2)])
        first = time.perf_counter() - started
        yield _line("start", tp, ready_s=round(ready, 2), first_token_s=round(first, 2))
        for workload in workloads:
            yield _line(workload.name, tp, **_measure(llm, workload, repeat))
        closing = time.perf_counter()
        llm.close()
        yield _line("close", tp, close_s=round(time.perf_counter() - closing, 3))


def as_text(line: Line) -> str:
    """Return a line for a reader."""
    numbers = {k: v for k, v in line.items() if k not in ("system", "tp", "workload")}
    return f"{line['workload']:14}" + "".join(f"  {k} {v:<10}" for k, v in numbers.items()).rstrip()


def _line(workload: str, tp: int, **numbers: float) -> Line:
    return {"system": "llmrt", "tp": tp, "workload": workload, **numbers}


def _measure(llm: Engine, workload: Workload, repeat: int) -> dict[str, float]:
    _generate(llm, workload.prompts(salt=0))
    seconds: list[float] = []
    num_prompt = num_output = 0
    for salt in range(1, repeat + 1):
        requests = workload.prompts(salt)
        started = time.perf_counter()
        num_output = _generate(llm, requests)
        seconds.append(time.perf_counter() - started)
        num_prompt = sum(len(prompt) for prompt, _ in requests)
    best = min(seconds)
    return {
        "best_s": round(best, 3),
        "median_s": round(statistics.median(seconds), 3),
        "out_tok_s": round(num_output / best, 1),
        "total_tok_s": round((num_prompt + num_output) / best, 1),
    }


def _generate(llm: Engine, requests: Sequence[tuple[list[int], int]]) -> int:
    """Run these requests together; return how many tokens came out."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    return sum(len(output.token_ids) for output in outputs)
