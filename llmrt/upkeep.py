"""Upkeep: what is done to an open engine between two steps: its caches, its weights, its sleep.

Every method runs on the session's thread, when no step is in flight.
"""

from __future__ import annotations

from typing import cast

from llmrt.config import Timeouts
from llmrt.errors import EngineAsleepError, RequestError
from llmrt.messages import (
    ApplyWeights,
    Done,
    DropWeights,
    OpenWeights,
    Sleep,
    Wake,
    WeightsChunk,
    WeightsCommand,
    WeightsRefused,
)
from llmrt.runtime.worker_group import WorkerGroup
from llmrt.scheduler.scheduler import Scheduler


class Upkeep:
    """Changes the workers of one session, and keeps its scheduler in step with them."""

    def __init__(
        self, group: WorkerGroup, scheduler: Scheduler, num_blocks: int, timeouts: Timeouts
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._num_blocks = num_blocks
        self._timeouts = timeouts
        self._has_own_weights = False
        """Whether the weights are tensors that were sent, which no checkpoint holds."""
        self.is_asleep = False

    def check_awake(self) -> None:
        """Raise EngineAsleepError while the engine sleeps."""
        if self.is_asleep:
            raise EngineAsleepError("the engine is asleep; call `wake()` first.")

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.check_awake()
        self._scheduler.reset_prefix_cache()

    # ---- sleep ----

    def sleep(self, level: int) -> None:
        """Free the KV cache; keep the weights in host memory (1) or drop them (2).

        Nothing happens where it sleeps already.

        Raises:
            RequestError: requests are unfinished, or the weights could not come back.
        """
        if level not in (1, 2):
            raise RequestError(f"sleep level must be 1 or 2, not {level!r}.")
        if self.is_asleep:
            return
        if self._scheduler.has_unfinished:
            stats = self._scheduler.stats()
            raise RequestError(
                f"the engine cannot sleep while {stats.num_running + stats.num_waiting} sequences "
                "are unfinished; wait for them, or cancel them."
            )
        if level == 2 and self._has_own_weights:
            raise RequestError(
                "sleep(level=2) drops the weights and reads the checkpoint again, but the tensors "
                "that update_weights() brought are in none; use level=1."
            )
        self._scheduler.reset_prefix_cache()
        self._group.call(Sleep(drops_weights=level == 2), self._timeouts.step)
        self.is_asleep = True

    def wake(self) -> None:
        """Bring the weights back and allocate the KV cache; nothing happens where it is awake.

        Raises:
            RequestError: the weights cannot be read again; the engine sleeps on.
        """
        if not self.is_asleep:
            return
        answers = self._group.call(
            Wake(num_blocks=self._num_blocks),
            self._timeouts.start_progress,
            renew_on_progress=True,
        )
        _raise_refusal("the engine sleeps on", answers)
        self.is_asleep = False

    # ---- weights ----

    def prepare_weights(self, command: OpenWeights | WeightsChunk) -> None:
        """Have the workers check, and hold, new weights or a part of them.

        Raises:
            RequestError: they do not fit the model, which stays as it is.
        """
        self.check_awake()
        _raise_refusal("the weights stay as they were", self._call(command))

    def apply_weights(self, update_id: int, *, is_checkpoint: bool) -> None:
        """Have the model use the weights of this update; cached prefixes were of the old ones."""
        self.check_awake()
        self._call(ApplyWeights(update_id=update_id))
        self._scheduler.reset_prefix_cache()
        self._has_own_weights = not is_checkpoint

    def drop_weights(self, update_id: int) -> None:
        """Forget what was sent of an update that will not be applied."""
        if not self.is_asleep:
            self._call(DropWeights(update_id=update_id))

    def _call(self, command: WeightsCommand) -> list[object]:
        return self._group.call(command, self._timeouts.step, renew_on_progress=True)


def _raise_refusal(consequence: str, answers: list[object]) -> None:
    for answer in cast("list[Done | WeightsRefused]", answers):
        if isinstance(answer, WeightsRefused):
            raise RequestError(f"{consequence}: {answer.reason}")
