"""Run the workloads of `llmrt bench` on another system; prints the same lines of JSON.

    python benchmarks/peers.py {vllm|hf|llamacpp} MODEL [--tp N] [--workloads a,b] [--threads N]
                               [--eager] [--repeat N]

MODEL is a directory (for llamacpp: a GGUF file). Each system has a virtual environment of its own,
without llmrt, so this file imports nothing of it. Greedy, EOS ignored: every system generates the
same number of tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

START = time.perf_counter()
TABLE = Path(__file__).parents[1] / "llmrt" / "bench" / "workloads.json"
Prompts = list[list[int]]


class System(Protocol):
    def run(self, prompts: Prompts, outputs: Sequence[int]) -> int:
        """Generate so many tokens for each prompt; return how many came out."""
        ...

    def close(self) -> None: ...


class Vllm:
    def __init__(self, options: argparse.Namespace) -> None:
        cores = f"0-{options.threads - 1}" if options.tp == 1 else "nobind"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
            os.environ[name] = "1"
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=options.model,
            tensor_parallel_size=options.tp,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=64,
            enforce_eager=options.eager,
            disable_log_stats=True,
        )

    def run(self, prompts: Prompts, outputs: Sequence[int]) -> int:
        params = [self.params(temperature=0, max_tokens=n, ignore_eos=True) for n in outputs]
        given = [{"prompt_token_ids": p} for p in prompts]
        results = self.llm.generate(given, params, use_tqdm=False)
        return sum(len(r.outputs[0].token_ids) for r in results)

    def close(self) -> None:
        del self.llm
        gc.collect()


class Hf:
    """transformers: one static batch for each kind of request."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)

    def run(self, prompts: Prompts, outputs: Sequence[int]) -> int:
        groups: dict[tuple[int, int], Prompts] = {}
        for prompt, num_output in zip(prompts, outputs, strict=True):
            groups.setdefault((len(prompt), num_output), []).append(prompt)
        with self.torch.inference_mode():
            return sum(self._generate(batch, n) for (_, n), batch in groups.items())

    def _generate(self, prompts: Prompts, num_output: int) -> int:
        ids = self.torch.tensor(prompts)
        out = self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
        )
        return (out.shape[1] - ids.shape[1]) * len(prompts)

    def close(self) -> None:
        del self.model
        gc.collect()


class LlamaCpp:
    """llama.cpp through its Python binding: one sequence at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        from llama_cpp import Llama

        self.llm = Llama(
            options.model,
            n_ctx=2048,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            n_batch=1024,
            verbose=False,
        )

    def run(self, prompts: Prompts, outputs: Sequence[int]) -> int:
        for prompt, num_output in zip(prompts, outputs, strict=True):
            self.llm.reset()
            self.llm.eval(prompt)
            for _ in range(num_output - 1):
                self.llm.eval([self.llm.sample(temp=0.0)])
        return sum(outputs)

    def close(self) -> None:
        self.llm.close()


def prompts_of(spec: Mapping[str, Any], salt: int) -> tuple[Prompts, list[int]]:
    """As `Workload.prompts` in llmrt/bench/workloads.py; a test compares the two."""
    shared = spec.get("shared_prefix", 0)
    head = [(salt * 15485863 + j * 104729) % 40000 + 100 for j in range(shared)]
    sizes = [(p, o) for count, p, o in spec["requests"] for _ in range(count)]
    prompts = [
        head
        + [
            (salt * 32452843 + i * 7919 + j * 104729 + 1) % 40000 + 100
            for j in range(length - shared)
        ]
        for i, (length, _) in enumerate(sizes)
    ]
    return prompts, [num_output for _, num_output in sizes]


def measure(system: System, spec: Mapping[str, Any], repeat: int) -> dict[str, float]:
    system.run(*prompts_of(spec, salt=0))
    seconds: list[float] = []
    num_prompt = num_output = 0
    for salt in range(1, repeat + 1):
        prompts, outputs = prompts_of(spec, salt)
        started = time.perf_counter()
        num_output = system.run(prompts, outputs)
        seconds.append(time.perf_counter() - started)
        num_prompt = sum(map(len, prompts))
    best = min(seconds)
    return {
        "best_s": round(best, 3),
        "median_s": round(statistics.median(seconds), 3),
        "out_tok_s": round(num_output / best, 1),
        "total_tok_s": round((num_prompt + num_output) / best, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["vllm", "hf", "llamacpp"])
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--workloads", default="")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()

    def say(workload: str, numbers: Mapping[str, float]) -> None:
        line = {"system": options.system, "tp": options.tp, "workload": workload, **numbers}
        print(json.dumps(line), flush=True)

    system: System = {"vllm": Vllm, "hf": Hf, "llamacpp": LlamaCpp}[options.system](options)
    ready = time.perf_counter() - START
    system.run([[1, 2, 3]], [2])
    first = time.perf_counter() - START
    say("start", {"ready_s": round(ready, 2), "first_token_s": round(first, 2)})
    table = json.loads(TABLE.read_text())
    for name in [w for w in options.workloads.split(",") if w] or table:
        say(name, measure(system, table[name], options.repeat))
    closing = time.perf_counter()
    system.close()
    say("close", {"close_s": round(time.perf_counter() - closing, 3)})


if __name__ == "__main__":
    main()
