"""Catalogue: which tensors the layers of one rank read, and which part of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmrt.worker.matrices.grouped_codes import GroupedCodes
from llmrt.worker.weights.reader import WeightReader


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The part of one tensor that this rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    rows: slice | None = None
    columns: slice | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole tensor."""
        part = tensor if self.rows is None else tensor[self.rows]
        return part if self.columns is None else part[:, self.columns]


Catalogue = dict[str, TensorPart]
"""By the name that transformers gives the tensor."""


class RecordingReader:
    """Reads through another reader, and writes down what was read."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self.catalogue: Catalogue = {}

    def __contains__(self, name: str) -> bool:
        return name in self._reader

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self._reader.shape(name)

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return a tensor, or a part of it."""
        shape = self._reader.shape(name)
        self.catalogue[name] = TensorPart(shape=shape, rows=rows, columns=columns)
        return self._reader.read(name, rows=rows, columns=columns)

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> GroupedCodes | None:
        """Return a matrix, or a part of it, as its codes, where it is stored so."""
        codes = self._reader.read_codes(name, rows=rows, columns=columns)
        if codes is not None:
            shape = self._reader.shape(name)
            self.catalogue[name] = TensorPart(shape=shape, rows=rows, columns=columns)
        return codes

    def ignore(self, name: str) -> None:
        """Leave a tensor out of `check_all_read`."""
        self._reader.ignore(name)

    def check_all_read(self) -> None:
        """Raise ConfigError naming the tensors that nobody has read or ignored."""
        self._reader.check_all_read()

    def close(self) -> None:
        """Let go of the files."""
        self._reader.close()
