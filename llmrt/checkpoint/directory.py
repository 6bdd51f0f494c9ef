"""A model in a local directory, in the layout of transformers' save_pretrained."""

from __future__ import annotations

from pathlib import Path

from llmrt.checkpoint.checkpoint import Checkpoint, read_checkpoint
from llmrt.errors import ConfigError


def open_directory(directory: Path, *, name: str) -> Checkpoint:
    """Return the model in *directory*, which must hold a config.json and safetensors files.

    Raises:
        ConfigError: something it needs is missing; the message says what and what to do.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json{_advice_without_config(directory)}")
    if not any(directory.glob("*.safetensors*")):
        raise ConfigError(f"{directory} {_lack_of_weights(directory)}")
    if not (directory / "tokenizer.json").is_file() and (directory / "tokenizer.model").is_file():
        raise ConfigError(
            f"{directory} has only tokenizer.model, not the tokenizer.json that llmrt reads. "
            "Write one, with transformers and sentencepiece: "
            f"`{_resave('AutoTokenizer', directory)}`."
        )
    return read_checkpoint(directory, name=name, weights=str(directory))


def _advice_without_config(directory: Path) -> str:
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    if ggufs:
        return f", only GGUF files. Give the path of one of them: {str(directory / ggufs[0])!r}."
    return (
        ". Give a directory written by transformers' save_pretrained, a GGUF file, or a hub id "
        "such as 'HuggingFaceTB/SmolLM2-135M-Instruct'."
    )


def _lack_of_weights(directory: Path) -> str:
    bins = sorted(path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pth")))
    if bins:
        return (
            f"has its weights only as {bins[0]}, a pickle, which llmrt does not load. Write "
            f"safetensors, with transformers: `{_resave('AutoModelForCausalLM', directory)}`."
        )
    return "has no weights: no *.safetensors file. Fetch the whole model again."


def _resave(class_name: str, directory: Path) -> str:
    path = repr(str(directory))
    return f"{class_name}.from_pretrained({path}).save_pretrained({path})"
