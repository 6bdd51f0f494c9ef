"""The scheduler, the model and the text of an engine, in this process: no workers, no threads.

What the session does between them is done here in a few lines, a step at a time, so that a test
can look at everything after each. `alone` is the reference: one sequence, no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from llmrt.errors import RankFailure
from llmrt.generation import Generation
from llmrt.messages import Batch, BatchResult, NewSequence, ScheduledSequence
from llmrt.outputs import RequestOutput
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.scheduler.request import Request
from llmrt.scheduler.scheduler import Scheduler
from llmrt.scheduler.updates import (
    PromptLogprobsUpdate,
    SequenceFailed,
    SequenceFinished,
    TokenUpdate,
    Update,
)
from llmrt.tokenizer import Tokenizer
from llmrt.worker.device import Placement
from llmrt.worker.model_runner import ModelRunner
from llmrt.worker.sampler import Sampler
from llmrt.worker.tensor_parallel import SingleGroup, TPGroup
from tests.support.checkpoints import Checkpoint
from tests.support.rank_threads import on_every_rank, thread_groups
from tests.support.tiny_driver import load_decoder, worker_config

FLOAT64 = Placement(device=torch.device("cpu"), dtype=torch.float64)
"""So many digits that neither the batch nor the split can change a token."""


class ProcessorError(Exception):
    """What a request ends with whose logits processor raised."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(str(failure))


class TinyEngine:
    """Serves requests with a real scheduler and `tp` real model runners."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: Tokenizer, tp: int, config: SchedulerConfig
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.generations: dict[str, Generation] = {}
        """By request id, those that were aborted left out."""
        self._tokenizer = tokenizer
        self._groups = thread_groups(tp)
        self._runners = on_every_rank(
            self._groups, lambda group: make_runner(checkpoint, group, config)
        )
        self._results: list[BatchResult] = []

    @property
    def num_in_flight(self) -> int:
        """How many steps were started and not finished."""
        return len(self._results)

    def add(self, request: Request) -> None:
        """Take a request."""
        generation = Generation(
            request, None, self._tokenizer, on_cancel=lambda: None, streaming=True
        )
        updates = self.scheduler.add(request)
        self.generations[request.request_id] = generation
        self._deliver(updates)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self.scheduler.abort(request_id)
        self.generations.pop(request_id, None)

    def start_step(self) -> bool:
        """Run the next step; what it produced is told by `finish_step`."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._results.append(self._run(batch))
        return batch is not None

    def finish_step(self) -> None:
        """Take in what the oldest step produced."""
        self._deliver(self.scheduler.update(self._results.pop(0)))
        self.scheduler.check_invariants()

    def run_to_the_end(self, max_steps: int) -> None:
        """Serve everything, one step ahead of the results."""
        for _ in range(max_steps):
            started = self.num_in_flight < 2 and self.start_step()
            if self.num_in_flight == 2 or (self.num_in_flight and not started):
                self.finish_step()
            elif not started:
                return
        raise AssertionError(f"work is left after {max_steps} steps")

    def close(self) -> None:
        """Let go of the caches, and of threads."""
        on_every_rank(self._groups, lambda group: self._runners[group.rank].close())

    def _run(self, batch: Batch) -> BatchResult:
        results = on_every_rank(
            self._groups, lambda group: self._runners[group.rank].execute(batch)
        )
        assert all(result == BatchResult(step=batch.step) for result in results[1:])
        return results[0]

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            generation = self.generations.get(update.request_id)
            if generation is None:
                continue
            match update:
                case TokenUpdate():
                    stop = generation.accept(update)
                    if stop is not None:
                        self.scheduler.finish(update.seq_id, stop)
                case PromptLogprobsUpdate():
                    generation.accept_prompt_logprobs(update)
                case SequenceFinished():
                    generation.accept_end(update)
                case SequenceFailed():
                    generation.fail(ProcessorError(update.failure))
                    self.scheduler.abort(update.request_id)


