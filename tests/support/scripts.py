"""Models that say what a test wants: a tiny engine whose logits follow a script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmrt import SamplingParams

EOS = 1
"""The id of `<|end|>` in the tiny model's tokenizer."""


def follow(token_ids: Sequence[int]) -> Callable[..., Any]:
    """Return a logits processor that makes the model say these ids, then the last one for ever."""
    script = list(token_ids)

    def force(output_ids: list[int], logits_V: Any) -> Any:
        forced_V = logits_V.new_full(logits_V.shape, -1e4)
        forced_V[script[min(len(output_ids), len(script) - 1)]] = 0.0
        return forced_V

    return force


def saying(token_ids: Sequence[int], **params: Any) -> SamplingParams:
    """Return greedy parameters under which the model says these ids."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": len(token_ids), **params}
    return SamplingParams(logits_processors=[follow(token_ids)], **options)


def copy_model(model: Path, directory: Path, **files: dict[str, Any]) -> Path:
    """Copy a model and merge these values into its JSON files; return the copy's directory."""
    shutil.copytree(model, directory)
    for name, changes in files.items():
        path = directory / f"{name}.json"
        old = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**old, **changes}))
    return directory
