"""What transformers makes of token ids, in a process of its own: the reference for our tokens.

    echo '{"texts": [[1, 2, 3]], "starts": [1]}' | python -m tests.support.reference MODEL float32

MODEL is a directory or a GGUF file. Prints, per text, by how much each token from the start on
misses the best logit; without starts, the log-probabilities of all tokens at every position.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def greedy_shortfalls(
    model: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    dtype: str = "float32",
) -> list[list[float]]:
    """Return, per answer and token, the best logit at its place minus its own: 0 if greedy."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return _ask(model, dtype, {"texts": texts, "starts": [len(p) for p in prompts]})


def logprobs_reference(
    model: Path, texts: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[list[list[float]]]:
    """Return, per text and position, the log-probability of every token that could come next."""
    return _ask(model, dtype, {"texts": [list(t) for t in texts]})


def _ask(model: Path, dtype: str, asked: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.reference", str(model), dtype],
        cwd=Path(__file__).parents[2],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout)


def load(path: Path, dtype: str) -> Any:
    """Load a model with transformers; a GGUF file is dequantised."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if path.is_file():
        options |= {
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
        path = path.parent
    return AutoModelForCausalLM.from_pretrained(str(path), **options).eval()


def shortfalls(logits_TV: Any, ids: list[int], start: int) -> list[float]:
    """Return by how much each token from *start* on misses the best."""
    import torch

    rows = logits_TV[start - 1 : -1].float()
    chosen = rows.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
    return (rows.amax(dim=1) - chosen).tolist()


def main() -> None:
    """Answer what is asked on stdin."""
    import torch

    asked = json.load(sys.stdin)
    model = load(Path(sys.argv[1]), sys.argv[2])
    with torch.inference_mode():
        # One after the other: the logits of all texts would be hundreds of megabytes.
        texts = ((ids, model(torch.tensor([ids])).logits[0]) for ids in asked["texts"])
        if "starts" in asked:
            starts = asked["starts"]
            answers = [shortfalls(x, i, n) for (i, x), n in zip(texts, starts, strict=True)]
        else:
            answers = [logits_TV.log_softmax(-1).tolist() for _, logits_TV in texts]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
