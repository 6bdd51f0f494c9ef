"""What the verbs of an engine return. Names and meanings of the generation outputs are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: EOS, stop id or stop string; `length`: a limit was reached; `abort`: cancelled."""

EndedBy = Literal["asked", "SIGTERM", "SIGKILL", "already gone"]
"""The rung of the stop ladder at which a worker ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, from the raw logits."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """One mapping per token of `token_ids`; the sampled token is always in it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it; None for EOS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """Everything generated for one prompt."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed again, thanks to the prefix cache."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finished(self) -> bool:
        """Whether every completion has its finish reason."""
        return all(o.finish_reason is not None for o in self.outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Increment:
    """What is new in a streamed completion; the joined increments equal the whole."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the `n` completions this belongs to."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How likely the model finds a continuation: the raw log-probability of each of its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    """By token: its place among all tokens; 1 for the most likely one."""

    @classmethod
    def of(cls, output: RequestOutput, first: int) -> Score:
        """Return the score of the prompt tokens from number *first* on."""
        token_ids = output.prompt_token_ids[first:]
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[-len(token_ids) :]
        found = [e[t] for t, e in zip(token_ids, entries, strict=True) if e is not None]
        return cls(
            token_ids=token_ids,
            logprobs=tuple(entry.logprob for entry in found),
            ranks=tuple(entry.rank for entry in found),
        )

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have generated it."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """One worker process, as the engine knows it now."""

    rank: int
    pid: int
    host: str
    device: str
    """`cpu` or `cuda:0`; empty until the worker has said so."""
    state: Literal["starting", "running", "stopping", "exited"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCloseReport:
    """How one worker ended."""

    rank: int
    pid: int
    group_destroyed: bool
    """Whether it said that its collective group is destroyed (true where it had none)."""
    ended_by: EndedBy
    exit_code: int | None
    """Negative for a signal, as in subprocess; None where nobody could tell."""
    seconds: float
    """From the start of `close()` until it was reaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReport:
    """How an engine ended. Everything in it has ended."""

    workers: tuple[WorkerCloseReport, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEntry:
    """One thing that happened while an engine started."""

    seconds: float
    """Since `open()` was called."""
    rank: int | None
    """None for what the engine or its guard did."""
    phase: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot of what an engine is doing."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_steps: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    details: dict[str, float] = field(default_factory=dict[str, float])
