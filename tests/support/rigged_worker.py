"""The real worker, with faults: see tests.support.rigged."""

from __future__ import annotations

from llmrt.config import WorkerConfig, WorkerContext
from llmrt.messages import Answer, Command, Stop, Stopped
from llmrt.worker.worker import Worker
from tests.support.light_worker import PHASES
from tests.support.rigged import come_to


class RiggedWorker(Worker):
    """Does what it is rigged to do, then what a worker does."""

    def __init__(self, config: WorkerConfig, context: WorkerContext) -> None:
        come_to("init", context.rank)
        super().__init__(config, context)

    def handle(self, command: Command) -> Answer:
        come_to(PHASES[type(command)], self.rank)
        return super().handle(command)

    def stop(self, command: Stop) -> Stopped:
        come_to("stop", self.rank)
        return super().stop(command)
