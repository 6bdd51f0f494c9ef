"""All that crosses between the driver and a worker: commands, their replies, Batch and BatchResult.

Plain data only: ints, floats, strings, bytes, tuples and dataclasses of them. No tensors.

    driver                                   worker
      │ Load ───────────────────────────────► │  reads its shard
      │ ◄─────────────────────── LoadReport   │  of every rank; num_blocks = min(...)
      │ AllocateCache(num_blocks) ──────────► │
      │ ◄──────────────────────────── Done    │
      │ Execute(batch) ─────────────────────► │  the step; tokens are sampled on rank 0
      │ ◄───────────────────── BatchResult    │
      │ CallFunction(payload) ──────────────► │  collective_rpc, apply_model
      │ ◄── FunctionReturned | FunctionRaised │
      │ OpenWeights or WeightsChunk, … ─────► │  new weights, checked before they are used
      │ ◄─────────────── Done | WeightsRefused│
      │ ApplyWeights or DropWeights ────────► │
      │ Sleep, later Wake(num_blocks) ──────► │  gives its memory away; gets it back
      │ Stop ───────────────────────────────► │  ends the worker
      │ ◄───────────────────────── Stopped    │
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from llmrt.errors import RankFailure
from llmrt.sampling import SamplingParams

Row = TypeVar("Row", bound=tuple[Any, ...])


def row_maker(row_type: type[Row]) -> Callable[[tuple[Any, ...]], Row]:
    """Return what makes a named tuple of the tuple of all its fields.

    Its own constructor is a Python function, which takes twice as long.
    """
    return partial(cast("Any", tuple).__new__, row_type)


# ---- commands and their replies ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Join the collective group and load this rank's shard of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one worker measured after loading its shard."""

    rank: int
    device: str
    """`cpu` or `cuda:0`."""
    free_bytes: int
    """Memory this rank may spend on KV blocks."""
    block_bytes: int
    """Size of one KV block, all layers of this shard."""
    weight_bytes: int
    dtype: str
    num_threads: int

    @property
    def num_blocks(self) -> int:
        """Return how many KV blocks fit on this worker."""
        return self.free_bytes // self.block_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocateCache:
    """Allocate the KV cache; the same number of blocks on every rank."""

    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Reply to a command that has nothing to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFunction:
    """Run a function of the user's, with the worker as its first argument."""

    payload: bytes
    """cloudpickle of (function, args, kwargs)."""
    on_model: bool = False
    """Whether the first argument is the rank's module instead (apply_model)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionReturned:
    """The user's function returned."""

    payload: bytes
    """cloudpickle of the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionRaised:
    """The user's function raised, or its result could not be pickled; the worker goes on."""

    failure: RankFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenWeights:
    """Begin an update: open a checkpoint and check that it fits the model."""

    update_id: int
    weights: str
    """As WorkerConfig has it."""
    gguf_index: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsChunk:
    """Some bytes of a new tensor; its chunks come in order, one tensor after another."""

    update_id: int
    name: str
    """As transformers names it."""
    dtype: str
    """`float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    num_bytes: int
    """Of the whole tensor."""
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyWeights:
    """Let the layers load what an update has brought."""

    update_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DropWeights:
    """Forget what an update has brought."""

    update_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsRefused:
    """The weights do not fit the model, or cannot be read; it is as it was."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleep:
    """Free the KV cache, and move the weights to host memory or drop them."""

    drops_weights: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Wake:
    """Bring the weights back, from host memory or the checkpoint, and allocate the KV cache."""

    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Destroy the group, free cache and weights, answer Stopped and exit."""

    destroy_group: bool = True
    """False where a peer is dead: its group cannot be left in an orderly way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """Last words of a worker."""

    rank: int
    group_destroyed: bool


