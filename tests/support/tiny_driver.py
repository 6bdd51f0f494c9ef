"""The driver's side of a step, as simple as can be: blocks are dealt out and never taken back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    TokenLogprobs,
)
from llmrt.model_config import ModelConfig
from llmrt.sampling import SamplingParams
from llmrt.worker.device import Placement
from llmrt.worker.inputs import InputBuilder
from llmrt.worker.kv_cache import KVCache
from llmrt.worker.model_runner import ModelRunner, TokenSampler
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.sequence import SequenceState
from llmrt.worker.shard import shard_heads
from llmrt.worker.tensor_parallel import TPGroup
from tests.support.checkpoints import Checkpoint
from tests.support.rank_threads import on_every_rank, thread_groups

NUM_BLOCKS = 256
FLOAT32_CPU = Placement(device=torch.device("cpu"), dtype=torch.float32)


def worker_config(model: ModelConfig, **changes: object) -> WorkerConfig:
    options: dict[str, object] = {
        "weights": "unused",
        "device": "cpu",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 4,
    }
    return WorkerConfig(model=model, **{**options, **changes})  # type: ignore[arg-type]


def new_sequence(
    seq_id: int, token_ids: Sequence[int], params: SamplingParams | None = None, num_prompt: int = 0
) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        num_prompt_tokens=num_prompt or len(token_ids),
        params=params or SamplingParams(temperature=0),
        seed=0,
        eos_token_ids=(),
    )


@dataclass(frozen=True)
class Greedy:
    """What GreedySampler chose."""

    token_ids: list[int]
    tokens: tuple[SampledToken, ...]
    failures: tuple[SequenceFailure, ...] = ()


class GreedySampler:
    """The most likely token."""

    def sample(self, logits_RV: Tensor, sequences: Sequence[SequenceState]) -> Greedy:
        token_ids = logits_RV.argmax(dim=-1).tolist()
        pairs = zip(sequences, token_ids, strict=True)
        tokens = tuple(SampledToken(seq_id=s.spec.seq_id, token_id=t) for s, t in pairs)
        return Greedy(token_ids=token_ids, tokens=tokens)

    def prompt_logprobs(
        self, logits_TV: Tensor, sequence: SequenceState, start: int
    ) -> PromptLogprobs:
        logprobs_TV = logits_TV.log_softmax(dim=-1)
        token_ids = sequence.token_ids[start + 1 : start + 1 + len(logits_TV)]
        return PromptLogprobs(
            seq_id=sequence.spec.seq_id,
            start=start + 1,
            positions=tuple(
                TokenLogprobs(token_ids=(t,), logprobs=(row[t].item(),), ranks=(0,))
                for t, row in zip(token_ids, logprobs_TV, strict=True)
            ),
        )

    def begin(self, sequence: SequenceState) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class TinyDriver:
    """Runs one checkpoint on `tp` ranks; keeps block tables and prompt progress, nothing else."""

    checkpoint: Checkpoint
    tp: int = 1
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    sampler: TokenSampler = field(default_factory=lambda: GreedySampler())
    steps: itertools.count[int] = field(default_factory=itertools.count)
    results: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free_blocks = iter(range(NUM_BLOCKS - 1, -1, -1))
        self._num_blocks_of: dict[int, int] = {}
        self._groups = thread_groups(self.tp)
        self.runners = on_every_rank(self._groups, self._runner)

    def schedule(
        self, seq_id: int, start: int, num_tokens: int, *, samples: bool
    ) -> ScheduledSequence:
        have = self._num_blocks_of.get(seq_id, 0)
        need = -(-(start + num_tokens) // self.block_size)
        self._num_blocks_of[seq_id] = max(have, need)
        return ScheduledSequence(
            seq_id=seq_id,
            start=start,
            num_tokens=num_tokens,
            new_block_ids=tuple(next(self._free_blocks) for _ in range(have, need)),
            samples=samples,
        )

    def release(self, seq_id: int) -> int:
        """Let its next block table begin anew; returns the id for the batch's `finished`."""
        self._num_blocks_of.pop(seq_id)
        return seq_id

    def step(
        self,
        scheduled: Sequence[ScheduledSequence],
        new: Sequence[NewSequence] = (),
        finished: Sequence[int] = (),
    ) -> BatchResult:
        batch = Batch(
            step=next(self.steps),
            new=tuple(new),
            scheduled=tuple(scheduled),
            finished=tuple(finished),
        )
        results = on_every_rank(self._groups, lambda g: self.runners[g.rank].execute(batch))
        for other in results[1:]:
            assert other == BatchResult(step=batch.step), "only rank 0 answers with tokens"
        for token in results[0].tokens:
            self.results.setdefault(token.seq_id, []).append(token.token_id)
        return results[0]

    def token_ids_on(self, rank: int, seq_id: int) -> list[int]:
        return self.runners[rank]._sequences[seq_id].token_ids

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, chunk: int = 10**6
    ) -> list[list[int]]:
        """Generate greedily; each step runs a chunk of every prompt, or a token of every output."""
        new = [new_sequence(i, p) for i, p in enumerate(prompts)]
        progress = [0] * len(prompts)
        ends = [len(p) + num_tokens - 1 for p in prompts]
        while any(p < e for p, e in zip(progress, ends, strict=True)):
            scheduled = []
            for i, prompt in enumerate(prompts):
                if progress[i] >= ends[i]:
                    continue
                num = min(chunk, len(prompt) - progress[i]) if progress[i] < len(prompt) else 1
                samples = progress[i] + num >= len(prompt)
                scheduled.append(self.schedule(i, progress[i], num, samples=samples))
                progress[i] += num
            self.step(scheduled, new)
            new = []
        return [self.results[i] for i in range(len(prompts))]

    def _runner(self, group: TPGroup) -> ModelRunner:
        placement = Placement(device=torch.device("cpu"), dtype=self.dtype)
        config = worker_config(self.checkpoint.config, block_size=self.block_size)
        model = load_decoder(self.checkpoint, group, placement)
        runner = ModelRunner(config, model, group, placement, self.sampler)
        runner.allocate_cache(NUM_BLOCKS)
        return runner


