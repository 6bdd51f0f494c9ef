"""Whether a sequence ends with its newest token; whoever has the text finds the stop strings."""

from __future__ import annotations

from typing import NamedTuple

from llmrt.outputs import FinishReason
from llmrt.scheduler.request import Sequence


class Ending(NamedTuple):
    """Whether and how a sequence ends."""

    finish_reason: FinishReason | None
    stop_reason: int | None = None
    """The stop id; None for EOS and for a length."""


_GOES_ON = Ending(None)
_EOS = Ending("stop")
_LENGTH = Ending("length")


def ending(sequence: Sequence, token_id: int) -> Ending:
    """Return whether and how *sequence* ends with *token_id*, its newest output token.

    EOS and stop ids count once `min_tokens` tokens stand before them. EOS comes before a stop id,
    both before a length.
    """
    request = sequence.request
    num_output = len(sequence.output_token_ids)
    if num_output > request.params.min_tokens:
        if token_id in request.end_token_ids:
            return _EOS
        if token_id in request.stop_token_ids:
            return Ending("stop", token_id)
    return _LENGTH if num_output >= sequence.max_output_tokens else _GOES_ON
