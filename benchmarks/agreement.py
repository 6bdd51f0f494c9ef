"""How often greedy answers in bfloat16 agree: llmrt, transformers, and transformers in float32.

    python -m benchmarks.agreement MODEL_DIRECTORY [--tp 1] [--num-prompts 50] [--num-tokens 32]

Prompts are pieces of this repository's licence. One line of JSON for each pair: answers that are
the same to the end, and tokens before the first that differs, of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile
from operator import eq
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from llmrt import Engine, SamplingParams

TEXT = Path(__file__).parents[1] / "LICENSE"
PROMPT_TOKENS = 32
Answers = Sequence[Sequence[int]]


def prompts_of(llm: Engine, num_prompts: int) -> list[list[int]]:
    ids = llm.tokenizer.encode(TEXT.read_text())
    stride = (len(ids) - PROMPT_TOKENS) // num_prompts
    return [ids[i * stride : i * stride + PROMPT_TOKENS] for i in range(num_prompts)]


def by_transformers(model: str, dtype: torch.dtype, prompts: Answers, num_tokens: int) -> Answers:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    answers = []
    for prompt in prompts:
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def agreement(a: Answers, b: Answers) -> dict[str, object]:
    lengths = [sum(takewhile(bool, map(eq, x, y))) for x, y in zip(a, b, strict=True)]
    num_same = sum(x == y for x, y in zip(a, b, strict=True))
    return {"answers": f"{num_same}/{len(a)}", "tokens": f"{sum(lengths)}/{sum(map(len, a))}"}


def lines(named: dict[str, Answers]) -> Iterator[dict[str, object]]:
    for (name, answers), (other_name, others) in combinations(named.items(), 2):
        yield {"between": f"{name} and {other_name}"} | agreement(answers, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", metavar="MODEL_DIRECTORY")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--num-tokens", type=int, default=32)
    options = parser.parse_args()
    greedy = SamplingParams(temperature=0, max_tokens=options.num_tokens)
    with Engine(options.model, tp=options.tp, dtype="bfloat16", progress=False) as llm:
        prompts = prompts_of(llm, options.num_prompts)
        ours = [list(output.token_ids) for output in llm.generate(prompts, greedy)]
    num_tokens = options.num_tokens
    named = {
        "llmrt bfloat16": ours,
        "transformers bfloat16": by_transformers(
            options.model, torch.bfloat16, prompts, num_tokens
        ),
        "transformers float32": by_transformers(options.model, torch.float32, prompts, num_tokens),
    }
    for line in lines(named):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
