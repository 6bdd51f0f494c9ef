"""Run a small evaluation with lm-evaluation-harness, on llmrt or on transformers; a program.

    python -m tests.support.evaluate MODEL llmrt|transformers TASKS.json MAX_LENGTH

TASKS.json holds `choices` (question, choices, answer), `texts` and `prompts` (prompt, answer).
MAX_LENGTH is the window of transformers; llmrt's is the model's length less one.
Prints the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def tasks_of(data: dict[str, Any]) -> list[Any]:
    """Return one task of each kind of request that the harness makes."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    def task(name: str, rows: list[dict[str, Any]], **config: Any) -> Any:
        split = datasets.Dataset.from_list(rows)
        return ConfigurableTask(
            config={
                "task": name,
                "custom_dataset": lambda **_: {"test": split},
                "test_split": "test",
                "num_fewshot": 0,
                **config,
            }
        )

    def metrics(*names: str) -> list[dict[str, Any]]:
        return [{"metric": name} for name in names]

    return [
        task(
            "choices",
            data["choices"],
            output_type="multiple_choice",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            metric_list=metrics("acc", "acc_norm"),
        ),
        task(
            "texts",
            [{"text": text} for text in data["texts"]],
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=metrics("word_perplexity", "byte_perplexity"),
        ),
        task(
            "prompts",
            [{"prompt": p, "answer": a} for p, a in data["prompts"]],
            output_type="generate_until",
            doc_to_text="{{prompt}}",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
            metric_list=metrics("exact_match"),
        ),
    ]


def evaluate(model: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics by task, and every answer that was generated or scored."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks_of(data), bootstrap_iters=0, log_samples=True
    )
    return {
        "results": {
            task: {k.split(",")[0]: v for k, v in values.items() if isinstance(v, float)}
            for task, values in found["results"].items()
        },
        "answers": {
            task: [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]
            for task, samples in found["samples"].items()
        },
    }


def main() -> None:
    """Evaluate the model given with the backend given."""
    model, backend, data = sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    if backend == "llmrt":
        from llmrt import Engine
        from llmrt.integrations.lm_eval import LlmrtLM

        with Engine(model, dtype="float32") as llm:
            results = evaluate(LlmrtLM(llm), data)
    else:
        from lm_eval.models.huggingface import HFLM

        options = {"dtype": "float32", "device": "cpu", "max_length": int(sys.argv[4])}
        results = evaluate(HFLM(pretrained=model, **options), data)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
