"""Greedy decoding by transformers, in a process of its own: the reference for our tokens.

    echo '{"prompts": [[1, 2]], "num_tokens": 8}' | python -m tests.support.reference MODEL float32

MODEL is a directory or a GGUF file. Prints, per prompt, the ids and how far apart the two best
logits were at each step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers generates for one prompt."""

    token_ids: list[int]
    gaps: list[float]
    """By step: the best logit minus the second best."""

    def first_difference(self, token_ids: Sequence[int], min_gap: float) -> int | None:
        """Return where *token_ids* differ although the reference had no near-tie; None if nowhere.

        After a difference at a near-tie the texts part, and there is nothing more to compare.
        """
        for i, (expected, got) in enumerate(zip(self.token_ids, token_ids, strict=True)):
            if expected != got:
                return i if self.gaps[i] > min_gap else None
        return None


def greedy_reference(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int, dtype: str = "float32"
) -> list[Reference]:
    """Return what transformers generates greedily, EOS ignored."""
    asked = json.dumps({"prompts": [list(p) for p in prompts], "num_tokens": num_tokens})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.reference", str(model), dtype],
        cwd=Path(__file__).parents[2],
        input=asked,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return [Reference(**r) for r in json.loads(done.stdout)]


def logprobs_reference(
    model: Path, texts: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[list[list[float]]]:
    """Return, per text and position, the log-probability of every token that could come next."""
    asked = json.dumps({"texts": [list(t) for t in texts]})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.reference", str(model), dtype],
        cwd=Path(__file__).parents[2],
        input=asked,
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


def decode(model: Any, prompt: list[int], num_tokens: int) -> dict[str, list[Any]]:
    """Decode greedily, noting the gap between the two best logits of each step."""
    import torch

    ids, past = torch.tensor([prompt]), None
    token_ids: list[int] = []
    gaps: list[float] = []
    for _ in range(num_tokens):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        best = out.logits[0, -1].float().topk(2)
        token_ids.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids, past = best.indices[:1].view(1, 1), out.past_key_values
    return {"token_ids": token_ids, "gaps": gaps}


def main() -> None:
    """Answer what is asked on stdin."""
    import torch

    asked = json.load(sys.stdin)
    model = load(Path(sys.argv[1]), sys.argv[2])
    with torch.inference_mode():
        if "texts" in asked:
            texts = [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in asked["texts"]]
            json.dump([text.tolist() for text in texts], sys.stdout)
            return
        answers = [decode(model, prompt, asked["num_tokens"]) for prompt in asked["prompts"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
