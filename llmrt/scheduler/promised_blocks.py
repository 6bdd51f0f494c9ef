"""PromisedBlocks: full blocks that a running sequence is about to compute, and who waits for them.

Requests with a common beginning often arrive together, and the `n` completions of one request
always do. Started at once, each would compute the same blocks. So the first promises what it will
compute; those behind it are parked until the last block that they share is there, or until the
promise is broken (preempted, aborted). Nobody waits for a sequence that ranks behind it, so nobody
waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized

from llmrt.scheduler.request import Sequence


class PromisedBlocks:
    """Promises by block hash, with the sequences parked on them."""

    def __init__(self, wake: Callable[[Sequence], None]) -> None:
        self._wake = wake
        self._promised_by: dict[bytes, Sequence] = {}
        self._parked_on: dict[bytes, list[Sequence]] = {}
        self._parked: dict[int, Sequence] = {}

    @property
    def num_parked(self) -> int:
        """Return how many sequences wait for a promised block."""
        return len(self._parked)

    @property
    def parked(self) -> Iterable[Sequence]:
        """Return the sequences that wait."""
        return self._parked.values()

    def promise(self, sequence: Sequence, block_hashes: Iterable[bytes]) -> None:
        """Note that *sequence* computes these blocks; an older promise of the same block stands."""
        for block_hash in block_hashes:
            self._promised_by.setdefault(block_hash, sequence)

    def last_worth_waiting_for(
        self, sequence: Sequence, missing_hashes: Sized[bytes]
    ) -> bytes | None:
        """Return the last of the chain *missing_hashes* that one before *sequence* has promised."""
        last = None
        for block_hash in missing_hashes:
            owner = self._promised_by.get(block_hash)
            if owner is None or owner.rank > sequence.rank:
                break
            last = block_hash
        return last

    def park(self, sequence: Sequence, block_hash: bytes) -> None:
        """Keep *sequence* until the promise of *block_hash* is kept or broken; then wake it."""
        self._parked[sequence.seq_id] = sequence
        self._parked_on.setdefault(block_hash, []).append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget a parked sequence; nothing happens where it is not parked."""
        self._parked.pop(sequence.seq_id, None)

    def settle(self, sequence: Sequence, block_hashes: Iterable[bytes]) -> None:
        """End the promises of *sequence* for these blocks, kept or broken; wake who waits."""
        for block_hash in block_hashes:
            if self._promised_by.get(block_hash) is sequence:
                del self._promised_by[block_hash]
                self._wake_parked_on(block_hash)

    def check_invariants(self) -> None:
        """Assert that everybody parked waits for a promise that stands."""
        waiting = {s.seq_id for h in self._promised_by for s in self._parked_on.get(h, ())}
        assert self._parked.keys() <= waiting
        assert self._parked_on.keys() <= self._promised_by.keys()

    def _wake_parked_on(self, block_hash: bytes) -> None:
        for sequence in self._parked_on.pop(block_hash, ()):
            if self._parked.pop(sequence.seq_id, None) is not None:
                self._wake(sequence)
