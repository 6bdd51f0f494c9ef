"""The ranks of one model as threads of this process, for tests of the numerics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from llmrt.worker.tensor_parallel import SingleGroup, TPGroup

_T = TypeVar("_T")
_TIMEOUT_S = 60.0


class ThreadGroup:
    """A TPGroup whose ranks are threads: everyone lays a tensor on the table, then all look."""

    def __init__(self, rank: int, table: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(table)
        self._table = table
        self._barrier = barrier

    def all_reduce_(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def gather_columns(self, x_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        parts = self._exchange(x_RV)
        assert tuple(p.shape[1] for p in parts) == widths
        return torch.cat(parts, dim=1) if self.rank == 0 else None

    def broadcast_(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def destroy(self) -> None:
        self._barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._table[self.rank] = x.clone()
        self._barrier.wait(_TIMEOUT_S)
        parts = [p for p in self._table if p is not None]
        self._barrier.wait(_TIMEOUT_S)
        return parts


def thread_groups(size: int) -> list[TPGroup]:
    """Return one group object for each rank."""
    if size == 1:
        return [SingleGroup()]
    table: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadGroup(rank, table, barrier) for rank in range(size)]


def on_every_rank(groups: list[TPGroup], run: Callable[[TPGroup], _T]) -> list[_T]:
    """Run a function on all ranks at once and return its results by rank."""

    def guarded(group: TPGroup) -> _T:
        try:
            return run(group)
        except BaseException:
            if isinstance(group, ThreadGroup):
                group.destroy()
            raise

    if len(groups) == 1:
        return [guarded(groups[0])]
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(guarded, group) for group in groups]
    broken = [f.exception() for f in futures if f.exception() is not None]
    for error in broken:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [f.result() for f in futures]
