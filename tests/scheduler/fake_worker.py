"""A worker without a model: it keeps a KV cache of fingerprints, and checks every one that it
reads.

The fingerprint at a position stands for the keys and values there: it depends on all tokens up to
it. So a wrong block, a stale one, or one that another sequence has written is found at the first
token that attends to it. The next token is a function of the last fingerprint and the seed, which
makes the one right answer easy to compute alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmrt.errors import RankFailure
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
from llmrt.sampling import SamplingParams
from llmrt.scheduler.request import Request

VOCABULARY = 12


def fingerprints(token_ids: Iterable[int]) -> list[int]:
    """Return what the cache holds at each position."""
    chain: list[int] = []
    for token_id in token_ids:
        chain.append(hash((chain[-1] if chain else 0, token_id)))
    return chain


def next_token(
    fingerprint: int, seed: int, num_output: int, params: SamplingParams, eos: Sequence[int]
) -> int:
    """Return the one right next token; like the real sampler, none that may not come before
    min_tokens."""
    banned = {*eos, *(params.stop_token_ids or ())} if num_output < params.min_tokens else set()
    allowed = [t for t in range(VOCABULARY) if t not in banned]
    return allowed[hash((fingerprint, seed)) % len(allowed)]


@dataclass(frozen=True)
class Completion:
    """What a completion has come to."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def generate_alone(request: Request, index: int, length_limit: int) -> Completion:
    """Return what completion *index* must be, generated one token at a time with nothing else
    around."""
    params = request.params
    eos = () if params.ignore_eos else request.eos_token_ids
    room = length_limit - len(request.prompt_token_ids)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    fails_after = int(request.logits_processors or -1)
    output: list[int] = []
    while len(output) < most:
        if len(output) == fails_after:
            return Completion(tuple(output), "failed")
        fingerprint = fingerprints([*request.prompt_token_ids, *output])[-1]
        token = next_token(fingerprint, request.seed + index, len(output), params, eos)
        output.append(token)
        if len(output) > params.min_tokens and token in eos:
            return Completion(tuple(output), "stop")
        if len(output) > params.min_tokens and token in (params.stop_token_ids or ()):
            return Completion(tuple(output), "stop", token)
    return Completion(tuple(output), "length")


@dataclass
class _State:
    spec: NewSequence
    token_ids: list[int]
    num_computed: int | None = None
    """None until the first step says with how many cached tokens it begins."""
    block_ids: list[int] = field(default_factory=list)
    has_failed: bool = False


class FakeWorker:
    """Runs batches as the protocol says, and asserts everything that a real worker must be able to
    rely on."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._cache: list[int | None] = [None] * (num_blocks * block_size)
        self._sequences: dict[int, _State] = {}
        self.num_run_tokens = 0

    @property
    def known_sequences(self) -> set[int]:
        return set(self._sequences)

    def execute(self, batch: Batch) -> BatchResult:
        for seq_id in batch.finished:
            del self._sequences[seq_id]
        for spec in batch.new:
            assert spec.seq_id not in self._sequences, "introduced twice"
            assert spec.params.logits_processors is None
            self._sequences[spec.seq_id] = _State(spec, list(spec.token_ids))
        for item in batch.scheduled:
            self._extend_table(item)
        runs = [(self._sequences[item.seq_id], item) for item in batch.scheduled]
        runs = [(state, item) for state, item in runs if not state.has_failed]
        # All writes, then all reads, as in a layer: a sequence may count on a block that this step
        # fills for another, and none may write what another one reads.
        for state, item in runs:
            self._write(state, item)
        for state, item in runs:
            self._check_reads(state, item.start + item.num_tokens)
        return self._answer(batch.step, runs)

    def used_blocks(self, batch: Batch) -> dict[int, set[int]]:
        """Return, by sequence, the blocks that *batch*, the one just executed, may have read or
        written."""
        return {
            item.seq_id: set(self._sequences[item.seq_id].block_ids) for item in batch.scheduled
        }

    def _extend_table(self, item: ScheduledSequence) -> None:
        state = self._sequences[item.seq_id]
        if state.num_computed is None:
            assert item.start < len(state.token_ids), "nothing left to run"
            assert item.start % self._block_size == 0
            state.num_computed = item.start
        assert item.num_tokens > 0
        assert item.start == state.num_computed, "a gap or an overlap"
        state.block_ids.extend(item.new_block_ids)
        end = item.start + item.num_tokens
        assert end <= len(state.block_ids) * self._block_size, "no room in the block table"
        if not state.has_failed:
            assert end <= len(state.token_ids), "runs a token that does not exist"
        state.num_computed = end

    def _slot(self, state: _State, position: int) -> int:
        block_id = state.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _check_reads(self, state: _State, end: int) -> None:
        expected = fingerprints(state.token_ids[:end])
        found = [self._cache[self._slot(state, p)] for p in range(end)]
        assert found == expected, f"sequence {state.spec.seq_id} reads what is not its own"

    def _write(self, state: _State, item: ScheduledSequence) -> None:
        end = item.start + item.num_tokens
        self.num_run_tokens += item.num_tokens
        chain = fingerprints(state.token_ids[:end])
        for position in range(item.start, end):
            self._cache[self._slot(state, position)] = chain[position]

    def _answer(self, step: int, runs: list[tuple[_State, ScheduledSequence]]) -> BatchResult:
        tokens: list[SampledToken] = []
        logprobs: list[PromptLogprobs] = []
        failures: list[SequenceFailure] = []
        for state, item in runs:
            if state.spec.params.prompt_logprobs is not None:
                logprobs.extend(self._score(state, item))
            if not item.samples:
                continue
            assert item.start + item.num_tokens == len(state.token_ids)
            if len(state.token_ids) - state.spec.num_prompt_tokens == _fails_after(state):
                state.has_failed = True
                failure = RankFailure(rank=0, type_name="ValueError", message="no", traceback="")
                failures.append(SequenceFailure(seq_id=item.seq_id, failure=failure))
            else:
                tokens.append(self._sample(state))
        return BatchResult(
            step=step,
            tokens=tuple(tokens),
            prompt_logprobs=tuple(logprobs),
            failures=tuple(failures),
        )

    def _sample(self, state: _State) -> SampledToken:
        spec = state.spec
        token_id = next_token(
            fingerprints(state.token_ids)[-1],
            spec.seed,
            len(state.token_ids) - spec.num_prompt_tokens,
            spec.params,
            spec.eos_token_ids,
        )
        state.token_ids.append(token_id)
        return SampledToken(seq_id=spec.seq_id, token_id=token_id, logprob=-float(token_id))

    def _score(self, state: _State, item: ScheduledSequence) -> list[PromptLogprobs]:
        first = item.start + 1
        scored = state.token_ids[first : min(first + item.num_tokens, state.spec.num_prompt_tokens)]
        positions = tuple(
            TokenLogprobs(token_ids=(t,), logprobs=(-1.0,), ranks=(1,)) for t in scored
        )
        if not positions:
            return []
        return [PromptLogprobs(seq_id=item.seq_id, start=first, positions=positions)]


def _fails_after(state: _State) -> int:
    return int(state.spec.logits_processors or -1)