# ---- one step ----


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSequence:
    """A sequence that the workers have not seen, or had to forget when it was preempted."""

    seq_id: int
    token_ids: tuple[int, ...]
    """All its tokens: the prompt, then what was generated before a preemption."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Of its random numbers: params.seed, or one that the engine drew."""
    eos_token_ids: tuple[int, ...]
    """Ends that `min_tokens` keeps out, beside params.stop_token_ids; empty with ignore_eos."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """params.bad_words as token ids."""
    logits_processors: bytes = b""
    """cloudpickle of params.logits_processors, which are taken out of `params`; empty for none."""
    grammar: str = ""
    """params.structured_output, compiled, which is taken out of `params`; empty for none."""
    scores_from: int = 0
    """With params.prompt_logprobs: the first prompt token that is scored."""


class ScheduledSequence(NamedTuple):
    """What one sequence does in one step. A named tuple: a step has one for each sequence."""

    seq_id: int
    start: int
    """Its tokens before this one are in the KV cache."""
    num_tokens: int
    """Tokens [start, start + num_tokens) run in this step."""
    new_block_ids: tuple[int, ...]
    """Appended to its block table before the step."""
    samples: bool
    """Whether its last token is among them, so that the step samples the next."""


new_scheduled = row_maker(ScheduledSequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step: what every worker is told. Tokens and block tables stay in the workers."""

    step: int
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    finished: tuple[int, ...] = ()
    """Sequences to forget before this step; also those just preempted."""

    @property
    def num_tokens(self) -> int:
        """Tokens that run in this step."""
        return sum(s.num_tokens for s in self.scheduled)

    def __reduce__(self) -> tuple[object, ...]:
        # By columns: pickling a thousand small objects one by one takes twenty times as long.
        return _batch_of_columns, (self.step, self.new, _columns(self.scheduled), self.finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position, likeliest first; the actual token is among them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class SampledToken(NamedTuple):
    """The next token of one sequence."""

    seq_id: int
    token_id: int
    logprob: float | None = None
    """Raw log-probability of the token, where logprobs were asked for."""
    top: TokenLogprobs | None = None


new_sampled_token = row_maker(SampledToken)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens [start, start + len(positions)) of one sequence."""

    seq_id: int
    start: int
    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFailure:
    """A sequence that cannot go on: its logits processor raised, or no token is left to sample."""

    seq_id: int
    failure: RankFailure
    by_user_code: bool = True
    """Whether it was a function of the user's that raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """What one step produced. Only rank 0's holds tokens."""

    step: int
    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[SequenceFailure, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        columns = _columns(self.tokens)
        return _result_of_columns, (self.step, columns, self.prompt_logprobs, self.failures)


def _columns(rows: tuple[tuple[object, ...], ...]) -> tuple[tuple[object, ...], ...]:
    return tuple(zip(*rows, strict=True))


def _rows(row_type: type[Row], columns: tuple[tuple[Any, ...], ...]) -> tuple[Row, ...]:
    return tuple(map(row_maker(row_type), zip(*columns, strict=True)))


def _batch_of_columns(
    step: int,
    new: tuple[NewSequence, ...],
    columns: tuple[tuple[Any, ...], ...],
    finished: tuple[int, ...],
) -> Batch:
    return Batch(step=step, new=new, scheduled=_rows(ScheduledSequence, columns), finished=finished)


def _result_of_columns(
    step: int,
    columns: tuple[tuple[Any, ...], ...],
    prompt_logprobs: tuple[PromptLogprobs, ...],
    failures: tuple[SequenceFailure, ...],
) -> BatchResult:
    return BatchResult(
        step=step,
        tokens=_rows(SampledToken, columns),
        prompt_logprobs=prompt_logprobs,
        failures=failures,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execute:
    """Run one step."""

    batch: Batch = field(repr=False)


WeightsCommand = OpenWeights | WeightsChunk | ApplyWeights | DropWeights
Command = Load | AllocateCache | Execute | CallFunction | WeightsCommand | Sleep | Wake | Stop
Answer = (
    LoadReport | Done | BatchResult | FunctionReturned | FunctionRaised | WeightsRefused | Stopped
)
