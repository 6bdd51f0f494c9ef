"""The two ends of the model: token ids to vectors, and vectors to logits, split by token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig
from llmrt.worker import shard
from llmrt.worker.device import Placement
from llmrt.worker.layers.linear import Linear, fill
from llmrt.worker.layers.reading import read_checked
from llmrt.worker.tensor_parallel import TPGroup
from llmrt.worker.weights.reader import WeightReader

_HEAD_NAME = "lm_head.weight"


class VocabEmbedding(nn.Module):
    """Vectors of the token ids of this rank; the others' come in by a sum over the ranks."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._group = group
        self._shape = (model.vocab_size, model.hidden_size)
        self._ids = shard.shard_vocabulary(model.vocab_size, group.size)[group.rank]
        values = torch.empty(
            len(self._ids), model.hidden_size, device=placement.device, dtype=placement.dtype
        )
        self.weight = nn.Parameter(values, requires_grad=False)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's rows of `prefix.weight`."""
        fill(self.weight, [read_checked(reader, f"{prefix}.weight", self._shape, rows=self._ids)])

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return x_TD."""
        weight_VD = self.weight
        if self._group.size == 1:
            return F.embedding(ids_T, weight_VD)
        if not self._ids:
            x_TD = weight_VD.new_zeros(len(ids_T), weight_VD.shape[1])
        else:
            local_T = ids_T - self._ids.start
            is_elsewhere_T = (local_T < 0) | (local_T >= len(self._ids))
            x_TD = F.embedding(local_T.masked_fill(is_elsewhere_T, 0), weight_VD)
            x_TD.masked_fill_(is_elsewhere_T[:, None], 0)
        return self._group.all_reduce_(x_TD)


class LMHead(nn.Module):
    """Logits of the token ids of this rank; a tied head multiplies with the embedding's rows."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self._group = group
        self._shape = (model.vocab_size, model.hidden_size)
        self._shards = shard.shard_vocabulary(model.vocab_size, group.size)
        self._is_tied = model.tie_word_embeddings
        ids = self._shards[group.rank]
        # Logits of 16 and more are an eighth apart in bfloat16: rounded, the likeliest would tie.
        self._dtype = placement.dtype if placement.kernels is None else torch.float32
        self.rows = Linear(
            model.hidden_size, len(ids), placement, is_quantizable=False, rounds=False
        )

    def load(self, reader: WeightReader, embedding: VocabEmbedding) -> None:
        """Read this rank's rows, or where the head is tied take those of *embedding*, once loaded.

        Raises:
            ConfigError: the head is not tied, and the checkpoint has none.
        """
        if self._is_tied:
            self.rows.share(embedding.weight)
            self._pass_over_copy(reader)
            return
        if _HEAD_NAME not in reader:
            raise ConfigError(
                f"The checkpoint has no tensor {_HEAD_NAME!r}, and tie_word_embeddings is false in "
                "its config.json: either the file is incomplete or the flag should be true."
            )
        ids = self._shards[self._group.rank]
        self.rows.load([read_checked(reader, _HEAD_NAME, self._shape, rows=ids)])

    def forward(self, x_RD: Tensor) -> Tensor | None:
        """Return the logits_RV of the whole vocabulary on rank 0, None elsewhere."""
        widths = tuple(len(ids) for ids in self._shards)
        logits_RV = self.rows(x_RD).to(self._dtype)  # as on every rank, also without rows
        return self._group.gather_columns(logits_RV, widths)

    @staticmethod
    def _pass_over_copy(reader: WeightReader) -> None:
        """Count a copy of the embedding that some tied checkpoints store as read."""
        if _HEAD_NAME in reader:
            reader.read(_HEAD_NAME, rows=slice(0, 0))
