"""One rank as its guard holds it: a pid, and pipes for what it prints and for its stacks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llmrt.runtime.events import Output, Stream
from llmrt.runtime.line_buffer import LineBuffer, decode

_READ_BYTES = 1 << 16
_LAST_READS = 16
"""A pipe holds 64 KiB: after a rank's end more comes only from a surviving child of its own."""


class ReadEnd:
    """The reading end of a pipe. Never blocks; closes itself at the end."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self.is_open = True

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._fd

    def read(self) -> bytes:
        """Return what can be read now; nothing where there is nothing, or will never be."""
        if not self.is_open:
            return b""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self.close()
        return data

    def close(self) -> None:
        """Release the descriptor."""
        if self.is_open:
            self.is_open = False
            os.close(self._fd)


class OutputPipe:
    """What one process prints on one stream, cut into lines."""

    def __init__(self, rank: int | None, stream: Stream, fd: int) -> None:
        self._rank = rank
        self._stream: Stream = stream
        self.end = ReadEnd(fd)
        self._lines = LineBuffer()

    def read(self, *, may_forward: bool = True) -> Output | None:
        """Return the lines that are complete now; with `may_forward` false, count and drop them."""
        data = self.end.read()
        lines = self._lines.feed(data) if data else b""
        if not self.end.is_open:
            lines += self._lines.finish()
        return self._pass_on(lines, may_forward)

    def read_rest(self) -> list[Output]:
        """Return what is left after its process has ended."""
        outputs = [self.read() for _ in range(_LAST_READS)]
        rest = self._lines.finish()
        if rest or self._lines.num_dropped_lines:
            outputs.append(self._output(rest))
        return [output for output in outputs if output is not None]

    def tail(self) -> tuple[str, ...]:
        """Return the last lines."""
        return self._lines.tail()

    def take_drops(self) -> Output | None:
        """Return how many lines were dropped and not told of, where there are any."""
        return self._output(b"") if self._lines.num_dropped_lines else None

    def _pass_on(self, lines: bytes, may_forward: bool) -> Output | None:
        if not lines:
            return None
        if not may_forward:
            self._lines.drop(lines)
            return None
        return self._output(lines)

    def _output(self, lines: bytes) -> Output:
        num_dropped = self._lines.take_num_dropped()
        return Output(
            rank=self._rank,
            stream=self._stream,
            text=decode(lines),
            num_dropped_lines=num_dropped,
        )


@dataclass(kw_only=True)
class RankProcess:
    """One worker process."""

    rank: int
    pid: int
    stdout: OutputPipe
    stderr: OutputPipe
    stacks: ReadEnd
    has_ended: bool = False
    """Whether it was reaped: until then its pid is its own and may be signalled."""
