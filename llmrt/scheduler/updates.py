"""What the scheduler reports of one step, to whoever assembles the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrt.errors import RankFailure
from llmrt.messages import TokenLogprobs, row_maker
from llmrt.outputs import FinishReason


class TokenUpdate(NamedTuple):
    """A sequence has its next token, and has perhaps ended with it.

    A tuple, for there is one for every token of every sequence: a frozen dataclass takes three
    times as long to make.
    """

    request_id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    """Which of the request's completions this is. It hides `tuple.index`, which has no use here."""
    seq_id: int
    token_id: int
    logprob: float | None = None
    top: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop id that ended it; None for EOS."""


new_token_update = row_maker(TokenUpdate)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobsUpdate:
    """Log-probabilities of prompt tokens from `start` on; each token's come once, in order."""

    request_id: str
    index: int
    seq_id: int
    start: int
    positions: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFinished:
    """A sequence has ended without a token: `max_tokens=0`."""

    request_id: str
    index: int
    seq_id: int
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFailed:
    """A sequence has ended because it could not be sampled.

    Its siblings go on until they are aborted.
    """

    request_id: str
    index: int
    seq_id: int
    failure: RankFailure
    by_user_code: bool = True
    """Whether its logits processor raised."""


Update = TokenUpdate | PromptLogprobsUpdate | SequenceFinished | SequenceFailed
