"""StepLoop: one step after another, the next one sent while the last still runs.

It knows neither workers nor threads: `Steps` starts a step somewhere and waits for its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from llmrt.messages import Batch, BatchResult
from llmrt.scheduler.scheduler import Scheduler
from llmrt.scheduler.updates import Update

Handle = TypeVar("Handle")


class Steps(Protocol[Handle]):
    """Runs batches on the workers of an engine, in the order they are started."""

    def start(self, batch: Batch) -> Handle:
        """Send a batch to the workers; do not wait."""
        ...

    def finish(self, handle: Handle) -> BatchResult:
        """Wait until a batch has run and return what rank 0 sampled."""
        ...


class StepLoop(Generic[Handle]):
    """Runs what a scheduler has to run, keeping at most *depth* steps in flight.

    schedule N+1 ─► start N+1 ─► finish N ─► update N ─► deliver N ─► schedule N+2 ...
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Steps[Handle],
        deliver: Callable[[Sequence[Update]], None],
        *,
        depth: int = 2,
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._deliver = deliver
        self._depth = depth
        self._in_flight: deque[Handle] = deque()

    def run_once(self) -> bool:
        """Start the next step and finish the oldest that is due; return whether there was one."""
        batch = self._scheduler.schedule() if len(self._in_flight) < self._depth else None
        if batch is not None:
            self._in_flight.append(self._steps.start(batch))
        if self._in_flight and (batch is None or len(self._in_flight) == self._depth):
            self._finish_oldest()
            return True
        return batch is not None

    def drain(self) -> None:
        """Finish every step in flight, starting none."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        result = self._steps.finish(self._in_flight[0])
        self._in_flight.popleft()
        self._deliver(self._scheduler.update(result))
