"""Reading checkpoint tensors with their shape checked against the model's configuration."""

from __future__ import annotations

from torch import Tensor

from llmrt.errors import ConfigError
from llmrt.worker.matrices.grouped_codes import GroupedCodes
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
    _check(reader, name, shape)
    return reader.read(name, rows=_slice(rows), columns=_slice(columns))


def read_matrix(
    reader: WeightReader,
    name: str,
    shape: tuple[int, ...],
    rows: range | None = None,
    columns: range | None = None,
) -> Tensor | GroupedCodes:
    """Return a matrix as `read_checked` does, or as codes where the checkpoint stores those."""
    _check(reader, name, shape)
    codes = reader.read_codes(name, rows=_slice(rows), columns=_slice(columns))
    return read_checked(reader, name, shape, rows, columns) if codes is None else codes


def _check(reader: WeightReader, name: str, shape: tuple[int, ...]) -> None:
    if name not in reader:
        raise ConfigError(f"The checkpoint has no tensor {name!r}, which its config.json asks for.")
    found = tuple(reader.shape(name))
    if found != shape:
        raise ConfigError(
            f"Tensor {name!r} has shape {found} in the checkpoint; config.json makes it {shape}."
        )


def _slice(part: range | None) -> slice | None:
    return None if part is None else slice(part.start, part.stop)
