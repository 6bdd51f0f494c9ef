"""Decoder: the one definition behind every supported architecture; configuration tells them apart.

Module and tensor names are transformers' (`model.layers.0.self_attn.q_proj.weight`), but that the
projections of one input are fused.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from llmrt.model_config import ModelConfig
from llmrt.worker.attention.choice import attention_of_layer
from llmrt.worker.attention.metadata import AttentionMetadata
from llmrt.worker.attention.protocol import Attention
from llmrt.worker.device import Placement
from llmrt.worker.layers.attention_projections import OutputProjection, QKVProjection
from llmrt.worker.layers.linear import Linear
from llmrt.worker.layers.mlp import GatedMLP
from llmrt.worker.layers.norm import RMSNorm
from llmrt.worker.layers.rotary import RotaryEmbedding
from llmrt.worker.layers.vocabulary import LMHead, VocabEmbedding
from llmrt.worker.tensor_parallel import TPGroup
from llmrt.worker.weights.reader import WeightReader


class SelfAttention(nn.Module):
    """Projections and attention of this rank's heads."""

    def __init__(
        self, model: ModelConfig, layer: int, group: TPGroup, placement: Placement
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVProjection(model, group, placement)
        heads = self.qkv_proj.heads
        self._num_heads, self._num_kv_heads = heads.num_heads, heads.num_kv_heads
        self.o_proj = OutputProjection(model, heads, group, placement)
        self.q_norm = self.k_norm = None
        if model.qk_norm:
            self.q_norm = RMSNorm(model.head_dim, model.rms_norm_eps, placement)
            self.k_norm = RMSNorm(model.head_dim, model.rms_norm_eps, placement)
        window = model.windows[layer] if model.windows else None
        self._attend: Attention = attention_of_layer(
            heads, model.head_dim, layer, window, placement
        )

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's part of `prefix.*`."""
        self.qkv_proj.load(reader, prefix)
        self.o_proj.load(reader, f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.load(reader, f"{prefix}.q_norm")
            self.k_norm.load(reader, f"{prefix}.k_norm")

    def forward(
        self,
        x_TD: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionMetadata,
        rows_R: Tensor | None,
    ) -> Tensor:
        """Return y_RD, the same on every rank."""
        qkv_THD = self.qkv_proj(x_TD)
        if self.q_norm is not None and self.k_norm is not None:
            q_TQD = qkv_THD[:, : self._num_heads]
            k_TKD = qkv_THD[:, self._num_heads :][:, : self._num_kv_heads]
            q_TQD.copy_(self.q_norm(q_TQD))
            k_TKD.copy_(self.k_norm(k_TKD))
        o_TH = self._attend(qkv_THD, angles, attention).flatten(1)
        return self.o_proj(o_TH if rows_R is None else o_TH[rows_R])


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(
        self, model: ModelConfig, layer: int, group: TPGroup, placement: Placement
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, placement)
        self.self_attn = SelfAttention(model, layer, group, placement)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, placement)
        self.mlp = GatedMLP(model, group, placement)

    def load(self, reader: WeightReader, prefix: str) -> None:
        """Read this rank's part of `prefix.*`."""
        self.input_layernorm.load(reader, f"{prefix}.input_layernorm")
        self.self_attn.load(reader, f"{prefix}.self_attn")
        self.post_attention_layernorm.load(reader, f"{prefix}.post_attention_layernorm")
        self.mlp.load(reader, f"{prefix}.mlp")

    def forward(
        self,
        x_TD: Tensor,
        y_TD: Tensor | None,
        angles: tuple[Tensor, Tensor],
        attention: AttentionMetadata,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream in the midst of this layer, and what its MLP adds to it.

        The sum is left to whoever normalises it next: that takes one pass instead of two.

        Args:
            x_TD: the residual stream in the midst of the layer before; it is changed.
            y_TD: what that layer's MLP adds to it; None before the first layer.
            angles: cos and sin by token.
            attention: the step.
            rows_R: the tokens that go on; the others only leave their keys and values. None: all.
        """
        normalized_TD = self.input_layernorm.add_and_normalize(x_TD, y_TD)
        y_RD = self.self_attn(normalized_TD, angles, attention, rows_R)
        x_RD = x_TD if rows_R is None else x_TD[rows_R]
        return x_RD, self.mlp(self.post_attention_layernorm.add_and_normalize(x_RD, y_RD))


class Decoder(nn.Module):
    """A decoder-only model of the Llama family; one rank's shard of it."""

    def __init__(self, model: ModelConfig, group: TPGroup, placement: Placement) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(model, group, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(model, layer, group, placement) for layer in range(model.num_layers)
        )
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, placement)
        self.lm_head = LMHead(model, group, placement)
        self.rotary = RotaryEmbedding(model.rope, model.head_dim, placement)

    def load(self, reader: WeightReader) -> None:
        """Read this rank's weights.

        Raises:
            ConfigError: a tensor is missing, or has not the shape that the configuration gives it.
        """
        self.embed_tokens.load(reader, "model.embed_tokens")
        for i, layer in enumerate(self._decoder_layers()):
            layer.load(reader, f"model.layers.{i}")
        self.norm.load(reader, "model.norm")
        self.lm_head.load(reader, self.embed_tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        in_parameters = sum(p.numel() * p.element_size() for p in self.parameters())
        return in_parameters + sum(m.num_bytes for m in self.modules() if isinstance(m, Linear))

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attention: AttentionMetadata,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream x_RD after the last layer, in float32; `logits` takes rows.

        Args:
            input_ids_T: the tokens of the step.
            positions_T: the place of each in its sequence.
            attention: the step.
            rows_R: the tokens whose stream is wanted, at least one; None for all.
        """
        angles = self.rotary(positions_T, attention.lengths_T)
        # The stream is a sum over all layers: in bfloat16 it would lose a little in each.
        x_TD = self.embed_tokens(input_ids_T).float()
        y_TD = None
        *layers, last = self.layers
        for layer in layers:
            x_TD, y_TD = layer(x_TD, y_TD, angles, attention)
        x_RD, y_RD = last(x_TD, y_TD, angles, attention, rows_R)
        return x_RD.add_(y_RD)

    def logits(self, x_RD: Tensor) -> Tensor | None:
        """Return logits_RV of these rows on rank 0, None elsewhere. Every rank must call it."""
        return self.lm_head(self.norm(x_RD))

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer
