"""IncrementalDetokenizer: from token ids to text, one id at a time."""

from __future__ import annotations

from collections.abc import Sequence

from llmrt.sampling import SamplingParams
from llmrt.tokenizer import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LONGEST_PENDING = 16
"""So many tokens without a whole character are garbage, whose text is settled piece by piece."""
SETTLED_AFTER = 4
"""Tokens enough, with a byte each, to end any character that began before them."""


class IncrementalDetokenizer:
    """Turns ids into text one by one; the joined pieces equal the decoded whole.

    The whole is what `prompt_ids` and the ids decode to beyond `prompt_ids`: where a tokenizer
    drops the space that begins a text, a completion keeps its own. Text that ends inside a
    character is held until the character is whole. The cost of a token does not grow with the text:
    only a window of ids is decoded.
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
        # A run of byte tokens is decoded as a whole, so its text is open until the run ends.
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
        self._window = ids[-SETTLED_AFTER - 1 :]
        self._num_settled = len(self._window)
        self._settled_text = self._decode(self._window)

    def _advance(self, end: int, text: str) -> str:
        """Settle the window's ids up to *end*, which decode to *text*, as context for the next."""
        # Shorter than the settled text where a prompt, given as ids, ended inside a character.
        new = text[_shared_length(self._settled_text, text) :]
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


def _shared_length(a: str, b: str) -> int:
    """Return how many characters the two begin with alike."""
    if b.startswith(a):
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
