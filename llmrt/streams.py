"""The increments of one request, from the engine's thread to whoever reads them.

A slow consumer costs no more memory than the output itself: what it has not taken yet is joined
into one increment per completion.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llmrt.interruption import INTERRUPTIONS
from llmrt.outputs import FinishReason, Increment, Logprob
from llmrt.ownership import check_owner


@dataclass(slots=True)
class _Pending:
    """What is new in one completion since its consumer last looked."""

    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, increment: Increment) -> None:
        self.text.append(increment.text)
        self.token_ids.extend(increment.token_ids)
        if increment.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(increment.logprobs)
        self.finish_reason = increment.finish_reason
        self.stop_reason = increment.stop_reason

    def joined(self, index: int) -> Increment:
        return Increment(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class StreamBuffer:
    """Joins increments until they are taken; tells its consumer, through a callback, to look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._on_news: Callable[[], None] = lambda: None

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call *callback*, from the engine's thread, when there is something to take again."""
        self._on_news = callback

    def push(self, increment: Increment) -> None:
        """Add what is new."""
        with self._lock:
            was_empty = not self._pending
            self._pending.setdefault(increment.index, _Pending()).add(increment)
        if was_empty:
            self._on_news()

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more comes; the consumer meets *error* after what is pending."""
        with self._lock:
            self._ended, self._error = True, error
        self._on_news()

    def take(self) -> Increment | None:
        """Return what is new, or None if nothing is yet.

        Raises:
            StopIteration: the request is over and everything was taken.
            LlmrtError: what the request ended with.
        """
        with self._lock:
            if self._pending:
                index = next(iter(self._pending))
                return self._pending.pop(index).joined(index)
            if not self._ended:
                return None
            if self._error is not None:
                raise self._error
            raise StopIteration


class Reading:
    """The reading end of a buffer: dropped, it aborts the request."""

    def __init__(self, buffer: StreamBuffer, abort: Callable[[], None], owner: object) -> None:
        self._buffer = buffer
        self._owner = owner  # an engine lives as long as somebody reads from it
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, abort)
        self._finalizer.atexit = False

    def take(self) -> Increment | None:
        """Return what `StreamBuffer.take` does; after its end there is nothing left to abort."""
        check_owner(self._owner_pid)
        try:
            return self._buffer.take()
        except BaseException:
            self._finalizer.detach()
            raise

    def abort(self) -> None:
        """Abort the request unless it is over."""
        if self._finalizer.alive:
            self._finalizer()
            self._buffer.end()


class Stream(Iterator[Increment]):
    """Iterates over the increments of one request; dropping or closing it aborts the request."""

    def __init__(self, buffer: StreamBuffer, abort: Callable[[], None], owner: object) -> None:
        self._reading = Reading(buffer, abort, owner)
        self._news = threading.Event()
        buffer.on_news(self._news.set)

    def __next__(self) -> Increment:
        """Wait for what is new and return it."""
        try:
            while (increment := self._take()) is None:
                self._news.wait()
        except INTERRUPTIONS:  # whoever keeps its traceback would keep the request running
            self._reading.abort()
            raise
        return increment

    def _take(self) -> Increment | None:
        self._news.clear()
        return self._reading.take()

    def close(self) -> None:
        """Abort the request if it still runs; iteration ends after what is pending."""
        self._reading.abort()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
