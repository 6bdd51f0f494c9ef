"""WeightReader: what a layer needs of a checkpoint, whatever its format."""

from __future__ import annotations

from typing import Protocol

import torch

from llmrt.worker.matrices.grouped_codes import GroupedCodes


class WeightReader(Protocol):
    """Reads parts of named tensors. Names are those of transformers' state dict."""

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint holds this tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        ...

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return a tensor, or only these rows (and columns), in the dtype it is stored in.

        Quantised tensors are dequantised to float32. The result owns its memory or maps the file
        read-only: copy it before you write to it.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        ...

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> GroupedCodes | None:
        """Return these rows (and columns) of a matrix as its codes.

        None where it is stored otherwise, or the columns cut a group in two: `read` it then.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        ...

    def ignore(self, name: str) -> None:
        """Leave a tensor out of `check_all_read`, as a tied `lm_head.weight`; it need not exist."""
        ...

    def check_all_read(self) -> None:
        """Raise ConfigError naming the tensors that nobody has read or ignored."""
        ...

    def close(self) -> None:
        """Let go of the files; they stay mapped while a tensor that was read is alive."""
        ...
