"""TextStream: the text of one completion while it is generated, and where it ends.

    token ids ─► IncrementalDetokenizer ─► StopStrings ─► text that will not change any more
                 holds parts of characters  holds what may become a stop string

Streamed or not, a completion's text is made here, so the two are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrt.detokenizer import IncrementalDetokenizer
from llmrt.sampling import SamplingParams
from llmrt.stop_strings import StopStrings
from llmrt.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What some tokens added to the text."""

    text: str
    stop: str | None = None
    """The stop string that ended the text."""
    num_tokens: int
    """How many of the tokens count: those up to the one in which the stop string ended."""


class TextStream:
    """The text of one completion as it grows.

    Append every token whose text counts. A token that ends the completion (EOS, a stop id) belongs
    to the text only with `include_stop_str_in_output`.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_ids)
        self._stops = StopStrings(
            params.stop_strings, include_in_text=params.include_stop_str_in_output
        )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.stop: str | None = None
        """The stop string that ended the text; nothing more may be appended then."""

    def append(self, token_ids: Sequence[int]) -> TextDelta:
        """Return the text that these tokens settle; a stop string counts from `min_tokens` on."""
        assert self.stop is None, "the text has ended"
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            pieces.append(self._settle(self._detokenizer.append(token_id)))
            if self.stop is not None:
                return TextDelta(text="".join(pieces), stop=self.stop, num_tokens=count)
        return TextDelta(text="".join(pieces), num_tokens=len(token_ids))

    def finish(self) -> str:
        """Return what was held back, now that no token follows; it may still hold a stop string."""
        if self.stop is not None:
            return ""
        text = self._settle(self._detokenizer.finish())
        return text if self.stop is not None else text + self._stops.finish()

    def _settle(self, new: str) -> str:
        text, self.stop = self._stops.feed(new, may_stop=self._num_tokens >= self._min_tokens)
        return text
