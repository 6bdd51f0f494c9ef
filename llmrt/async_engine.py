"""AsyncEngine: the verbs of Engine, awaited. It holds an Engine and adds only the waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

from llmrt.async_stream import AsyncStream
from llmrt.engine import Engine, results_of_call, scores_of
from llmrt.intake import Message, Prompt
from llmrt.lifecycle import EngineState
from llmrt.new_weights import WeightsSource
from llmrt.outputs import (
    CloseReport,
    EngineStats,
    RequestOutput,
    Score,
    TimelineEntry,
    WorkerInfo,
)
from llmrt.sampling import SamplingParams
from llmrt.session import RemoteCall
from llmrt.tokenizer import Tokenizer
from llmrt.upkeep import Upkeep

if TYPE_CHECKING:
    import os

    from llmrt.backend_choice import Backend
    from llmrt.runtime.start_method import StartMethod

Result = TypeVar("Result")


class AsyncEngine:
    """Runs one large language model for code that awaits. Takes the options of Engine.

        async with AsyncEngine("path/or/hub-id", tp=2) as llm:
            async for increment in llm.stream("The capital of France is"):
                print(increment.text, end="")

    It is bound to no event loop: each call belongs to the loop it is awaited in. Cancelling a call
    aborts its requests.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._engine = Engine(model, **options)

    # ---- life ----

    async def open(self) -> Self:
        """Start the workers and load the model; raises as `Engine.open` does."""
        try:
            await _in_thread(self._engine.open, on_cancel=self._engine.cancel_open)
        except asyncio.CancelledError:
            await self.close()  # the cancellation may have come when it had just opened
            raise
        return self

    async def close(self, timeout: float | None = None) -> CloseReport:
        """Stop every worker; returns and raises as `Engine.close` does."""
        return await _in_thread(lambda: self._engine.close(timeout))

    async def restart(self) -> Self:
        """Close, then open."""
        await self.close()
        return await self.open()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._engine.state

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._engine.max_model_len

    def is_healthy(self) -> bool:
        """Return whether the engine is open and all its workers live."""
        return self._engine.is_healthy()

    # ---- generation ----

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; as `Engine.generate`."""
        return await _gather(self._engine.submit_prompts(prompts, params, priority=priority))

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; as `Engine.chat`."""
        return await _gather(
            self._engine.submit_chats(messages, params, priority, template_options)
        )

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> asyncio.Future[RequestOutput]:
        """Queue one prompt and return an asyncio future; cancelling it aborts the request."""
        return asyncio.wrap_future(
            self._engine.submit(prompt, params, request_id=request_id, priority=priority)
        )

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> AsyncStream:
        """Generate for one prompt or conversation; return an async iterator of Increments.

        Leaving the loop, dropping the iterator or cancelling its task aborts the request.
        """
        buffer, abort = self._engine.begin_stream(prompt, params, priority, template_options)
        return AsyncStream(buffer, abort, owner=self)

    async def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        priority: int = 0,
    ) -> list[Score]:
        """Return how likely the model finds each continuation; as `Engine.score`."""
        generations = self._engine.begin_scores(prompts, continuations, priority)
        return scores_of(generations, await _gather([g.future for g in generations]))

    @property
    def default_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self._engine.default_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template."""
        return self._engine.tokenizer

    # ---- workers ----

    async def collective_rpc(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(worker, *args, **kwargs)` on every worker; as `Engine.collective_rpc`."""
        return await self._call_result(self._engine.begin_call(fn, args, kwargs), timeout)

    async def apply_model(
        self, fn: Callable[[Any], Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Run *fn* on every rank's module; as `Engine.apply_model`."""
        return await self._call_result(self._engine.begin_call(fn, on_model=True), timeout)

    # ---- long-lived use ----

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await asyncio.wrap_future(self._engine.begin_upkeep(Upkeep.reset_prefix_cache))

    async def sleep(self, level: int = 1) -> None:
        """Give memory away until `wake()`; as `Engine.sleep`."""
        await asyncio.wrap_future(self._engine.begin_upkeep(lambda upkeep: upkeep.sleep(level)))

    async def wake(self) -> None:
        """Take the memory back and serve again; as `Engine.wake`."""
        await asyncio.wrap_future(self._engine.begin_upkeep(Upkeep.wake))

    @property
    def is_asleep(self) -> bool:
        """Whether it is between `sleep()` and `wake()`."""
        return self._engine.is_asleep

    async def update_weights(self, source: WeightsSource) -> None:
        """Replace weights between two steps; as `Engine.update_weights`.

        An iterable is read in a thread of its own. Cancelled before all has arrived, nothing
        changes.
        """
        update = self._engine.begin_weights_update(source)
        await _in_thread(update.run, on_cancel=update.cancel)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes, by rank."""
        return self._engine.workers

    @property
    def start_method(self) -> StartMethod:
        """How the guard was started, and why."""
        return self._engine.start_method

    @property
    def backend(self) -> Backend:
        """Where the workers run, and why."""
        return self._engine.backend

    @property
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """What happened, when, while the engine started."""
        return self._engine.timeline

    def stats(self) -> EngineStats:
        """Return a snapshot of what the engine is doing."""
        return self._engine.stats()

    async def _call_result(self, call: RemoteCall, timeout: float | None) -> list[Any]:
        try:
            replies = await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(call.future)), timeout
            )
        except (asyncio.CancelledError, asyncio.TimeoutError) as error:
            self._engine.abandon_call(call)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise TimeoutError(f"the call took longer than {timeout} s.") from None
        return results_of_call(replies)


async def _gather(futures: Sequence[Future[RequestOutput]]) -> list[RequestOutput]:
    """Wait for all; where one fails, or the caller is cancelled, abort the others."""
    try:
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
    except BaseException:
        for future in futures:
            future.cancel()
        raise


async def _in_thread(
    work: Callable[[], Result], on_cancel: Callable[[], None] = lambda: None
) -> Result:
    """Run blocking *work* in a thread of its own and wait for its end, also when cancelled.

    Not `asyncio.to_thread`: its pool would keep a thread after the engine is closed.
    """
    done: Future[Result] = Future()
    thread = threading.Thread(target=_run_into, args=(done, work), name="llmrt-async", daemon=True)
    thread.start()
    ended = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # looked at: after a cancellation nobody asks how the work ended
        raise
    finally:
        thread.join()


def _run_into(done: Future[Result], work: Callable[[], Result]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # it belongs to whoever awaits
        done.set_exception(error)