def make_runner(checkpoint: Checkpoint, group: TPGroup, config: SchedulerConfig) -> ModelRunner:
    """Return one rank, its cache allocated."""
    options = worker_config(checkpoint.config, block_size=config.block_size)
    model = load_decoder(checkpoint, group, FLOAT64)
    runner = ModelRunner(options, model, group, FLOAT64, Sampler())
    runner.allocate_cache(config.num_blocks)
    return runner


@dataclass
class Alone:
    """Generates one request at a time, one sequence at a time: the reference."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    length_limit: int = 512
    runner: ModelRunner = field(init=False)
    num_runs: int = 0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            num_blocks=128,
            block_size=4,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            max_model_len=self.length_limit,
        )
        self.runner = make_runner(self.checkpoint, SingleGroup(), config)

    def generate(self, request: Request, length_limit: int) -> RequestOutput:
        """Return what a request should give where sequences have at most *length_limit* tokens.

        Raises:
            ProcessorError: its logits processor raised.
        """
        generation = Generation(
            request, None, self.tokenizer, on_cancel=lambda: None, streaming=False
        )
        room = length_limit - request.num_prompt_tokens
        most = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        for index in range(request.params.n):
            self._complete(request, generation, index, most)
        return generation.future.result(timeout=0)

    def _complete(self, request: Request, generation: Generation, index: int, most: int) -> None:
        spec = self._spec(request, index)
        prompt = list(request.prompt_token_ids)
        result = self._step(spec, 0, len(prompt), samples=most > 0, is_new=True)
        if index == 0:
            for scores in result.prompt_logprobs:
                generation.accept_prompt_logprobs(
                    PromptLogprobsUpdate(
                        request_id=request.request_id,
                        index=0,
                        seq_id=spec.seq_id,
                        start=scores.start,
                        positions=scores.positions,
                    )
                )
        output: list[int] = []
        while len(output) < most:
            if result.failures:
                raise ProcessorError(result.failures[0].failure)
            token = result.tokens[0]
            output.append(token.token_id)
            reason = _finish_reason(request, output, most)
            stop_id = token.token_id if reason == "stop" else None
            is_eos = not request.params.ignore_eos and token.token_id in request.eos_token_ids
            update = TokenUpdate(
                request.request_id,
                index,
                spec.seq_id,
                token.token_id,
                token.logprob,
                token.top,
                reason,  # type: ignore[arg-type]
                None if is_eos else stop_id,
            )
            if generation.accept(update) is not None or reason is not None:
                return
            result = self._step(spec, len(prompt) + len(output) - 1, 1, samples=True)
        generation.accept_end(
            SequenceFinished(
                request_id=request.request_id,
                index=index,
                seq_id=spec.seq_id,
                finish_reason="length",
            )
        )

    def _spec(self, request: Request, index: int) -> NewSequence:
        self.num_runs += 1
        return NewSequence(
            seq_id=self.num_runs,
            token_ids=request.prompt_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            seed=request.seed + index,
            eos_token_ids=() if request.params.ignore_eos else request.eos_token_ids,
            bad_word_ids=request.bad_word_ids,
            logits_processors=request.logits_processors,
            scores_from=request.scores_from,
        )

    def _step(
        self, spec: NewSequence, start: int, num_tokens: int, *, samples: bool, is_new: bool = False
    ) -> BatchResult:
        scheduled = ScheduledSequence(
            seq_id=spec.seq_id,
            start=start,
            num_tokens=num_tokens,
            new_block_ids=tuple(range(128)) if is_new else (),
            samples=samples,
        )
        batch = Batch(
            step=0,
            new=(spec,) if is_new else (),
            scheduled=(scheduled,),
            finished=(spec.seq_id - 1,) if is_new else (),
        )
        return self.runner.execute(batch)


def _finish_reason(request: Request, output: Sequence[int], most: int) -> str | None:
    """Return how a completion ends with its last token; the rules of SamplingParams, once more."""
    params = request.params
    ends = {*(() if params.ignore_eos else request.eos_token_ids), *(params.stop_token_ids or ())}
    if len(output) > params.min_tokens and output[-1] in ends:
        return "stop"
    return "length" if len(output) == most else None
