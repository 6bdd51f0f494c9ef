"""New weights on their way to the workers: from a checkpoint, or as tensors of the user's.

llmrt imports no torch here. Tensors come from a user who has it; their bytes are read where they
lie, and cross in pieces of bounded size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias, cast

from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from llmrt.errors import RequestError
from llmrt.messages import OpenWeights, WeightsChunk
from llmrt.model_config import ModelConfig
from llmrt.upkeep import Upkeep

CHUNK_BYTES = 8 << 20
"""Most that is on its way at one time; steps go on between two chunks."""

WeightsSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]"
"""A checkpoint, or tensors by the names that transformers gives them."""

_MAY_DIFFER = ("eos_token_ids", "dtype")
"""What a new checkpoint's configuration may say otherwise: it is the engine's that counts."""


class WeightsUpdate:
    """One update of the weights: all of them are in the workers, checked, before one is set."""

    def __init__(
        self,
        source: WeightsSource,
        model: ModelConfig,
        update_id: int,
        post: Callable[[Callable[[Upkeep], None]], Future[None]],
    ) -> None:
        """Store what is needed; *post* has the session do something between two steps."""
        self._source = source
        self._model = model
        self._id = update_id
        self._post = post
        self._is_cancelled = False

    def cancel(self) -> None:
        """Have `run`, in another thread, give up before the next piece is sent."""
        self._is_cancelled = True

    def run(self) -> None:
        """Send the weights and apply them.

        Raises:
            RequestError: a tensor does not fit the model, whose weights are as they were.
        """
        try:
            for command in self._commands():
                self._post(partial(_prepare, command=command)).result()
                if self._is_cancelled:
                    raise RequestError("the update of the weights was cancelled.")
            is_checkpoint = isinstance(self._source, (str, os.PathLike))
            self._post(lambda u: u.apply_weights(self._id, is_checkpoint=is_checkpoint)).result()
        except BaseException:
            self._post(lambda u: u.drop_weights(self._id))
            raise

    def _commands(self) -> Iterator[OpenWeights | WeightsChunk]:
        if isinstance(self._source, (str, os.PathLike)):
            yield self._checkpoint(self._source)
            return
        for pair in _pairs(self._source):
            yield from _chunks(self._id, *_checked(pair))

    def _checkpoint(self, path: str | os.PathLike[str]) -> OpenWeights:
        checkpoint = resolve(path, progress=Progress(False))
        found = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
        same = replace(found, **{name: getattr(self._model, name) for name in _MAY_DIFFER})
        differing = [
            f"{f.name} ({getattr(same, f.name)}, here {getattr(self._model, f.name)})"
            for f in fields(self._model)
            if getattr(same, f.name) != getattr(self._model, f.name)
        ]
        if differing:
            raise RequestError(
                f"{os.fspath(path)} is of another model; its config.json differs in "
                f"{', '.join(differing)}. The weights stay as they were; open an engine on it."
            )
        return OpenWeights(
            update_id=self._id, weights=checkpoint.weights, gguf_index=checkpoint.gguf_index
        )


def _prepare(upkeep: Upkeep, command: OpenWeights | WeightsChunk) -> None:
    upkeep.prepare_weights(command)


def _pairs(source: object) -> Iterable[object]:
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source).items()
    if isinstance(source, Iterable):
        return cast("Iterable[object]", source)
    raise RequestError(
        f"update_weights takes (name, tensor) pairs, or a path, not {type(source).__name__}."
    )


def _checked(pair: object) -> tuple[str, Any]:
    if isinstance(pair, tuple):
        items = cast("tuple[Any, ...]", pair)
        if len(items) == 2 and isinstance(items[0], str) and hasattr(items[1], "shape"):
            return items
    raise RequestError(
        f"update_weights takes (name, tensor) pairs, or a path; it was given {pair!r:.100}."
    )


def _chunks(update_id: int, name: str, tensor: Any) -> Iterator[WeightsChunk]:
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().to("cpu").contiguous()
    data = _bytes_of(tensor)
    for offset in range(0, max(len(data), 1), CHUNK_BYTES):
        yield WeightsChunk(
            update_id=update_id,
            name=name,
            dtype=str(tensor.dtype).rpartition(".")[2],
            shape=tuple(int(size) for size in tensor.shape),
            num_bytes=len(data),
            offset=offset,
            data=bytes(data[offset : offset + CHUNK_BYTES]),
        )


def _bytes_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, or of a numpy array, without a copy."""
    if not hasattr(tensor, "data_ptr"):
        return memoryview(tensor.tobytes())
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
