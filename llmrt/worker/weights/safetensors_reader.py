"""SafetensorsReader: tensors of one or many safetensors files, mapped, read by rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmrt.config import ReportProgress
from llmrt.errors import ConfigError
from llmrt.worker.weights.read_record import ReadRecord
from llmrt.worker.weights.shards import find_shards, read_sizes


def open_safetensors(directory: Path, report: ReportProgress) -> SafetensorsReader:
    """Map every shard of the checkpoint in *directory*.

    Raises:
        ConfigError: a shard is missing, damaged or cut short, or does not hold what the index says.
    """
    sizes: dict[str, int] = {}
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for path, promised in find_shards(directory).items():
            shard_sizes = read_sizes(path)
            _check_shard(path, shard_sizes, promised, sizes)
            sizes.update(shard_sizes)
            files.update(dict.fromkeys(shard_sizes, stack.enter_context(_map(path))))
        record = ReadRecord(directory, sizes, report)
        return SafetensorsReader(record, files, stack.pop_all())


class SafetensorsReader:
    """Hands out views of the mapped files: only the pages of what is copied are ever read."""

    def __init__(self, record: ReadRecord, files: Mapping[str, Any], owned: ExitStack) -> None:
        """Take over opened files: by tensor name, and all of them in *owned*."""
        self._record = record
        self._files = files
        self._owned = owned

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        self._record.require(name)
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return a view of the mapped file, of these rows and columns."""
        self._record.require(name)
        self._record.mark_read(name)
        part = self._files[name].get_slice(name)
        if columns is None:
            return part[rows or slice(None)]
        return part[rows or slice(None), columns]

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Return None: no tensor is stored as codes."""

    def ignore(self, name: str) -> None:
        """Leave a tensor out of `check_all_read`."""
        self._record.ignore(name)

    def check_all_read(self) -> None:
        """Raise ConfigError naming the tensors that nobody has read or ignored."""
        self._record.check_all_read()

    def close(self) -> None:
        """Let go of the files; they stay mapped while a tensor that was read is alive."""
        self._files = {}
        self._owned.close()


def _map(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged: {error}. Download it again.") from error


def _check_shard(
    path: Path, sizes: Mapping[str, int], promised: tuple[str, ...], earlier: Mapping[str, int]
) -> None:
    for name in promised:
        if name not in sizes:
            raise ConfigError(
                f"{path} has no tensor {name!r}, which the checkpoint's index says is in it: "
                "index and shard are of different versions. Download the model again."
            )
    for name in sizes:
        if name in earlier:
            raise ConfigError(
                f"Tensor {name!r} is in {path.name} and in another shard of {path.parent}: which "
                "of them counts is unknown. Download the model again."
            )
