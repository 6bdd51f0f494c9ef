"""Run two systems in turn, A B A B, and print how many times as fast A is: ratios of medians.

    python -m benchmarks.compare --rounds 3 \\
        --a "llmrt bench MODEL --json --tp 2 --threads 1 --repeat 1" \\
        --b "PYTHON peers.py vllm MODEL --repeat 1"

Each command prints a line of JSON for the start, each workload and the end, as `llmrt bench --json`
does. Compare on a machine that does nothing else. `--table` prints rows for docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

SECONDS = ("median_s", "first_token_s", "close_s")
"""What is compared of a line: the first of these that it has."""

Samples = dict[str, list[float]]
"""By workload: the seconds of each round."""


def run(command: str, timeout: float) -> Iterator[tuple[str, float]]:
    done = subprocess.run(
        shlex.split(command), stdout=subprocess.PIPE, text=True, timeout=timeout, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield from _seconds(json.loads(line))


def _seconds(line: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name in SECONDS:
        value = line.get(name)
        if isinstance(value, (int, float)):
            yield str(line["workload"]), float(value)
            return


def alternate(commands: Sequence[str], rounds: int, timeout: float) -> list[Samples]:
    """Run every command once a round, each round in the same order; return what each took."""
    samples: list[Samples] = [{} for _ in commands]
    for number in range(rounds):
        for taken, command in zip(samples, commands, strict=True):
            print(f"round {number + 1} of {rounds}: {command}", file=sys.stderr, flush=True)
            for workload, seconds in run(command, timeout):
                taken.setdefault(workload, []).append(seconds)
    return samples


def compare(a: Samples, b: Samples) -> Iterator[dict[str, object]]:
    """Yield a line for every workload that both ran; a ratio above 1 says that A is faster."""
    for workload in a:
        if workload in b:
            a_s, b_s = statistics.median(a[workload]), statistics.median(b[workload])
            yield {
                "workload": workload,
                "a_s": round(a_s, 3),
                "b_s": round(b_s, 3),
                "ratio": round(b_s / a_s, 2) if a_s else None,
                "rounds": len(a[workload]),
            }


def as_row(line: Mapping[str, object]) -> str:
    return "| {workload} | {a_s} | {b_s} | {ratio} |".format(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--a", required=True, help="a command")
    parser.add_argument("--b", required=True, help="another one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one command")
    parser.add_argument("--table", action="store_true", help="print rows of a Markdown table")
    options = parser.parse_args()
    a, b = alternate((options.a, options.b), options.rounds, options.timeout)
    if options.table:
        print("| workload | A, seconds | B, seconds | B / A |\n|---|---|---|---|")
    for line in compare(a, b):
        print(as_row(line) if options.table else json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
