"""SharedMemoryGroup: collectives between the CPU ranks of one host, through a memory file.

    rank 0    slot 0 │ slot 1    flag        Collective number n uses slot n % 2 of each rank:
    rank 1    slot 0 │ slot 1    flag
      …                                        rank 0                      rank 1
                                               wait until flags ≥ n-1      wait until flags ≥ n-1
                                               slot[0][n%2] ◄─ data        slot[1][n%2] ◄─ data
                                               flag[0] ◄─ n                flag[1] ◄─ n
                                               wait until flag[1] ≥ n      wait until flag[0] ≥ n
                                               read slots in rank order    read slots in rank order

`flag[r] = n` says two things: r's data of collective n is in its slot, and r has read all it
wanted of every collective before n. So when all flags are at least n-1, nobody still reads
collective n-2, and its slot may be written again.

Why plain loads and stores are enough on x86-64: stores of one core become visible to every other
core in program order, loads of one core are made in program order (TSO). A rank that sees the flag
therefore sees the data stored before it. Stores by torch's pool threads are ordered before the
flag, too: the pool's barrier comes between. glibc's non-temporal copies (which TSO does not cover)
end with a fence. The compiler cannot swap the accesses, because each happens in a call of its own.
A flag is aligned and below 2^32 for as long as anyone will run it, so a load cannot be torn.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from llmrt import shared_memory_layout as layout
from llmrt.errors import ConfigError, WorkerDiedError, WorkerHungError

_NUM_SPINS = 200
"""Looks at a flag before giving the core away: some 20 µs, as long as a peer on a core of its own
takes. More would be taken from the peers where ranks share cores."""
_NUM_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_FLAG_ITEMS = layout.FLAG_BYTES // 8


class SharedMemoryGroup:
    """A TPGroup over shared memory. Sums are added in rank order: all ranks get the same bits."""

    def __init__(
        self,
        fd: int,
        *,
        rank: int,
        size: int,
        is_aborted: Callable[[], bool],
        timeout: float,
    ) -> None:
        needed = layout.shared_memory_bytes(size)
        available = os.fstat(fd).st_size
        if available < needed:
            raise ConfigError(
                f"The shared memory file has {available:,} bytes; {size} ranks need {needed:,}."
            )
        self.rank = rank
        self.size = size
        self._is_aborted = is_aborted
        self._timeout = timeout
        self._step = 0
        self._map: mmap.mmap | None = mmap.mmap(fd, needed)
        self._flags = memoryview(self._map)[layout.RUNTIME_BYTES :].cast("Q")
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over all ranks in place, in pieces of one slot."""
        contiguous = x.contiguous()
        flat = contiguous.view(-1)
        for piece in flat.split(layout.SLOT_BYTES // x.element_size()):
            self._all_reduce_piece(piece)
        return x if contiguous is x else x.copy_(contiguous)

    def gather_columns(self, x_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Copy every rank's columns to rank 0, as many rows at a time as fit a slot."""
        num_rows = x_RV.shape[0]
        rows_per_piece = max(1, layout.SLOT_BYTES // (max(widths) * x_RV.element_size()))
        out = x_RV.new_empty(num_rows, sum(widths)) if self.rank == 0 else None
        for start in range(0, num_rows, rows_per_piece):
            end = min(start + rows_per_piece, num_rows)
            self._gather_rows(x_RV[start:end], widths, None if out is None else out[start:end])
        return out

    def broadcast_(self, x: Tensor) -> Tensor:
        """Copy rank 0's in place, in pieces of one slot."""
        contiguous = x.contiguous()
        for piece in contiguous.view(-1).split(layout.SLOT_BYTES // x.element_size()):
            slots = self._begin(x.dtype)
            if self.rank == 0:
                slots[0][: piece.numel()].copy_(piece)
            self._publish()
            if self.rank != 0:
                self._wait_for(0, self._step)
                piece.copy_(slots[0][: piece.numel()])
        return x if contiguous is x else x.copy_(contiguous)

    def destroy(self) -> None:
        """Unmap the memory; may be called twice, waits for nobody."""
        if self._map is None:
            return
        self._slots.clear()
        self._flags.release()
        # The traceback of a failed step may still hold a view: then the memory goes with it.
        with suppress(BufferError):
            self._map.close()
        self._map = None

    def _all_reduce_piece(self, piece: Tensor) -> None:
        num = piece.numel()
        slots = self._begin(piece.dtype)
        slots[self.rank][:num].copy_(piece)
        self._publish()
        self._wait_for_all(self._step)
        torch.add(slots[0][:num], slots[1][:num], out=piece)
        for slot in slots[2:]:
            piece.add_(slot[:num])

    def _gather_rows(self, x_RV: Tensor, widths: tuple[int, ...], out_RV: Tensor | None) -> None:
        slots = self._begin(x_RV.dtype)
        if out_RV is None:
            slots[self.rank][: x_RV.numel()].view(x_RV.shape).copy_(x_RV)
            self._publish()
            return
        self._publish()
        column = 0
        for rank, width in enumerate(widths):
            target = out_RV[:, column : column + width]
            column += width
            if rank == 0:
                target.copy_(x_RV)
            else:
                self._wait_for(rank, self._step)
                target.copy_(slots[rank][: target.numel()].view(target.shape))

    def _begin(self, dtype: torch.dtype) -> list[Tensor]:
        """Open the next collective; returns its slot of each rank, free to be written."""
        self._wait_for_all(self._step)
        self._step += 1
        return self._typed_slots(dtype)[self._step % layout.SLOTS_PER_RANK]

    def _typed_slots(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return the slots as tensors, by index and rank; made once for each dtype."""
        if dtype not in self._slots:
            self._slots[dtype] = [
                [self._slot(dtype, rank, index) for rank in range(self.size)]
                for index in range(layout.SLOTS_PER_RANK)
            ]
        return self._slots[dtype]

    def _slot(self, dtype: torch.dtype, rank: int, index: int) -> Tensor:
        assert self._map is not None, "the group was left"
        return torch.frombuffer(
            self._map,
            dtype=dtype,
            count=layout.SLOT_BYTES // dtype.itemsize,
            offset=layout.slot_offset(self.size, rank, index),
        )

    def _publish(self) -> None:
        self._flags[self.rank * _FLAG_ITEMS] = self._step

    def _wait_for_all(self, step: int) -> None:
        for rank in range(self.size):
            self._wait_for(rank, step)

    def _wait_for(self, rank: int, step: int) -> None:
        """Wait until *rank* has published *step*: spin, then yield the core, then sleep."""
        index = rank * _FLAG_ITEMS
        flags = self._flags
        for _ in range(_NUM_SPINS):
            if flags[index] >= step:
                return
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if flags[index] >= step:
                return
        self._sleep_until(rank, step)

    def _sleep_until(self, rank: int, step: int) -> None:
        index = rank * _FLAG_ITEMS
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_SLEEP_S
        while self._flags[index] < step:
            if self._is_aborted():
                raise WorkerDiedError(
                    f"rank {self.rank} waited for rank {rank} when a rank of the engine died."
                )
            if time.monotonic() > deadline:
                raise WorkerHungError(
                    f"rank {self.rank} waited {self._timeout:g} s for rank {rank}, which did not "
                    "reach the same collective."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
