"""Request and Sequence: what was asked for, and how far each of its completions is.

A Request is one prompt with its parameters. It has `n` Sequences: one per completion, each with its
own output tokens, its own block table and a number (`seq_id`) by which the workers know it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from llmrt.errors import RequestError
from llmrt.messages import NewSequence
from llmrt.outputs import FinishReason
from llmrt.sampling import SamplingParams


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Not known to the workers: new, preempted, or parked until another has computed a prefix that
    they share."""
    RUNNING = "running"
    """Has a block table and a place among the `max_num_seqs`."""
    FINISHED = "finished"
    """Has its finish reason. Steps in flight may still run it; what they say of it is ignored."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, as the engine hands it to the scheduler, and the state of its completions.

    Raises:
        RequestError: the priority is not a whole number.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """`params.seed`, or one that the engine drew. Completion i uses `seed + i`."""
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower goes first."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: bytes = b""
    """cloudpickle of `params.logits_processors`; the callables themselves do not travel."""
    grammar: str = ""
    """`params.structured_output`, compiled."""
    scores_from: int = 0
    """With prompt_logprobs: the first prompt token that is scored; those before may be cached."""
    sequences: tuple[Sequence, ...] = field(init=False, default=())
    """Its `n` completions; made when the scheduler takes the request."""
    num_unfinished: int = field(init=False)
    """Completions that have no finish reason yet."""
    num_cached_tokens: int = field(init=False, default=0)
    """Prompt tokens that the first completion found in the prefix cache."""
    end_token_ids: frozenset[int] = field(init=False)
    """EOS ids that count: none with ignore_eos."""
    stop_token_ids: frozenset[int] = field(init=False)
    all_end_ids: frozenset[int] = field(init=False)
    """Both of these."""

    def __post_init__(self) -> None:
        _require_whole_number(self.request_id, self.priority)
        self.end_token_ids = frozenset(() if self.params.ignore_eos else self.eos_token_ids)
        self.stop_token_ids = frozenset(self.params.stop_token_ids or ())
        self.all_end_ids = self.end_token_ids | self.stop_token_ids
        self.num_unfinished = self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether every completion has its finish reason."""
        return not self.num_unfinished


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One completion of a request."""

    request: Request
    index: int
    """Which of the request's `n` completions this is."""
    seq_id: int
    """Counts sequences in order of arrival; never used twice by one scheduler."""
    max_output_tokens: int
    """`max_tokens`, or less where the length limit comes first."""
    num_prompt_tokens: int = field(init=False)
    max_run_tokens: int = field(init=False)
    """Tokens that are ever run: nothing is sampled after the last one of the longest completion."""
    rank: tuple[int, int, int] = field(init=False)
    """Sort key of the order in which sequences are served: smaller first."""
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    needs_prompt_logprobs: bool = field(init=False)
    """Whether prompt log-probabilities are still to be computed; only the first completion does
    it."""
    num_prompt_logprobs: int = 0
    """Prompt positions before this one have been passed on."""
    was_admitted: bool = False
    """Whether it has run before, so that running it again comes from a preemption."""

    block_ids: list[int] = field(default_factory=list[int])
    """Its block table. Outlives `RUNNING` while a step in flight can still touch the blocks."""
    num_slots: int = 0
    """How many tokens those blocks hold."""
    num_computed_tokens: int = 0
    """Tokens in the KV cache once every step in flight has run."""
    num_tokens_in_workers: int = field(init=False)
    """Its tokens, with those that steps in flight sample, which are not known here yet."""
    last_step: int = -1
    """The number of the last step that runs it, in flight or done; -1 for none."""
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    """Chained hashes of its first full blocks; computed when they are needed."""
    num_registered_blocks: int = 0
    """Its first blocks that the prefix cache knows of."""
    registers_blocks: bool = False
    """Whether its full blocks may go into the prefix cache."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.request.num_prompt_tokens
        self.num_tokens_in_workers = self.num_prompt_tokens
        self.max_run_tokens = self.num_prompt_tokens + max(0, self.max_output_tokens - 1)
        self.rank = (1, self.request.priority, self.seq_id)
        self.needs_prompt_logprobs = (
            self.index == 0 and self.request.params.prompt_logprobs is not None
        )

    @property
    def is_finished(self) -> bool:
        """Whether it has its finish reason."""
        return self.status is SequenceStatus.FINISHED

    @property
    def num_tokens(self) -> int:
        """Return how many of its tokens are known here: prompt and output so far."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_tokens_to_run(self) -> int:
        """Return how many tokens are in the workers and still have to run."""
        in_workers, most = self.num_tokens_in_workers, self.max_run_tokens
        return (in_workers if in_workers < most else most) - self.num_computed_tokens

    @property
    def first_token_to_run(self) -> int:
        """Return the first token that must run, whatever is cached: its logits are needed."""
        if self.needs_prompt_logprobs:
            return max(0, self.request.scores_from - 1)
        return self.num_tokens - 1

    def promote(self) -> None:
        """Put it before every sequence that is not promoted, whatever their priorities."""
        self.rank = (0, 0, self.seq_id)

    def slice_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return its tokens [start, stop), prompt and output taken as one."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return tuple(self.output_token_ids[start - num_prompt : stop - num_prompt])
        prompt = self.request.prompt_token_ids[start:stop]
        return prompt + tuple(self.output_token_ids[: max(0, stop - num_prompt)])

    def describe(self) -> NewSequence:
        """Return what the workers must know to run it from the beginning."""
        request = self.request
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=self.slice_tokens(0, self.num_tokens),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self._params_for_workers(),
            seed=request.seed + self.index,
            eos_token_ids=tuple(sorted(request.end_token_ids)),
            bad_word_ids=request.bad_word_ids,
            logits_processors=request.logits_processors,
            grammar=request.grammar,
            scores_from=request.scores_from,
        )

    def _params_for_workers(self) -> SamplingParams:
        params = self.request.params
        keeps_logprobs = self.needs_prompt_logprobs or params.prompt_logprobs is None
        if keeps_logprobs and params.logits_processors is None:
            return params
        return replace(
            params,
            logits_processors=None,
            prompt_logprobs=params.prompt_logprobs if keeps_logprobs else None,
        )


def _require_whole_number(request_id: str, priority: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(
            f"Request {request_id!r}: priority must be a whole number, not {priority!r}."
        )
