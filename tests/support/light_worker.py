"""A worker of an engine without a model: every token is the last one plus one. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from llmrt.config import WorkerConfig, WorkerContext
from llmrt.messages import (
    AllocateCache,
    Answer,
    Batch,
    BatchResult,
    CallFunction,
    Command,
    Done,
    Execute,
    Load,
    LoadReport,
    SampledToken,
    Stop,
    Stopped,
)
from llmrt.worker.function_calls import call_function
from tests.support.rigged import come_to

PHASES: dict[type, str] = {
    Load: "load",
    AllocateCache: "allocate",
    Execute: "execute",
    CallFunction: "call",
    Stop: "stop",
}
SECONDS_PER_STEP = 0.001
FIRST_TOKEN = 10
"""Of a vocabulary whose first ones are special."""


class LightWorker:
    """Answers everything that a session asks."""

    def __init__(self, config: WorkerConfig, context: WorkerContext) -> None:
        self.rank = context.rank
        self.pid = os.getpid()
        self._config = config
        self._report = context.report
        self._last: dict[int, int] = {}
        come_to("init", context.rank)

    def handle(self, command: Command) -> Answer:
        phase = PHASES[type(command)]
        if phase in ("load", "allocate"):
            self._report(f"{phase} at last")
        come_to(phase, self.rank)
        match command:
            case Load():
                return self._load_report()
            case AllocateCache():
                return Done()
            case Execute(batch=batch):
                time.sleep(SECONDS_PER_STEP)
                return BatchResult(step=batch.step, tokens=tuple(self._sample(batch)))
            case CallFunction():
                return call_function(command, self, self.rank)
            case Stop():
                return self.stop(command)

    def stop(self, command: Stop) -> Stopped:
        come_to("stop", self.rank)
        return Stopped(rank=self.rank, group_destroyed=command.destroy_group)

    def _load_report(self) -> LoadReport:
        return LoadReport(
            rank=self.rank,
            device="cpu",
            free_bytes=1 << 20,
            block_bytes=1 << 10,
            weight_bytes=0,
            dtype="float32",
            num_threads=1,
        )

    def _sample(self, batch: Batch) -> Iterator[SampledToken]:
        for new in batch.new:
            self._last[new.seq_id] = new.token_ids[-1]
        for scheduled in batch.scheduled:
            if scheduled.samples and self.rank == 0:
                token_id = max(FIRST_TOKEN, self._last[scheduled.seq_id] + 1) % 200
                self._last[scheduled.seq_id] = token_id
                yield SampledToken(seq_id=scheduled.seq_id, token_id=token_id)
