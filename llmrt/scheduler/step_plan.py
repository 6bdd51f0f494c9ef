"""StepPlan: one step while it is being put together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from llmrt.messages import Batch, NewSequence, ScheduledSequence, new_scheduled
from llmrt.scheduler.request import Sequence


class Milestone(NamedTuple):
    """A sequence for which a step that has run may mean more than a token.

    It fills the last block, or computes log-probabilities of a prompt.
    """

    sequence: Sequence
    num_run: int
    """How many of its tokens have run then."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What has been scheduled so far, and the tokens left for more."""

    step: int
    num_tokens_left: int
    new: list[NewSequence] = field(default_factory=list[NewSequence])
    decodes: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    prefills: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    milestones: list[Milestone] = field(default_factory=list[Milestone])
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
        end = start + num_tokens
        samples = is_last_chunk and sequence.max_output_tokens > 0
        item = new_scheduled((sequence.seq_id, start, num_tokens, new_block_ids, samples))
        (self.decodes if samples and num_tokens == 1 else self.prefills).append(item)
        if end == sequence.num_slots or sequence.needs_prompt_logprobs:
            self.milestones.append(Milestone(sequence, end))
        sequence.num_computed_tokens = end
        sequence.num_tokens_in_workers += samples
        sequence.last_step = self.step
        self.num_tokens_left -= num_tokens

    def finish(self, forgotten: tuple[int, ...]) -> PlannedStep:
        """Return the finished plan: decodes first, then prompts or chunks of them."""
        batch = Batch(
            step=self.step,
            new=tuple(self.new),
            scheduled=(*self.decodes, *self.prefills),
            finished=forgotten,
        )
        return PlannedStep(batch=batch, milestones=self.milestones)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """What the workers are told of a step, and what is to be noted when it has run."""

    batch: Batch
    milestones: Sized[Milestone]
