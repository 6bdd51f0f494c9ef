"""StopStrings: where a text that comes in pieces ends, and what of it can be shown before."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first, and holds back what may be the beginning of one."""

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
        """Return start, end and string of the match that ends first in the new part."""
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._recent) - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop), stop))
        # The longest of those that end there.
        return min(found, key=lambda match: (match[1], match[0]), default=None)

    def _length_to_hold(self, text: str) -> int:
        if self._include:
            return 0
        for length in range(min(self._reach, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return length
        return 0
