"""A stream of increments for event loops, apart because asyncio is slow to import."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from llmrt.outputs import Increment
from llmrt.streams import Reading, StreamBuffer


class AsyncStream(AsyncIterator[Increment]):
    """Stream, awaited. It belongs to the event loop that runs when it is made."""

    def __init__(self, buffer: StreamBuffer, abort: Callable[[], None], owner: object) -> None:
        self._reading = Reading(buffer, abort, owner)
        self._news = news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell() -> None:  # holds no reference to the stream, which may be dropped
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                loop.call_soon_threadsafe(news.set)

        buffer.on_news(tell)

    async def __anext__(self) -> Increment:
        """Wait for what is new and return it."""
        while True:
            self._news.clear()
            try:
                increment = self._reading.take()
            except StopIteration:
                raise StopAsyncIteration from None
            if increment is not None:
                return increment
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self._reading.abort()  # as an async generator would end
                raise

    async def aclose(self) -> None:
        """Abort the request if it still runs; iteration ends after what is pending."""
        self._reading.abort()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
