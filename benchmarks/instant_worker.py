"""A worker without a model: every sequence that samples gets token 7 at once, so that a step costs
what the driver, the channel and the messages cost."""

from __future__ import annotations

from llmrt.config import WorkerContext
from llmrt.messages import Batch, BatchResult, Execute, Stop, Stopped, new_sampled_token


class InstantWorker:
    """Answers batches as rank 0 or another rank would."""

    def __init__(self, config: object, context: WorkerContext) -> None:
        self._rank = context.rank

    def handle(self, command: object) -> object:
        match command:
            case Execute(batch=batch):
                return self._run(batch)
            case Stop():
                return self.stop(command)
            case _:
                raise AssertionError(f"unexpected command {command!r}")

    def stop(self, command: Stop) -> Stopped:
        return Stopped(rank=self._rank, group_destroyed=True)

    def _run(self, batch: Batch) -> BatchResult:
        if self._rank != 0:
            return BatchResult(step=batch.step)
        tokens = tuple(
            new_sampled_token((s.seq_id, 7, None, None)) for s in batch.scheduled if s.samples
        )
        return BatchResult(step=batch.step, tokens=tokens)
