"""StreamBuffer and Stream: the increments of one request, from the engine's thread to its consumer.

A slow consumer costs no more memory than the output itself: what it has not taken yet is joined
into one increment per completion.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmrt.outputs import FinishReason, Increment, Logprob


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
        """Call *callback*, from the engine's thread, whenever there is something to take."""
        self._on_news = callback

    def push(self, increment: Increment) -> None:
        """Add what is new."""
        with self._lock:
            self._pending.setdefault(increment.index, _Pending()).add(increment)
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


class Stream(Iterator[Increment]):
    """Iterates over the increments of one request; dropping or closing it aborts the request."""

    def __init__(self, buffer: StreamBuffer, abort: Callable[[], None], owner: Any) -> None:
        self._buffer = buffer
        self._owner = owner  # an engine lives as long as somebody reads from it
        self._news = threading.Event()
        buffer.on_news(self._news.set)
        self._finalizer = weakref.finalize(self, abort)
        self._finalizer.atexit = False

    def __next__(self) -> Increment:
        """Wait for what is new and return it."""
        while True:
            self._news.clear()
            try:
                increment = self._buffer.take()
            except BaseException:
                self._finalizer.detach()
                raise
            if increment is not None:
                return increment
            self._news.wait()

    def close(self) -> None:
        """Abort the request if it still runs. Iterating on ends at once."""
        if self._finalizer.alive:
            self._finalizer()
            self._buffer.end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
