"""ModelRunner: one step after the other. Tokens stay here; the driver only names sequences.

Rank 0 samples and tells the others, so that every rank appends the same token and the next step
can run before the driver has seen this one's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmrt.config import WorkerConfig
from llmrt.messages import (
    Batch,
    BatchResult,
    NewSequence,
    PromptLogprobs,
    SampledToken,
    ScheduledSequence,
    SequenceFailure,
)
from llmrt.sampling import SamplingParams
from llmrt.worker.device import Placement
from llmrt.worker.inputs import InputBuilder, PromptRows, StepInputs
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.sequence import SequenceState
from llmrt.worker.shard import shard_heads
from llmrt.worker.tensor_parallel import TPGroup

_ROWS_PER_SCORING = 256
"""Prompt rows whose logits exist at one time: 50 MB at a vocabulary of 49,152."""


class SampledTokens(Protocol):
    """What a sampler returns; in the order of the sequences it was given."""

    @property
    def token_ids(self) -> Sequence[int] | Tensor:
        """One for every sequence; a placeholder for one that failed."""
        ...

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """What the driver is told."""
        ...

    @property
    def failures(self) -> tuple[SequenceFailure, ...]:
        """Sequences whose logits processor raised."""
        ...


class TokenSampler(Protocol):
    """Chooses the next tokens."""

    def begin(self, sequence: SequenceState) -> None:
        """Prepare, while its prompt runs, what sampling a new sequence will need."""
        ...

    def sample(self, logits_RV: Tensor, sequences: Sequence[SequenceState]) -> SampledTokens:
        """Return the next token of each sequence from its row of float32 logits."""
        ...

    def prompt_logprobs(
        self, logits_TV: Tensor, sequence: SequenceState, start: int
    ) -> PromptLogprobs:
        """Score the prompt tokens [start + 1, start + 1 + T) by the logits of the ones before."""
        ...

    def forget(self, seq_id: int) -> None:
        """Let go of what was kept for a sequence, if anything."""
        ...

    def close(self) -> None:
        """Let go of everything, threads included."""
        ...


class ModelRunner:
    """Runs batches through a model, and keeps what must be kept between them."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Decoder,
        group: TPGroup,
        placement: Placement,
        sampler: TokenSampler,
    ) -> None:
        self.model = model
        self._config = config
        self._group = group
        self._placement = placement
        self._sampler = sampler
        self._sequences: dict[int, SequenceState] = {}
        self._inputs: InputBuilder | None = None

    def allocate_cache(self, num_blocks: int) -> None:
        """Make the KV cache; sequences that were running are forgotten."""
        self.free_cache()  # The old one goes before the new one comes.
        self._inputs = self._input_builder(num_blocks)

    def free_cache(self) -> None:
        """Give the memory of the KV cache back, and forget every sequence."""
        for seq_id in self._sequences:
            self._sampler.forget(seq_id)
        self._sequences.clear()
        self._inputs = None

    def close(self) -> None:
        """Free the cache, and end what the sampler has begun."""
        self.free_cache()
        self._sampler.close()

    def _input_builder(self, num_blocks: int) -> InputBuilder:
        model = self._config.model
        heads = shard_heads(model.num_heads, model.num_kv_heads, self._group.rank, self._group.size)
        cache = KVCache(
            num_layers=model.num_layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=model.head_dim,
            placement=self._placement,
        )
        return InputBuilder(model, heads, cache, self._placement)

    @torch.inference_mode()
    def peak_bytes(self) -> int:
        """Run the largest batch on a GPU; returns all memory in use on it at the peak."""
        device = self._placement.device
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        self._run_largest_batch()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - allocated
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free + peak

    def _run_largest_batch(self) -> None:
        """Prefill as many tokens as a step may have, and take the logits of as many rows."""
        config = self._config
        length = min(config.max_num_batched_tokens, config.max_model_len)
        num_sequences = -(-config.max_num_batched_tokens // length)
        blocks = -(-length // config.block_size)
        builder = self._input_builder(blocks)
        states = {i: _profiled_state(i, length, blocks) for i in range(num_sequences)}
        scheduled = [
            ScheduledSequence(seq_id=i, start=0, num_tokens=length, new_block_ids=(), samples=False)
            for i in states
        ]
        inputs = builder.build(scheduled, states)
        x_TD = self.model(inputs.input_ids_T, inputs.positions_T, inputs.attention)
        logits_RV = self.model.logits(x_TD[: max(config.max_num_seqs, _ROWS_PER_SCORING)])
        if logits_RV is not None:
            # A sampler holds about two more copies: the sorted logits and their probabilities.
            logits_RV.float().sort(dim=-1).values.softmax(dim=-1)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> BatchResult:
        """Run one step. Only rank 0's result holds tokens."""
        assert self._inputs is not None, "a batch came before the cache was allocated"
        self._apply(batch)
        if not batch.scheduled:
            return BatchResult(step=batch.step)
        inputs = self._inputs.build(batch.scheduled, self._sequences)
        x_UD = self.model(
            inputs.input_ids_T, inputs.positions_T, inputs.attention, inputs.used_rows_U
        )
        scores = [p for rows in inputs.prompt_rows for p in self._score(x_UD, rows)]
        sampled = self._sample(x_UD, inputs)
        return BatchResult(
            step=batch.step,
            tokens=sampled.tokens if sampled is not None else (),
            prompt_logprobs=tuple(scores),
            failures=sampled.failures if sampled is not None else (),
        )

    def _apply(self, batch: Batch) -> None:
        """Forget what has finished, learn what is new, extend the block tables."""
        for seq_id in batch.finished:
            self._sequences.pop(seq_id, None)
            self._sampler.forget(seq_id)
        for new in batch.new:
            self._sequences[new.seq_id] = _state_of(new)
            if self._group.rank == 0:
                self._sampler.begin(self._sequences[new.seq_id])
        for scheduled in batch.scheduled:
            self._sequences[scheduled.seq_id].block_ids.extend(scheduled.new_block_ids)

    def _sample(self, x_UD: Tensor, inputs: StepInputs) -> SampledTokens | None:
        """Sample on rank 0, and append the tokens on every rank."""
        if not inputs.sampling:
            return None
        x_RD = x_UD[inputs.sampling_rows_R] if inputs.used_rows_U is None else x_UD
        logits_RV = self.model.logits(x_RD)
        sampled = None
        token_ids_R = torch.zeros_like(inputs.sampling_rows_R)
        if logits_RV is not None:
            sampled = self._sampler.sample(logits_RV.float(), inputs.sampling)
            token_ids_R.copy_(torch.as_tensor(sampled.token_ids))
        token_ids = self._group.broadcast_(token_ids_R).tolist()
        for sequence, token_id in zip(inputs.sampling, token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return sampled

    def _score(self, x_TD: Tensor, prompt: PromptRows) -> list[PromptLogprobs]:
        """Score prompt tokens, some rows at a time."""
        scores = []
        for offset in range(0, len(prompt.rows), _ROWS_PER_SCORING):
            rows = prompt.rows[offset : offset + _ROWS_PER_SCORING]
            logits_TV = self.model.logits(x_TD[rows.start : rows.stop])
            if logits_TV is not None:
                start = prompt.start + offset
                score = self._sampler.prompt_logprobs(logits_TV.float(), prompt.sequence, start)
                scores.append(score)
        return scores


def _profiled_state(seq_id: int, length: int, num_blocks: int) -> SequenceState:
    new = NewSequence(
        seq_id=seq_id,
        token_ids=(0,) * length,
        num_prompt_tokens=length,
        params=SamplingParams(),
        seed=0,
        eos_token_ids=(),
    )
    # All write to the same blocks: only the amount of memory counts.
    return SequenceState(spec=new, token_ids=list(new.token_ids), block_ids=list(range(num_blocks)))


def _state_of(new: NewSequence) -> SequenceState:
    return SequenceState(spec=new, token_ids=list(new.token_ids))
