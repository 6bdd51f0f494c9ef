"""WaitingQueue: who is admitted next.

The order is (priority, arrival), and a preempted sequence has kept its arrival, so it comes before
all that were never admitted. So that nobody waits for ever while better priorities keep arriving,
every `MAX_OVERTAKES` admissions past an older sequence are followed by one of the oldest, whatever
its priority. From then on it ranks before all priorities, so that it is not preempted for them
either.

Two heaps with lazy deletion; no operation looks at more than a few of the waiting, however many
there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from llmrt.scheduler.request import Sequence

MAX_OVERTAKES = 8
"""Admissions in a row that may pass over the sequence that has waited longest."""

_SLACK = 64
"""Dead heap entries that are not worth a clean-up."""


class WaitingQueue:
    """Sequences that wait to be admitted."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}
        self._by_rank: list[tuple[tuple[int, int, int], int]] = []
        self._by_age: list[int] = []
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def num_entries(self) -> int:
        """Return how many heap entries there are, dead ones included."""
        return len(self._by_rank) + len(self._by_age)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at its place."""
        self._waiting[sequence.seq_id] = sequence
        heappush(self._by_rank, (sequence.rank, sequence.seq_id))
        heappush(self._by_age, sequence.seq_id)
        if self.num_entries > 4 * len(self._waiting) + _SLACK:
            self._rebuild()

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence; nothing happens where it is not in the queue."""
        self._waiting.pop(sequence.seq_id, None)

    def peek(self) -> Sequence | None:
        """Return who is next, and stays next until it is popped or a better one arrives."""
        if not self._waiting:
            return None
        if self._num_overtakes >= MAX_OVERTAKES:
            self._promote_oldest()
        return self._first()

    def pop(self, sequence: Sequence) -> None:
        """Remove the sequence that `peek` returned, to admit it."""
        passes_over_another = sequence is not self._oldest()
        self._num_overtakes = self._num_overtakes + 1 if passes_over_another else 0
        del self._waiting[sequence.seq_id]

    def _promote_oldest(self) -> None:
        oldest = self._oldest()
        oldest.promote()
        heappush(self._by_rank, (oldest.rank, oldest.seq_id))
        self._num_overtakes = 0

    def _first(self) -> Sequence:
        while self._by_rank[0][1] not in self._waiting:
            heappop(self._by_rank)
        return self._waiting[self._by_rank[0][1]]

    def _oldest(self) -> Sequence:
        while self._by_age[0] not in self._waiting:
            heappop(self._by_age)
        return self._waiting[self._by_age[0]]

    def _rebuild(self) -> None:
        self._by_rank = [(s.rank, s.seq_id) for s in self._waiting.values()]
        self._by_age = list(self._waiting)
        heapify(self._by_rank)
        heapify(self._by_age)
