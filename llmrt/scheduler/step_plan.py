"""StepPlan: one step while it is being put together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llmrt.messages import Batch, NewSequence, ScheduledSequence
from llmrt.scheduler.request import Sequence


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What has been scheduled so far, and the tokens left for more."""

    num_tokens_left: int
    new: list[NewSequence] = field(default_factory=list[NewSequence])
    decodes: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    prefills: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])

    postponed: deque[Sequence] = field(default_factory=deque[Sequence])
    """Running prompts that rank behind the head of the queue; a token is kept for each."""

    @property
    def num_spare_tokens(self) -> int:
        """Return how many tokens are left that are not kept for the postponed."""
        return self.num_tokens_left - len(self.postponed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs."""
        return not self.decodes and not self.prefills

    def add_new(self, sequence: Sequence) -> None:
        """Introduce *sequence* to the workers, and run as many of its tokens as fit."""
        self.new.append(sequence.describe())
        num_to_run = sequence.num_tokens_to_run
        num_tokens = min(num_to_run, self.num_spare_tokens)
        self.add(sequence, num_tokens, num_tokens == num_to_run, tuple(sequence.block_ids))

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        is_last_chunk: bool,
        new_block_ids: tuple[int, ...],
    ) -> None:
        """Run the next *num_tokens* of *sequence*; sample if they are all that it has."""
        start = sequence.num_computed_tokens
        samples = is_last_chunk and sequence.max_output_tokens > 0
        item = ScheduledSequence(sequence.seq_id, start, num_tokens, new_block_ids, samples)
        (self.decodes if samples and num_tokens == 1 else self.prefills).append(item)
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_steps_in_flight += 1
        sequence.num_pending_tokens += samples
        self.num_tokens_left -= num_tokens

    def batch(self, step: int, finished: tuple[int, ...]) -> Batch:
        """Return the finished plan: decodes first, then prompts or chunks of them."""
        return Batch(
            step=step,
            new=tuple(self.new),
            scheduled=(*self.decodes, *self.prefills),
            finished=finished,
        )
