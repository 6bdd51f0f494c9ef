"""A WeightReader over tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmrt.errors import ConfigError


class DictReader:
    """Reads from a state dict and keeps a record of what was read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._read: set[str] = set()
        self.num_items_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        self._read.add(name)
        tensor = self._tensors[name]
        if rows is not None:
            tensor = tensor[rows]
        if columns is not None:
            tensor = tensor[:, columns]
        self.num_items_read += tensor.numel()
        return tensor

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """No tensor here is stored as codes."""

    def check_all_read(self) -> None:
        left = sorted(set(self._tensors) - self._read)
        if left:
            raise ConfigError(f"nobody read {', '.join(left)}")

    def close(self) -> None:
        self._tensors.clear()
