"""open_weights: the reader that a checkpoint's format needs."""

from __future__ import annotations

from pathlib import Path

from llmrt.config import ReportProgress, WorkerConfig
from llmrt.worker.weights.gguf_reader import open_gguf
from llmrt.worker.weights.reader import WeightReader
from llmrt.worker.weights.safetensors_reader import open_safetensors


def open_weights(config: WorkerConfig, report: ReportProgress) -> WeightReader:
    """Open the checkpoint that *config* names and check that its files are whole.

    Only headers are read: the files are mapped, and a page is touched when a tensor is copied.

    Args:
        config: names the weights, and for a GGUF file its tensor index.
        report: told how many bytes of tensors have been asked for, of how many.

    Raises:
        ConfigError: there are no weights, or they are incomplete, damaged, or of an unknown format.
    """
    if config.gguf_index is not None:
        return open_gguf(Path(config.weights), Path(config.gguf_index), report)
    return open_safetensors(Path(config.weights), report)
