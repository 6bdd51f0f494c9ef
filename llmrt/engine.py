"""Engine: the object users hold. It opens, closes, and hands every verb to its session.

Nothing starts in the constructor; `with` or `.open()` starts, the end of the block or `.close()`
ends. A closed engine can be opened again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from llmrt.by_value import dumps_call, loads_reply
from llmrt.config import DEFAULT_BLOCK_SIZE, DTypeName, EngineConfig, Timeouts
from llmrt.errors import RemoteCallError
from llmrt.generation import Generation, GenerationFuture
from llmrt.intake import Message, Prompt
from llmrt.interruption import INTERRUPTIONS
from llmrt.lifecycle import EngineState, Lifecycle
from llmrt.messages import CallFunction, FunctionRaised, FunctionReturned
from llmrt.new_weights import WeightsSource, WeightsUpdate
from llmrt.options import reject_unknown_options
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
from llmrt.streams import Stream, StreamBuffer
from llmrt.tokenizer import Tokenizer
from llmrt.upkeep import Upkeep

if TYPE_CHECKING:
    from llmrt.backend_choice import Backend
    from llmrt.opened import Opened
    from llmrt.runtime.start_method import StartMethod


class Engine:
    """Runs one large language model on worker processes that live as long as its `with` block.

        with Engine("path/or/hub-id", tp=2) as llm:
            print(llm.generate("The capital of France is")[0].text)

    Args:
        model: A directory or GGUF file, a Hub id, or None for the small default model
            (SmolLM2-135M-Instruct).
        tp: Number of ranks the model is split over (tensor parallelism).
        backend: `auto`, `mp` (worker processes on this machine), `ray` (on a Ray cluster),
            `inprocess` (no worker process, for debugging), or a Launcher.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` (as the checkpoint is stored), `float32`, `bfloat16` or `float16`.
        start_method: `auto`, `fork` or `spawn`: how the process that owns the workers is born.
        max_model_len: Most tokens of a sequence, prompt and output; None is the model's limit.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most tokens in one step; longer prompts run in chunks.
        kv_cache_bytes: Size of the KV cache, all ranks together; None measures.
        gpu_memory_fraction: How much of a GPU's memory the engine may use.
        block_size: Tokens per block of the KV cache.
        prefix_caching: Keep computed prompts for later requests that begin alike.
        quantization: `int8` or `int4` (about half and a third of the memory of bfloat16) for the
            layers' matrices, on a CPU in bfloat16; None keeps them as the checkpoint has them.
        compiled_kernels: Compute with llmrt's own kernels on a CPU in bfloat16, which this
            machine's C compiler makes once; False, or no compiler, leaves all to torch.
        num_threads: Native threads per rank on a CPU; None is its share of the cores.
        seed: Of the requests that have none of their own.
        placement_group: A Ray placement group for the workers; with none, the one that this
            process runs in, or a new one.
        timeouts: Every limit on waiting.
        progress: Show progress on stderr: True, False, or `auto` (in a terminal or notebook).
        env: Environment variables for the workers, beside those they inherit.

    Raises:
        ConfigError: an option is out of its range.
        TypeError: an option does not exist; the message suggests the nearest.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tp: int = 1,
        backend: Any = "auto",
        device: str = "auto",
        dtype: DTypeName = "auto",
        start_method: Literal["auto", "fork", "spawn"] = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        kv_cache_bytes: int | None = None,
        gpu_memory_fraction: float = 0.9,
        block_size: int = DEFAULT_BLOCK_SIZE,
        prefix_caching: bool = True,
        quantization: str | None = None,
        compiled_kernels: bool = True,
        num_threads: int | None = None,
        seed: int = 0,
        placement_group: Any = None,
        timeouts: Timeouts | None = None,
        progress: Literal["auto"] | bool = "auto",
        env: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> None:
        reject_unknown_options(unknown)
        options = EngineConfig(
            model=None if model is None else os.fspath(model),
            tp=tp,
            backend=backend,
            device=device,
            dtype=dtype,
            start_method=start_method,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            gpu_memory_fraction=gpu_memory_fraction,
            block_size=block_size,
            prefix_caching=prefix_caching,
            quantization=quantization,
            compiled_kernels=compiled_kernels,
            num_threads=num_threads,
            seed=seed,
            placement_group=placement_group,
            timeouts=timeouts or Timeouts(),
            progress=progress,
            env=None if env is None else dict(env),
        )
        self._life = Lifecycle(options)

    # ---- life ----

    def open(self) -> Self:
        """Start the workers and load the model; return the engine.

        An engine that is closing, or that broke and is being cleared away, is waited for.

        Raises:
            ConfigError: model, options and machine do not go together; nothing was started.
            EngineStartError: the workers did not come up; nothing is left running.
            EngineClosedError: another thread closed the engine meanwhile; nothing is left running.
            LlmrtError: the engine is open already.
        """
        self._life.open()
        return self

    def close(self, timeout: float | None = None) -> CloseReport:
        """Stop every worker and return how each ended; everything is gone when it returns.

        May be called twice, from any thread, on an engine that broke, and on one that another
        thread is opening: its `open()` then raises EngineClosedError. On Ctrl-C the workers are
        killed at once, and KeyboardInterrupt is raised when they are gone.

        Args:
            timeout: Seconds until what still runs is killed; None is `timeouts.close`.

        Raises:
            LlmrtError: it was called from a callback on the engine's own thread, for which it
                would have to wait: the engine closes when the callback has returned.
        """
        return self._life.close(timeout)

    def cancel_open(self) -> None:
        """Make an `open()` in another thread give up, without waiting; it raises."""
        self._life.cancel_open()

    def restart(self) -> Self:
        """Close, then open: a fresh engine in the same object."""
        self.close()
        return self.open()

    def __enter__(self) -> Self:
        try:
            return self.open()
        except INTERRUPTIONS:
            self.close()  # Ctrl-C may have come when the engine had just opened
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if not self._life.is_foreign:  # or a fork of the owner leaves the block
                self.close()
        except INTERRUPTIONS:
            self.close(0.0)
            raise

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._life.state

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template.

        Raises:
            EngineNotOpenError: the engine is not open.
        """
        return self._life.require_opened().tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._life.require_opened().plan.max_model_len

    def is_healthy(self) -> bool:
        """Return whether the engine is open, all its workers live, and this process owns it."""
        return self._life.is_healthy

    # ---- generation ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; return their outputs in order.

        Args:
            prompts: Text, token ids, or a list of either. Text gets the tokenizer's special
                tokens, such as BOS, unless it begins with them.
            params: One for all or one per prompt; None is what the model's
                generation_config.json says, else vLLM's defaults.
            priority: Lower runs first.

        Raises:
            RequestError: a prompt or parameter cannot be served; none of the prompts was started.
            EngineDeadError: the engine broke while it generated.
        """
        opened = self._life.require_opened()
        return _results(opened, opened.prompts(prompts, params, priority))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists.
            params: As for `generate`.
            priority: Lower runs first.
            **template_options: Handed to the template: `tools`, `chat_template`,
                `add_generation_prompt`, `continue_final_message` and the model's own.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        opened = self._life.require_opened()
        return _results(opened, opened.chats(messages, params, priority, template_options))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> GenerationFuture:
        """Queue one prompt and return a future of its RequestOutput; `cancel()` aborts it."""
        opened = self._life.require_opened()
        generation = opened.prompt(prompt, params, priority, request_id=request_id)
        return opened.send(generation).future

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template_options: Any,
    ) -> Stream:
        """Generate for one prompt or one conversation; return an iterator of Increments.

        Dropping, closing or leaving the iterator aborts the request.
        """
        return Stream(*self.begin_stream(prompt, params, priority, template_options), owner=self)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        priority: int = 0,
    ) -> list[Score]:
        """Return how likely the model finds each continuation of its prompt.

        Args:
            prompts: One for each continuation, or one for all of them.
            continuations: Text or token ids. Text is tokenised together with its prompt, and
                scored from the first token that the prompt alone does not have.
            priority: Lower runs first.

        Raises:
            RequestError: a continuation adds no token, or has nothing before it.
        """
        opened = self._life.require_opened()
        generations = opened.scores(prompts, continuations, priority)
        return scores_of(generations, _results(opened, generations))

    @property
    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: generation_config.json's, or vLLM's, defaults."""
        return self._life.require_opened().limits.default_params

    # ---- workers ----

    def collective_rpc(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(worker, *args, **kwargs)` on every worker; return the results by rank.

        Functions and objects typed in a notebook or script travel by value.

        Raises:
            RemoteCallError: it raised on a worker; the engine lives.
            TimeoutError: it took longer than *timeout* seconds; its result is dropped.
            RequestError: something cannot be pickled; the message names it.
        """
        return self._wait_for_call(self.begin_call(fn, args, kwargs), timeout)

    def apply_model(self, fn: Callable[[Any], Any], *, timeout: float | None = None) -> list[Any]:
        """Run *fn* on every rank's `torch.nn.Module`; return the results by rank.

        Names are transformers', with the projections of one input fused (`qkv_proj`,
        `gate_up_proj`). A matrix that its kernel wants in another form is no parameter;
        `model.num_bytes` counts every weight.
        """
        return self._wait_for_call(self.begin_call(fn, on_model=True), timeout)

    # ---- long-lived use ----

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; later requests compute theirs anew."""
        self.begin_upkeep(Upkeep.reset_prefix_cache).result()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache away, and that of the weights, until `wake()`.

        Verbs raise EngineAsleepError meanwhile; processes and groups stay up.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and `wake` reads the
                checkpoint again.

        Raises:
            RequestError: requests are unfinished; or with level 2, the weights came by
                `update_weights` as tensors, so no checkpoint holds them.
        """
        self.begin_upkeep(lambda upkeep: upkeep.sleep(level)).result()

    def wake(self) -> None:
        """Take the memory back and serve again.

        Raises:
            RequestError: the weights cannot be read any more; the engine sleeps on.
        """
        self.begin_upkeep(Upkeep.wake).result()

    @property
    def is_asleep(self) -> bool:
        """Whether it is between `sleep()` and `wake()`."""
        upkeep = self._life.require_opened().session.upkeep
        return upkeep is not None and upkeep.is_asleep

    def update_weights(self, source: WeightsSource) -> None:
        """Replace weights between two steps, and forget every cached prefix.

        Requests that run go on with the new weights from their next token; what they have
        computed stays. Nothing changes before everything has arrived and fits.

        Args:
            source: The directory or file of a checkpoint of the same model; or tensors by the
                names that transformers gives them, all or some: pairs, or a state dict.

        Raises:
            RequestError: a name is unknown, or a shape is another; the old weights are whole.
        """
        self.begin_weights_update(source).run()

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes, by rank; empty before the engine is opened."""
        session = self._life.session
        return () if session is None else session.workers

    @property
    def start_method(self) -> StartMethod:
        """How the guard was started, and why."""
        return self._life.require_session().group.start_method

    @property
    def backend(self) -> Backend:
        """Where the workers run (`.name`), and why (`.reason`)."""
        return self._life.require_session().backend

    @property
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """What happened, when, while the engine started."""
        session = self._life.session
        return () if session is None else tuple(session.timeline)

    def stats(self) -> EngineStats:
        """Return a snapshot of what the engine is doing."""
        session = self._life.require_opened().session
        assert session.scheduler is not None
        return session.scheduler.stats()

    # ---- what AsyncEngine shares: the same verbs, before the waiting ----

    def submit_prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: int,
    ) -> list[GenerationFuture]:
        """Check every prompt, then queue them all; return their futures in order."""
        opened = self._life.require_opened()
        return opened.send_all(opened.prompts(prompts, params, priority))

    def submit_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
        template_options: Mapping[str, Any],
    ) -> list[GenerationFuture]:
        """Check every conversation, then queue them all; return their futures in order."""
        opened = self._life.require_opened()
        return opened.send_all(opened.chats(messages, params, priority, template_options))

    def begin_stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        priority: int,
        template_options: Mapping[str, Any],
    ) -> tuple[StreamBuffer, Callable[[], None]]:
        """Queue one request; return where its increments arrive and what aborts it."""
        opened = self._life.require_opened()
        generation = opened.streamed(prompt, params, priority, template_options)
        assert generation.buffer is not None
        opened.send(generation)
        return generation.buffer, opened.aborter(generation.request.request_id)

    def begin_scores(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        priority: int,
    ) -> list[Generation]:
        """Check every continuation, then queue them all."""
        opened = self._life.require_opened()
        generations = opened.scores(prompts, continuations, priority)
        opened.send_all(generations)
        return generations

    def begin_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_model: bool = False,
    ) -> RemoteCall:
        """Queue a function to run on every worker."""
        session = self._life.require_opened().session
        payload = dumps_call(fn, args, kwargs)
        return session.call(CallFunction(payload=payload, on_model=on_model))

    def begin_upkeep(self, work: Callable[[Upkeep], None]) -> Future[None]:
        """Queue something to do to the engine between two steps."""
        return self._life.require_opened().session.run(work)

    def begin_weights_update(self, source: WeightsSource) -> WeightsUpdate:
        """Return what sends new weights; its `run` blocks."""
        return self._life.require_opened().weights_update(source)

    def abandon_call(self, call: RemoteCall) -> None:
        """Say that nobody waits for this call any more."""
        self._life.require_session().abandon(call)

    # ---- within ----

    def _wait_for_call(self, call: RemoteCall, timeout: float | None) -> list[Any]:
        try:
            return results_of_call(call.future.result(timeout))
        except RemoteCallError:
            raise
        except BaseException:
            self.abandon_call(call)
            raise


def _results(opened: Opened, generations: Sequence[Generation]) -> list[RequestOutput]:
    """Queue all and wait; where one fails, or the caller is interrupted, abort the others."""
    try:
        return [future.result() for future in opened.send_all(generations)]
    except BaseException:
        for generation in generations:
            generation.future.cancel()
        raise


def scores_of(generations: Sequence[Generation], outputs: Sequence[RequestOutput]) -> list[Score]:
    """Return the scores that requests of `begin_scores` have brought."""
    scored = zip(generations, outputs, strict=True)
    return [Score.of(output, generation.request.scores_from) for generation, output in scored]


def results_of_call(replies: Sequence[FunctionReturned | FunctionRaised]) -> list[Any]:
    """Return what a function returned on every rank.

    Raises:
        RemoteCallError: it raised on at least one.
    """
    failures = tuple(r.failure for r in replies if isinstance(r, FunctionRaised))
    if failures:
        listed = "\n".join(f"{f}\n{f.traceback}" for f in failures)
        raise RemoteCallError(f"the function raised on {listed}", failures=failures)
    return [loads_reply(r.payload) for r in replies if isinstance(r, FunctionReturned)]
