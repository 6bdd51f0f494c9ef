"""Scheduler: decides what every step runs, and keeps the books of what came of it.

The caller alternates `schedule()` and `update()`. It may call `schedule()` once more before the
`update()` of the step before: one step then runs while the next is prepared. A sequence whose next
token is still in the workers can be scheduled all the same, for they keep the tokens. If that token
turns out to end it, what the later step samples is dropped.

Workers run steps in order, and in each layer write all keys and values of a step before they read
any. So a prompt's block can be found by others as soon as the step that fills it is scheduled, by
sequences of the same step, too. A block goes back to the free ones only when no step in flight runs
its sequence.

Sequences are served by (priority, arrival). Whoever runs gets its token, or a chunk of its prompt
unless the head of the queue ranks before it. Who needs a block where none is free preempts the last
of the running, perhaps itself. Then the queue is admitted in order, never past a head that does not
fit. So the first sequence of all always moves on, nobody is overtaken by a later one of its own
priority, and better priorities overtake only so often (see WaitingQueue).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sized

from llmrt.messages import Batch, BatchResult, PromptLogprobs, SampledToken, SequenceFailure
from llmrt.outputs import EngineStats
from llmrt.scheduler.limits import SchedulerConfig, check_request
from llmrt.scheduler.request import Request, Sequence, SequenceStatus
from llmrt.scheduler.roster import Roster
from llmrt.scheduler.step_plan import Milestone, PlannedStep, StepPlan
from llmrt.scheduler.stopping import ending
from llmrt.scheduler.updates import (
    PromptLogprobsUpdate,
    SequenceFailed,
    SequenceFinished,
    Update,
    new_token_update,
)

_MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread owns it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._roster = Roster(config)
        self._in_flight: deque[PlannedStep] = deque()
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    # ---- requests come and go ----

    def check(self, request: Request) -> None:
        """Raise RequestError where *request* can never be served. Any thread may ask."""
        check_request(self._config, request)

    def add(self, request: Request) -> list[Update]:
        """Take a request; return what can be said at once: that it is over, with `max_tokens=0`.

        Raises:
            RequestError: it can never be served, or a live request has its id.
        """
        self._roster.enter(request)
        updates: list[Update] = []
        for sequence in request.sequences:
            if sequence.max_output_tokens or sequence.needs_prompt_logprobs:
                self._roster.waiting.push(sequence)
            else:
                updates.append(self._finish_without_token(sequence))
        return updates

    def abort(self, request_id: str) -> bool:
        """End a request; return whether it was live. Nothing more is reported of it."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._roster.end(sequence, "abort")
        return True

    def finish(self, seq_id: int, stop_reason: str | None = None) -> bool:
        """End a sequence in whose text a stop string was found; return whether it was live."""
        sequence = self._unfinished(seq_id)
        if sequence is None:
            return False
        self._roster.end(sequence, "stop", stop_reason)
        return True

    # ---- steps ----

    def schedule(self) -> Batch | None:
        """Return the next step, or None where there is nothing to run until something changes."""
        assert len(self._in_flight) < _MAX_STEPS_IN_FLIGHT, "update() must catch up first"
        self._roster.drop_finished()
        plan = StepPlan(step=self._num_steps, num_tokens_left=self._config.max_num_batched_tokens)
        self._schedule_running(plan)
        while self._admit_next(plan):
            pass
        self._schedule_postponed(plan)
        if plan.is_empty:
            assert self._in_flight or not self._roster.requests, "a sequence can never run"
            return None
        step = plan.finish(self._roster.take_forgotten())
        self._num_steps += 1
        self._in_flight.append(step)
        return step.batch

    def update(self, result: BatchResult) -> list[Update]:
        """Take in what the oldest step in flight produced; return what is new of each sequence."""
        planned = self._in_flight.popleft()
        step = planned.batch.step
        assert step == result.step, f"result of step {result.step} for step {step}"
        self._roster.num_steps_run = step + 1
        updates: list[Update] = []
        scored = self._pass_milestones(planned.milestones)
        for logprobs in result.prompt_logprobs:
            self._pass_on_logprobs(logprobs, updates)
        for failure in result.failures:
            self._fail(failure, updates)
        self._append_tokens(result.tokens, updates)
        updates.extend(self._finish_without_token(s) for s in scored if not s.is_finished)
        self._roster.release_retired()
        return updates

    # ---- the rest of its surface ----

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is live."""
        return bool(self._roster.requests)

    @property
    def has_work(self) -> bool:
        """Whether a request is live or a step in flight: whether the caller should go on."""
        return bool(self._roster.requests or self._in_flight)

    @property
    def num_steps_in_flight(self) -> int:
        """Return how many scheduled steps have not been updated."""
        return len(self._in_flight)

    def stats(self) -> EngineStats:
        """Return the counters as they are now."""
        return EngineStats(
            num_running=self._roster.num_running,
            num_waiting=self._roster.num_waiting,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._roster.tables.num_free,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as after a change of weights; what runs keeps its blocks."""
        self._roster.forget_cached_prefixes()

    def check_invariants(self) -> None:
        """Assert that the books agree with each other."""
        batches = [step.batch for step in self._in_flight]
        for batch in batches:
            assert 0 < batch.num_tokens <= self._config.max_num_batched_tokens
            assert len(batch.scheduled) <= self._config.max_num_seqs
        self._roster.check_invariants(batches)

    # ---- scheduling ----

    def _schedule_running(self, plan: StepPlan) -> None:
        """Give each of the running its token or chunk, and keep a token for each behind it."""
        running = self._roster.running
        tables = self._roster.tables
        head = self._roster.waiting.peek()
        for index, sequence in enumerate(running, start=1):  # its last may be preempted meanwhile
            num_tokens = num_to_run = sequence.num_tokens_to_run
            if num_to_run > 1:
                if head is not None and head.rank < sequence.rank:
                    plan.postponed.append(sequence)
                    continue
                num_tokens = min(num_to_run, plan.num_spare_tokens - (len(running) - index))
            if num_tokens <= 0:
                continue
            new_block_ids: tuple[int, ...] = ()
            if sequence.num_computed_tokens == sequence.num_slots:
                if not self._make_room(sequence):
                    continue
                new_block_ids = (tables.grow(sequence),)
            plan.add(sequence, num_tokens, num_tokens == num_to_run, new_block_ids)
            if num_to_run > 1:
                tables.register(sequence, sequence.num_computed_tokens)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the last of the running until a block is free for *sequence*.

        Returns:
            False where *sequence* must do without: it was itself the last, or blocks come back, but
            only when a step in flight has run.
        """
        while not self._roster.tables.num_free:
            if self._roster.is_retiring:
                return False
            self._num_preemptions += 1
            if self._roster.preempt_last() is sequence:
                return False
        return True

    def _schedule_postponed(self, plan: StepPlan) -> None:
        """Run chunks of prompts that rank behind the head of the queue with what that has left."""
        while plan.postponed:
            sequence = plan.postponed.popleft()
            num_to_run = sequence.num_tokens_to_run
            num_tokens = min(num_to_run, plan.num_spare_tokens)
            plan.add(sequence, num_tokens, num_tokens == num_to_run, ())
            self._roster.tables.register(sequence, sequence.num_computed_tokens)

    def _admit_next(self, plan: StepPlan) -> bool:
        """Admit or park the head of the queue; return False where it must wait with all others."""
        roster = self._roster
        sequence = roster.waiting.peek()
        if sequence is None or roster.num_free_seats <= 0 or plan.num_spare_tokens <= 0:
            return False
        if not roster.can_restart(sequence):
            return False
        prefix = roster.tables.find_prefix(sequence)
        promised = roster.tables.worth_waiting_for(sequence, prefix)
        if promised is not None:
            roster.park(sequence, promised)
            return True
        # A spare block for each that runs, or the newcomer is preempted as soon as they grow.
        if not roster.tables.fits(sequence, prefix, num_spare=len(roster.running)):
            return False
        roster.admit(sequence, prefix)
        self._count_admission(sequence)
        plan.add_new(sequence)
        roster.tables.register(sequence, sequence.num_computed_tokens)
        return True

    def _count_admission(self, sequence: Sequence) -> None:
        if sequence.was_admitted:
            return
        sequence.was_admitted = True
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._num_cached_tokens += sequence.num_computed_tokens
        if sequence.index == 0:
            sequence.request.num_cached_tokens = sequence.num_computed_tokens

    # ---- results ----

    def _unfinished(self, seq_id: int) -> Sequence | None:
        sequence = self._roster.sequences.get(seq_id)
        if sequence is None or sequence.status is SequenceStatus.FINISHED:
            return None
        return sequence

    def _pass_milestones(self, milestones: Sized[Milestone]) -> list[Sequence]:
        """Let blocks that a step has filled with sampled tokens be found.

        Returns:
            The sequences that were only to be scored, and have been.
        """
        scored: list[Sequence] = []
        for sequence, num_run in milestones:
            self._roster.tables.register(sequence, num_run)
            if sequence.needs_prompt_logprobs and num_run >= sequence.num_prompt_tokens:
                sequence.needs_prompt_logprobs = False
                if not sequence.max_output_tokens:
                    scored.append(sequence)
        return scored

    def _append_tokens(self, tokens: Sized[SampledToken], updates: list[Update]) -> None:
        sequences, finished = self._roster.sequences, SequenceStatus.FINISHED
        num_before = len(updates)
        for seq_id, token_id, logprob, top in tokens:
            sequence = sequences.get(seq_id)
            if sequence is None or sequence.status is finished:
                continue
            output, request = sequence.output_token_ids, sequence.request
            output.append(token_id)
            finish_reason = stop_reason = None
            if len(output) >= sequence.max_output_tokens or token_id in request.all_end_ids:
                finish_reason, stop_reason = ending(sequence, token_id)
                if finish_reason is not None:
                    self._roster.end(sequence, finish_reason, stop_reason)
            updates.append(
                new_token_update(
                    (
                        request.request_id,
                        sequence.index,
                        seq_id,
                        token_id,
                        logprob,
                        top,
                        finish_reason,
                        stop_reason,
                    )
                )
            )
        self._num_generated_tokens += len(updates) - num_before

    def _pass_on_logprobs(self, logprobs: PromptLogprobs, updates: list[Update]) -> None:
        """Report prompt log-probabilities, without those that were reported before a preemption."""
        sequence = self._unfinished(logprobs.seq_id)
        if sequence is None:
            return
        start = max(logprobs.start, sequence.num_prompt_logprobs)
        positions = logprobs.positions[start - logprobs.start :]
        if not positions:
            return
        sequence.num_prompt_logprobs = start + len(positions)
        updates.append(
            PromptLogprobsUpdate(
                request_id=sequence.request.request_id,
                index=sequence.index,
                seq_id=sequence.seq_id,
                start=start,
                positions=positions,
            )
        )

    def _fail(self, failure: SequenceFailure, updates: list[Update]) -> None:
        sequence = self._unfinished(failure.seq_id)
        if sequence is None:
            return
        self._roster.end(sequence, "abort")
        updates.append(
            SequenceFailed(
                request_id=sequence.request.request_id,
                index=sequence.index,
                seq_id=sequence.seq_id,
                failure=failure.failure,
                by_user_code=failure.by_user_code,
            )
        )

    def _finish_without_token(self, sequence: Sequence) -> SequenceFinished:
        self._roster.end(sequence, "length")
        return SequenceFinished(
            request_id=sequence.request.request_id,
            index=sequence.index,
            seq_id=sequence.seq_id,
            finish_reason="length",
        )
