"""Generation: one request as its caller sees it, from its tokens to its text and final output."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field

from llmrt.messages import TokenLogprobs
from llmrt.outputs import CompletionOutput, FinishReason, Increment, Logprob, RequestOutput
from llmrt.ownership import check_owner
from llmrt.scheduler.request import Request
from llmrt.scheduler.updates import PromptLogprobsUpdate, SequenceFinished, TokenUpdate
from llmrt.streams import StreamBuffer
from llmrt.text_stream import TextStream
from llmrt.tokenizer import Tokenizer


class GenerationFuture(Future[RequestOutput]):
    """The result of one request; `cancel()` aborts it at any time before it is done."""

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        super().__init__()
        self._on_cancel = on_cancel
        self._owner_pid = os.getpid()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the output.

        Raises:
            TimeoutError: it took longer than *timeout* seconds.
            EngineClosedError: this is a fork of the process that asked; also what else the request
                ended with.
        """
        check_owner(self._owner_pid)
        return super().result(timeout)

    def cancel(self) -> bool:
        """Abort the request; return False if it was over already."""
        if self.done():
            return self.cancelled()
        cancelled = super().cancel()
        if cancelled:
            self._on_cancel()
        return cancelled


@dataclass(slots=True)
class _Completion:
    """One of the `n` completions while it grows."""

    index: int
    stream: TextStream
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Generation:
    """Collects what a request generates. Used by the engine's thread; callers hold its future."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer,
        *,
        on_cancel: Callable[[], None],
        streaming: bool,
    ) -> None:
        self.request = request
        self.context = copy_context()
        """Whose request it is, to libraries that ask: a notebook's cell, an asyncio task."""
        self.future = GenerationFuture(on_cancel)
        self.buffer = StreamBuffer() if streaming else None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._completions = [
            _Completion(index=i, stream=_text_stream(tokenizer, request))
            for i in range(request.params.n)
        ]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]

    def accept(self, update: TokenUpdate) -> str | None:
        """Add what one sequence generated; return the stop string that ended it, if one did."""
        completion = self._completions[update.index]
        if completion.finish_reason is not None:
            return None
        completion.token_ids.append(update.token_id)
        logprobs = self._add_logprobs(completion, update)
        text, stop = self._new_text(completion, update)
        completion.text.append(text)
        completion.finish_reason = "stop" if stop is not None else update.finish_reason
        completion.stop_reason = stop if stop is not None else update.stop_reason
        self._push(completion, text, (update.token_id,), logprobs)
        self._finish_if_complete()
        return stop

    def accept_end(self, update: SequenceFinished) -> None:
        """End a completion that generates nothing."""
        completion = self._completions[update.index]
        completion.finish_reason = update.finish_reason
        self._push(completion, "", (), None)
        self._finish_if_complete()

    def accept_prompt_logprobs(self, found: PromptLogprobsUpdate) -> None:
        """Add log-probabilities of prompt tokens; they arrive in order, chunk by chunk."""
        self._prompt_logprobs.extend(self._named(top) for top in found.positions)

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it is over."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return
        finally:
            if self.buffer is not None:
                self.buffer.end(error)

    def _new_text(self, completion: _Completion, update: TokenUpdate) -> tuple[str, str | None]:
        """Return the text that this token settles, and the stop string that ends it, if any."""
        params = self.request.params
        stream = completion.stream
        if not params.detokenize:
            return "", None
        text = ""
        # The token that ends a completion is not a part of its text, unless that is asked for.
        if update.finish_reason != "stop" or params.include_stop_str_in_output:
            text = stream.append((update.token_id,)).text
        if stream.stop is None and update.finish_reason is not None:
            text += stream.finish()
        return text, stream.stop

    def _add_logprobs(
        self, completion: _Completion, update: TokenUpdate
    ) -> tuple[dict[int, Logprob], ...] | None:
        if update.top is None or update.logprob is None:
            return None
        named = self._named(update.top)
        if completion.logprobs is None:
            completion.logprobs = []
        completion.logprobs.append(named)
        completion.cumulative_logprob += update.logprob
        return (named,)

    def _named(self, top: TokenLogprobs) -> dict[int, Logprob]:
        entries = zip(top.token_ids, top.logprobs, top.ranks, strict=True)
        return {
            token_id: Logprob(logprob=logprob, rank=rank, decoded_token=self._text_of(token_id))
            for token_id, logprob, rank in entries
        }

    def _text_of(self, token_id: int) -> str | None:
        wants_text = self.request.params.detokenize
        return self._tokenizer.token_text(token_id) if wants_text else None

    def _push(
        self,
        completion: _Completion,
        text: str,
        new_ids: Sequence[int],
        logprobs: tuple[dict[int, Logprob], ...] | None,
    ) -> None:
        if self.buffer is None or not (text or new_ids or completion.finish_reason):
            return
        increment = Increment(
            index=completion.index,
            text=text,
            token_ids=tuple(new_ids),
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        self.buffer.push(increment)

    def _finish_if_complete(self) -> None:
        if any(c.finish_reason is None for c in self._completions):
            return
        with suppress(InvalidStateError):  # cancelled in the same moment: nobody asks any more
            self.future.set_result(self._output())
        if self.buffer is not None:
            self.buffer.end()

    def _output(self) -> RequestOutput:
        wants_prompt = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids),
            outputs=tuple(_completed(c) for c in self._completions),
            prompt_logprobs=tuple(self._prompt_logprobs) if wants_prompt else None,
            num_cached_tokens=self.request.num_cached_tokens,
        )


def _text_stream(tokenizer: Tokenizer, request: Request) -> TextStream:
    return TextStream(tokenizer, request.params, request.prompt_token_ids)


def _completed(completion: _Completion) -> CompletionOutput:
    has_logprobs = completion.logprobs is not None
    return CompletionOutput(
        index=completion.index,
        text="".join(completion.text),
        token_ids=tuple(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob if has_logprobs else None,
        logprobs=tuple(completion.logprobs) if completion.logprobs is not None else None,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
