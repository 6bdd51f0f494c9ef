"""StagedWeights: new weights that have arrived, tensor by tensor, and are not in use yet.

    WeightsChunk ─► the whole tensor ─► this rank's part ─► ApplyWeights: the layers load it

It is a WeightReader, so the layers take their new weights as they took the first ones.
"""

from __future__ import annotations

import torch

from llmrt.errors import ConfigError
from llmrt.messages import WeightsChunk
from llmrt.worker.weights.catalogue import Catalogue
from llmrt.worker.weights.read_record import DERIVED_SUFFIX

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class StagedWeights:
    """Some or all tensors of a model; one that did not come reads as "keep what is there"."""

    def __init__(self, catalogue: Catalogue, dtype: torch.dtype, *, is_tied: bool) -> None:
        self._catalogue = catalogue
        self._dtype = dtype
        self._passed_over = {"lm_head.weight"} if is_tied else set[str]()
        self._parts: dict[str, torch.Tensor] = {}
        self._arriving: torch.Tensor | None = None
        """The bytes of the tensor that is on its way."""

    def add(self, chunk: WeightsChunk) -> None:
        """Take in the next bytes of a tensor.

        Raises:
            ConfigError: the model has no tensor of this name, or none of this shape or type.
        """
        if chunk.name in self._passed_over or chunk.name.endswith(DERIVED_SUFFIX):
            return
        if chunk.offset == 0:
            self._check(chunk)
            self._arriving = torch.empty(chunk.num_bytes, dtype=torch.uint8)
        assert self._arriving is not None, "a tensor begins in its middle"
        data = torch.frombuffer(bytearray(chunk.data), dtype=torch.uint8)
        end = chunk.offset + len(data)
        self._arriving[chunk.offset : end] = data
        if end == chunk.num_bytes:
            self._keep_part(chunk, self._arriving)
            self._arriving = None

    def _keep_part(self, chunk: WeightsChunk, data: torch.Tensor) -> None:
        whole = data.view(_DTYPES[chunk.dtype]).view(chunk.shape)
        part = self._catalogue[chunk.name].of(whole)
        self._parts[chunk.name] = part.to(self._dtype, copy=True)

    def _check(self, chunk: WeightsChunk) -> None:
        known = self._catalogue.get(chunk.name)
        if known is None:
            raise ConfigError(
                f"this model has no tensor {chunk.name!r}; names are those of transformers, as "
                f"{next(iter(self._catalogue))!r}."
            )
        if known.shape != chunk.shape:
            raise ConfigError(
                f"tensor {chunk.name!r} came with shape {chunk.shape}; this model's has shape "
                f"{known.shape}."
            )
        if chunk.dtype not in _DTYPES:
            raise ConfigError(
                f"tensor {chunk.name!r} came as {chunk.dtype}; weights are {', '.join(_DTYPES)}."
            )

    # ---- as a WeightReader ----

    def __contains__(self, name: str) -> bool:
        return name in self._catalogue

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self._catalogue[name].shape

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return this rank's part of a tensor; on the `meta` device where none came."""
        known = self._catalogue[name]
        assert (rows, columns) == (known.rows, known.columns), "layers always read the same part"
        part = self._parts.get(name)
        return known.of(torch.empty(known.shape, device="meta")) if part is None else part

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Return None: what arrives is never in codes."""

    def ignore(self, name: str) -> None:
        """Do nothing: what came was checked on arrival."""

    def check_all_read(self) -> None:
        """Do nothing: what came was checked on arrival."""

    def close(self) -> None:
        """Let go of the tensors."""
        self._parts.clear()
