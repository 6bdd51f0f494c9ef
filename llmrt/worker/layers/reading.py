"""Reading checkpoint tensors with their shape checked against the model's configuration."""

from __future__ import annotations

from torch import Tensor

from llmrt.errors import ConfigError
from llmrt.worker.weights.reader import WeightReader


def read_checked(
    reader: WeightReader,
    name: str,
    shape: tuple[int, ...],
    rows: range | None = None,
    columns: range | None = None,
) -> Tensor:
    """Return a tensor, or these rows (and columns) of it.

    Raises:
        ConfigError: the checkpoint has no such tensor, or one of another shape.
    """
    if name not in reader:
        raise ConfigError(f"The checkpoint has no tensor {name!r}, which its config.json asks for.")
    found = tuple(reader.shape(name))
    if found != shape:
        raise ConfigError(
            f"Tensor {name!r} has shape {found} in the checkpoint; config.json makes it {shape}."
        )
    return reader.read(name, rows=_slice(rows), columns=_slice(columns))


def _slice(part: range | None) -> slice | None:
    return None if part is None else slice(part.start, part.stop)
