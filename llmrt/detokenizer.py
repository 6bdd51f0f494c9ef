"""From token ids to text while they are generated: what can be shown now, and where a stop string ends it.

    token ids ─► IncrementalDetokenizer ─► StopStrings ─► text that will not change any more
                 holds parts of characters  holds what may become a stop string

TextStream is both, for one completion. Streamed or not, a completion's text is made here, so the two are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrt.sampling import SamplingParams
from llmrt.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST_PENDING = 16
"""So many tokens that end in no whole character are garbage; their text is then settled piece by piece."""
SETTLED_AFTER = 4
"""Tokens that follow a point in the ids and hold, with a byte each, any character that began before it."""


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

    Append every token whose text counts. A token that ends the completion (EOS, a stop id) belongs to the text only
    with `include_stop_str_in_output`.
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
        """Return the text that these tokens settle. A stop string counts once `min_tokens` are there."""
        assert self.stop is None, "the text has ended"
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            pieces.append(self._settle(self._detokenizer.append(token_id)))
            if self.stop is not None:
                return TextDelta(text="".join(pieces), stop=self.stop, num_tokens=count)
        return TextDelta(text="".join(pieces), num_tokens=len(token_ids))

    def finish(self) -> str:
        """Return what was held back, now that no token follows. A stop string in it still ends the text."""
        if self.stop is not None:
            return ""
        text = self._settle(self._detokenizer.finish())
        return text if self.stop is not None else text + self._stops.finish()

    def _settle(self, new: str) -> str:
        text, self.stop = self._stops.feed(new, may_stop=self._num_tokens >= self._min_tokens)
        return text


class IncrementalDetokenizer:
    """Turns ids into text one by one; the joined pieces equal the decoded whole.

    The whole is what `prompt_ids` and the ids decode to beyond `prompt_ids`: where a tokenizer drops the space that
    begins a text, a completion keeps its own. Text that ends inside a character is held until the character is whole.
    The cost of a token does not grow with the text: only a window of ids is decoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._enabled = params.detokenize
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        """Settled ids that give the context, then pending ones."""
        self._num_settled = 0
        self._settled_text = ""
        if self._enabled:
            self._start_with(prompt_ids)

    def append(self, token_id: int) -> str:
        """Return the text that this token settles; often its own, empty inside a character."""
        if not self._enabled or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        # Tokenizers with byte tokens decode a run of them as a whole, so its text is open until it ends.
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._decode(self._window)
        if not text.endswith(UNKNOWN):
            return self._advance(len(self._window), text)
        if len(self._window) - self._num_settled > LONGEST_PENDING:
            return self._advance_through_garbage(text)
        return ""

    def finish(self) -> str:
        """Return the text of the ids that are pending, whole characters or not."""
        if len(self._window) == self._num_settled:
            return ""
        return self._advance(len(self._window), self._decode(self._window))

    def _start_with(self, prompt_ids: Sequence[int]) -> None:
        ids = [token_id for token_id in prompt_ids if token_id not in self._skipped]
        size = SETTLED_AFTER + 1
        # The context must have text: with none, the completion would count as the beginning of the text.
        while size < len(ids) and not self._decode(ids[-size:]):
            size *= 2
        self._window = ids[-size:]
        self._num_settled = len(self._window)
        self._settled_text = self._decode(self._window)

    def _advance(self, end: int, text: str) -> str:
        """Settle the window's ids up to *end*, which decode to *text*; they become the context of what follows."""
        new = text[len(self._settled_text) :]
        if new:
            self._window = self._window[self._num_settled :]
            end -= self._num_settled
            self._settled_text = self._decode(self._window[:end])
        self._num_settled = end
        return new

    def _advance_through_garbage(self, text: str) -> str:
        # One of these ends lies between characters, so that its text begins the whole text.
        last = len(self._window) - SETTLED_AFTER
        for end in range(last, last - SETTLED_AFTER, -1):
            settled = self._decode(self._window[:end])
            if text.startswith(settled):
                return self._advance(end, settled)
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopStrings:
    """Finds the stop string that ends first in a text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str], *, include_in_text: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_text
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._recent = ""
        """The last `_reach` characters, in which a stop string may have begun."""
        self._num_held = 0
        """How many of them have not been returned."""

    def feed(self, new: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Return the text that is settled, and the stop string that ends it, if one does.

        Args:
            new: What was added to the text.
            may_stop: Whether a stop string that ends in `new` counts.
        """
        if not self._stops:
            return new, None
        text = self._recent + new
        first_unsent = len(self._recent) - self._num_held
        stop = self._find(text) if may_stop else None
        if stop is not None:
            start, end, which = stop
            return text[first_unsent : end if self._include else start], which
        self._num_held = self._length_to_hold(text)
        self._recent = text[max(0, len(text) - self._reach) :]
        return text[first_unsent : len(text) - self._num_held], None

    def finish(self) -> str:
        """Return the text that is held back."""
        held = self._recent[len(self._recent) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """Return start, end and string of the match that ends first, the longest of those, in the new part."""
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._recent) - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop), stop))
        return min(found, key=lambda match: (match[1], match[0]), default=None)

    def _length_to_hold(self, text: str) -> int:
        if self._include:
            return 0
        for length in range(min(self._reach, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return length
        return 0
