"""WeightUpdates: new weights for a model that is in use; they are checked whole before one is set.

OpenWeights ──────────┐
WeightsChunk, … ──────┴─► a reader, checked ─► ApplyWeights: the layers load from it
                                           └─► DropWeights
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmrt.config import ReportProgress, WorkerConfig
from llmrt.errors import ConfigError
from llmrt.messages import (
    ApplyWeights,
    Done,
    DropWeights,
    OpenWeights,
    WeightsChunk,
    WeightsCommand,
    WeightsRefused,
)
from llmrt.worker.device import Placement
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.weights.catalogue import Catalogue
from llmrt.worker.weights.open_weights import open_weights
from llmrt.worker.weights.reader import WeightReader
from llmrt.worker.weights.staged_weights import StagedWeights

_TIED_COPY = "lm_head.weight"


class WeightUpdates:
    """The updates of one model that have begun, by their number."""

    def __init__(
        self,
        config: WorkerConfig,
        placement: Placement,
        model: Decoder,
        catalogue: Catalogue,
        report: ReportProgress,
    ) -> None:
        self.config = config
        """Names the checkpoint whose weights are in use, or were before tensors came."""
        self._placement = placement
        self._model = model
        self._catalogue = catalogue
        self._report = report
        self._begun: dict[int, WeightReader] = {}
        self._opened: dict[int, WorkerConfig] = {}

    def handle(self, command: WeightsCommand) -> Done | WeightsRefused:
        """Carry out one step of an update; what cannot be used is refused, and changes nothing."""
        try:
            match command:
                case OpenWeights():
                    self._open(command)
                case WeightsChunk():
                    self._staged(command.update_id).add(command)
                case ApplyWeights():
                    self._apply(command.update_id)
                case DropWeights():
                    self._drop(command.update_id)
        except ConfigError as error:
            return WeightsRefused(reason=str(error))
        return Done()

    def _open(self, command: OpenWeights) -> None:
        config = replace(self.config, weights=command.weights, gguf_index=command.gguf_index)
        reader = open_weights(config, self._report)
        try:
            check_covers(reader, self._catalogue, command.weights)
        except BaseException:
            reader.close()
            raise
        self._begun[command.update_id] = reader
        self._opened[command.update_id] = config

    def _staged(self, update_id: int) -> StagedWeights:
        reader = self._begun.setdefault(
            update_id,
            StagedWeights(
                self._catalogue,
                self._placement.dtype,
                is_tied=self.config.model.tie_word_embeddings,
            ),
        )
        assert isinstance(reader, StagedWeights), "one update, one kind of source"
        return reader

    def _apply(self, update_id: int) -> None:
        reader = self._begun.get(update_id)
        if reader is not None:  # None where there was no tensor to send
            self._model.load(reader)
            self.config = self._opened.get(update_id, self.config)
            self._drop(update_id)

    def _drop(self, update_id: int) -> None:
        self._opened.pop(update_id, None)
        reader = self._begun.pop(update_id, None)
        if reader is not None:
            reader.close()


def check_covers(reader: WeightReader, catalogue: Catalogue, path: str) -> None:
    """Check, from headers alone, that a checkpoint has exactly the tensors of a model.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    reader.ignore(_TIED_COPY)  # where it counts, it is in the catalogue
    for name, part in catalogue.items():
        reader.ignore(name)
        if name not in reader:
            if part.rows == slice(0, 0):
                continue  # a copy of tied weights, which some checkpoints store and others do not
            raise ConfigError(f"{Path(path)} has no tensor {name!r}, which this model needs.")
        if tuple(reader.shape(name)) != part.shape:
            raise ConfigError(
                f"{Path(path)} has tensor {name!r} with shape {tuple(reader.shape(name))}; this "
                f"model's has shape {part.shape}."
            )
    reader.check_all_read()
