"""Roster: every sequence that is not done with, and the one place where it is.

    enter ─► waiting ──admit──► running ──end──► gone
              │ ▲ ▲               │  │            ▲
         park │ │ └────preempt────┘  │            │ when the last step in flight
              ▼ │                    └─► retiring ┘ that runs it has run
             parked

It moves sequences between places and keeps their blocks in step with that. Who moves, and when, the
Scheduler decides.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from llmrt.errors import RequestError
from llmrt.messages import Batch
from llmrt.outputs import FinishReason
from llmrt.scheduler.block_tables import BlockTables
from llmrt.scheduler.limits import SchedulerConfig, check_request, max_output_tokens
from llmrt.scheduler.promised_blocks import PromisedBlocks
from llmrt.scheduler.request import Request, Sequence, SequenceStatus
from llmrt.scheduler.waiting_queue import WaitingQueue


class Roster:
    """All live requests and their sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._next_seq_id = 0
        self._to_forget: list[int] = []
        self._retiring: dict[int, Sequence] = {}
        self.requests: dict[str, Request] = {}
        """Those with an unfinished sequence."""
        self.sequences: dict[int, Sequence] = {}
        """All unfinished ones, and the finished ones that a step in flight still runs."""
        self.waiting = WaitingQueue()
        self.promises = PromisedBlocks(wake=self.waiting.push)
        self.tables = BlockTables(config, self.promises)
        self.running: list[Sequence] = []
        """In order of rank. `drop_finished` takes the finished ones out."""
        self.num_steps_run = 0
        """How many steps have run; those after them that were scheduled are in flight."""
        self._has_finished = False

    @property
    def num_waiting(self) -> int:
        """Return how many sequences are neither running nor finished."""
        return len(self.waiting) + self.promises.num_parked

    @property
    def num_running(self) -> int:
        """Return how many sequences have a place in the steps."""
        return sum(not s.is_finished for s in self.running)

    @property
    def num_free_seats(self) -> int:
        """Return how many more may run. Parked ones have a seat: they run when they are woken."""
        return self._config.max_num_seqs - len(self.running) - self.promises.num_parked

    @property
    def is_retiring(self) -> bool:
        """Whether blocks come back when a step in flight has run."""
        return bool(self._retiring)

    def enter(self, request: Request) -> None:
        """Take a new request; its sequences are nowhere yet.

        Raises:
            RequestError: it can never be served, or a live request has its id.
        """
        if request.request_id in self.requests:
            raise RequestError(
                f"Request id {request.request_id!r} belongs to a request that is not finished; "
                "choose another id, or wait for that one."
            )
        check_request(self._config, request)
        request.sequences = tuple(self._new_sequence(request, i) for i in range(request.params.n))
        self.requests[request.request_id] = request
        self.sequences.update((s.seq_id, s) for s in request.sequences)

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Move the head of the queue to the running; its table begins with the cached *prefix*."""
        self.waiting.pop(sequence)
        self.tables.fill(sequence, prefix)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=lambda s: s.rank)

    def park(self, sequence: Sequence, block_hash: bytes) -> None:
        """Move a waiting sequence aside until the promised block is there."""
        self.waiting.discard(sequence)
        self.promises.park(sequence, block_hash)

    def can_restart(self, sequence: Sequence) -> bool:
        """Whether no step in flight runs a waiting sequence from before its preemption."""
        return sequence.seq_id not in self._retiring

    def preempt_last(self) -> Sequence:
        """Send the last of the running back to the queue, to be computed again from its tokens."""
        sequence = self.running.pop()
        sequence.status = SequenceStatus.WAITING
        self._retire(sequence)
        self.waiting.push(sequence)
        return sequence

    def end(
        self, sequence: Sequence, finish_reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Finish an unfinished sequence, wherever it is."""
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = finish_reason
        sequence.stop_reason = stop_reason
        self.waiting.discard(sequence)
        self.promises.discard(sequence)
        if was_running:
            self._has_finished = True
            self._retire(sequence)
        if sequence.seq_id not in self._retiring:
            del self.sequences[sequence.seq_id]
        self._count_finished(sequence.request)

    def drop_finished(self) -> None:
        """Take finished sequences out of the running."""
        if self._has_finished:
            self.running = [s for s in self.running if not s.is_finished]
            self._has_finished = False

    def release_retired(self) -> None:
        """Take the blocks of those retiring sequences back that no step in flight runs any more."""
        for sequence in [s for s in self._retiring.values() if not self._is_in_flight(s)]:
            del self._retiring[sequence.seq_id]
            self.tables.release(sequence)
            if sequence.is_finished:
                del self.sequences[sequence.seq_id]

    def take_forgotten(self) -> tuple[int, ...]:
        """Return, once, the sequences that the workers know and need no more."""
        forgotten, self._to_forget = tuple(self._to_forget), []
        return forgotten

    def forget_cached_prefixes(self) -> None:
        """Empty the prefix cache, for good: what runs now is not put into it."""
        self.tables.forget_cached([*self._retiring.values(), *self.running])

    def check_invariants(self, in_flight: Iterable[Batch]) -> None:
        """Assert that every sequence is in one place, and that its blocks agree with that."""
        running = [s for s in self.running if not s.is_finished]
        assert len(running) + self.promises.num_parked <= self._config.max_num_seqs
        assert [s.rank for s in running] == sorted(s.rank for s in running)
        placed = [s.seq_id for s in (*running, *self.waiting, *self.promises.parked)]
        live = {s.seq_id for s in self.sequences.values() if not s.is_finished}
        assert len(placed) == len(live)
        assert set(placed) == live
        assert self.sequences.keys() - live <= self._retiring.keys()
        assert {self.sequences[i].request.request_id for i in live} == self.requests.keys()
        runs = [item.seq_id for batch in in_flight for item in batch.scheduled]
        for sequence in self.sequences.values():
            self._check_sequence(sequence, runs.count(sequence.seq_id))
        self.tables.check_invariants([*self._retiring.values(), *running])

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        sequence = Sequence(
            request=request,
            index=index,
            seq_id=self._next_seq_id,
            max_output_tokens=max_output_tokens(self._config, request),
        )
        self._next_seq_id += 1
        return sequence

    def _retire(self, sequence: Sequence) -> None:
        """Let the workers forget a sequence; its blocks come back when no step runs it."""
        self._to_forget.append(sequence.seq_id)
        self.tables.break_promises(sequence)
        if self._is_in_flight(sequence):
            self._retiring[sequence.seq_id] = sequence
        else:
            self.tables.release(sequence)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step >= self.num_steps_run

    def _count_finished(self, request: Request) -> None:
        request.num_unfinished -= 1
        if not request.num_unfinished:
            del self.requests[request.request_id]

    def _check_sequence(self, sequence: Sequence, num_steps_in_flight: int) -> None:
        assert self._is_in_flight(sequence) == (num_steps_in_flight > 0)
        num_pending = sequence.num_tokens_in_workers - sequence.num_tokens
        assert sequence.is_finished or 0 <= num_pending <= num_steps_in_flight
        assert len(sequence.output_token_ids) <= sequence.max_output_tokens
        is_running = sequence.status is SequenceStatus.RUNNING
        assert bool(sequence.block_ids) == (is_running or sequence.seq_id in self._retiring)
        assert sequence.num_slots == len(sequence.block_ids) * self._config.block_size
        room = min(sequence.num_slots, self._config.length_limit)
        assert sequence.num_computed_tokens <= room
        assert not is_running or sequence.num_tokens_to_run >= 0
