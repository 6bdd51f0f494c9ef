"""Cuts what a process prints into whole lines and remembers the last of them."""

from __future__ import annotations

from collections import deque

NUM_KEPT_LINES = 50
_MAX_LINE_BYTES = 1 << 16
_MAX_KEPT_LINE_BYTES = 4096


class LineBuffer:
    """The output of one process on one stream."""

    def __init__(self) -> None:
        self._partial = b""
        self._tail: deque[bytes] = deque(maxlen=NUM_KEPT_LINES)
        self.num_dropped_lines = 0

    def feed(self, data: bytes) -> bytes:
        """Return the lines that these bytes complete, with their ends."""
        whole, newline, rest = data.rpartition(b"\n")
        if not newline and len(self._partial) + len(data) < _MAX_LINE_BYTES:
            self._partial += data
            return b""
        if not newline:  # a line without end is cut, or it would fill our memory
            whole, newline, rest = data, b"\n", b""
        lines = self._partial + whole + newline
        self._partial = rest
        self._remember(lines)
        return lines

    def finish(self) -> bytes:
        """Return what was printed after the last line's end, as a line."""
        return self.feed(b"\n") if self._partial else b""

    def drop(self, lines: bytes) -> None:
        """Count lines that nobody will see."""
        self.num_dropped_lines += lines.count(b"\n")

    def take_num_dropped(self) -> int:
        """Return how many lines were dropped since this was last asked."""
        num, self.num_dropped_lines = self.num_dropped_lines, 0
        return num

    def tail(self) -> tuple[str, ...]:
        """Return the last lines, an unfinished one too."""
        kept = [*self._tail, self._partial] if self._partial else list(self._tail)
        return tuple(decode(line) for line in kept[-NUM_KEPT_LINES:])

    def _remember(self, lines: bytes) -> None:
        last = lines[:-1].rsplit(b"\n", NUM_KEPT_LINES)[-NUM_KEPT_LINES:]
        self._tail.extend(line[:_MAX_KEPT_LINE_BYTES] for line in last)


def decode(data: bytes) -> str:
    """Return text, whatever the bytes are."""
    return data.decode("utf-8", errors="backslashreplace")
