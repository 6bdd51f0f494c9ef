"""How well a model in some form predicts a fixed text: exp of the mean negative log-probability.

    python -m benchmarks.perplexity [MODEL ...] [--dtypes bfloat16] [--quantizations none,int8,int4]

The text is this repository's licence, cut to chunks of 512 tokens. Only differences between forms
of one model mean something. One line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from llmrt import Engine, SamplingParams
from llmrt.outputs import RequestOutput

TEXT = Path(__file__).parents[1] / "LICENSE"
CHUNK_TOKENS = 512
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def perplexity(llm: Engine) -> float:
    ids = llm.tokenizer.encode(TEXT.read_text())
    chunks = [ids[i : i + CHUNK_TOKENS] for i in range(0, len(ids), CHUNK_TOKENS)]
    logprobs = [x for output in llm.generate(chunks, SCORED) for x in _logprobs(output)]
    return math.exp(-sum(logprobs) / len(logprobs))


def _logprobs(output: RequestOutput) -> Sequence[float]:
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs if entry is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--quantizations", default="none,int8,int4")
    options = parser.parse_args()
    for model in options.models or [None]:
        for dtype in options.dtypes.split(","):
            for name in options.quantizations.split(","):
                quantization = None if name == "none" else name
                with Engine(model, dtype=dtype, quantization=quantization, progress=False) as llm:
                    line = {
                        "model": model or "default",
                        "dtype": dtype,
                        "quantization": quantization,
                        "perplexity": round(perplexity(llm), 4),
                    }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
