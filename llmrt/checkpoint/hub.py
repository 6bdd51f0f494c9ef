"""A model by its hub id, through huggingface_hub.

That library starts native threads which stay, so it runs in a subprocess. Run as a module, this
file is that subprocess: it prints one JSON object, with the snapshot's folder or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.checkpoint.directory import open_directory
from llmrt.checkpoint.subprocesses import run_module
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError

STALL_SECONDS = 6 * 3600.0
"""The library has its own time-outs and retries; this only ends what they miss."""
FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.*",
    "additional_chat_templates/*",
)


def open_hub_model(model: str, progress: Progress) -> Checkpoint:
    """Return the model with this hub id, downloading what is not in the hub's cache.

    HF_HUB_OFFLINE, HF_HOME, HF_TOKEN and HF_ENDPOINT mean what they mean to that library.

    Raises:
        ConfigError: the hub does not give it, or it lacks what llmrt needs.
    """
    progress.phase(f"fetching {model} from the hub")
    finished = run_module(
        __name__,
        [model],
        env={} if progress.on_terminal else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stall_seconds=STALL_SECONDS,
        show_errors=progress.on_terminal,
    )
    if finished.exit_code != 0 or not finished.output.strip():
        raise _unavailable(model, finished.last_error_line)
    answer: dict[str, str] = json.loads(finished.output.splitlines()[-1])
    if "error" in answer:
        raise _unavailable(model, answer["error"])
    return open_directory(Path(answer["folder"]), name=model)


def _unavailable(model: str, reason: str) -> ConfigError:
    return ConfigError(
        f"Model {model!r} is no file or directory here, and the hub did not give it: {reason} "
        "Check the name; for a private or gated model set HF_TOKEN; for a local one give its path."
    )


def _download(model: str) -> dict[str, str]:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return {"folder": snapshot_download(model, allow_patterns=list(FILES))}
    except Exception as error:  # whatever it is, it crosses to the other process as text
        lines = str(error).split("\n")
        return {"error": f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}"}


if __name__ == "__main__":
    print(json.dumps(_download(sys.argv[1])))
