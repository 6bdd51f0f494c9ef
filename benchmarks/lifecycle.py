"""How long an engine takes to open, to say its first token, to close, and to open again.

    python -m benchmarks.lifecycle [MODEL] [--tp 1,4] [--methods spawn,fork] [--repeat 3]

One line of JSON for each number of ranks and way of starting; seconds, the median of the repeats.
The first opening reads the weights from disk and is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from llmrt import Engine, SamplingParams

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def once(model: str | None, tp: int, method: str) -> tuple[float, float, float]:
    started = time.perf_counter()
    llm = Engine(model, tp=tp, start_method=method, progress=False)  # type: ignore[arg-type]
    llm.open()
    opened = time.perf_counter()
    llm.generate([[1, 2, 3]], ONE_TOKEN)
    answered = time.perf_counter()
    llm.close()
    return opened - started, answered - started, time.perf_counter() - answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tp", default="1,4")
    parser.add_argument("--methods", default="spawn,fork")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for method in options.methods.split(","):
        for tp in map(int, options.tp.split(",")):
            once(options.model, tp, method)
            runs = [once(options.model, tp, method) for _ in range(options.repeat)]
            opening, first_token, closing = (statistics.median(r) for r in zip(*runs, strict=True))
            line = {
                "start_method": method,
                "tp": tp,
                "open_s": round(opening, 3),
                "first_token_s": round(first_token, 3),
                "close_s": round(closing, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