def load_decoder(
    checkpoint: Checkpoint, group: TPGroup, placement: Placement = FLOAT32_CPU
) -> Decoder:
    model = Decoder(checkpoint.config, group, placement)
    reader = checkpoint.reader()
    model.load(reader)
    reader.check_all_read()
    return model


def logits_at_every_position(
    checkpoint: Checkpoint,
    tp: int,
    token_ids: list[int],
    chunks: Sequence[int] = (),
    placement: Placement = FLOAT32_CPU,
) -> Tensor:
    """Return rank 0's logits_TV of one sequence, run in chunks of these sizes; () is one."""
    sizes = chunks or (len(token_ids),)
    assert sum(sizes) == len(token_ids)

    def run(group: TPGroup) -> Tensor | None:
        return _chunked_logits(checkpoint, group, token_ids, sizes, placement)

    logits_TV = on_every_rank(thread_groups(tp), run)[0]
    assert logits_TV is not None
    return logits_TV


@torch.inference_mode()
def _chunked_logits(
    checkpoint: Checkpoint,
    group: TPGroup,
    token_ids: list[int],
    sizes: Sequence[int],
    placement: Placement,
) -> Tensor | None:
    config = checkpoint.config
    model = load_decoder(checkpoint, group, placement)
    heads = shard_heads(config.num_heads, config.num_kv_heads, group.rank, group.size)
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        num_kv_heads=heads.num_kv_heads,
        head_dim=config.head_dim,
        placement=placement,
    )
    builder = InputBuilder(config, heads, cache, placement)
    # Blocks in falling order: nothing may take them for neighbours.
    state = SequenceState(
        spec=new_sequence(0, token_ids),
        token_ids=list(token_ids),
        block_ids=list(range(NUM_BLOCKS - 1, -1, -1)),
    )
    pieces = []
    start = 0
    for size in sizes:
        scheduled = ScheduledSequence(
            seq_id=0, start=start, num_tokens=size, new_block_ids=(), samples=False
        )
        inputs = builder.build([scheduled], {0: state})
        x_TD = model(inputs.input_ids_T, inputs.positions_T, inputs.attention)
        pieces.append(model.logits(x_TD))
        start += size
    return None if group.rank else torch.cat([p for p in pieces if p is not None])
