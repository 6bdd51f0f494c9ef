"""Collectives through shared memory, between threads here and between processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from llmrt.errors import ConfigError, WorkerDiedError, WorkerHungError
from llmrt.shared_memory_layout import (
    FLAG_BYTES,
    RUNTIME_BYTES,
    SLOT_BYTES,
    flag_offset,
    shared_memory_bytes,
    slot_offset,
    slots_offset,
)
from llmrt.worker.shared_memory import SharedMemoryGroup

SLOT_ITEMS = SLOT_BYTES // 4


@contextmanager
def memory_file(size: int) -> Iterator[int]:
    fd = os.memfd_create("llmrt-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, shared_memory_bytes(size))
        yield fd
    finally:
        os.close(fd)


def run_ranks(size: int, run: Callable[[SharedMemoryGroup], object]) -> list[object]:
    """Run a function on *size* ranks, each a thread with a mapping of its own."""
    with memory_file(size) as fd:
        groups = [
            SharedMemoryGroup(fd, rank=rank, size=size, is_aborted=lambda: False, timeout=30.0)
            for rank in range(size)
        ]
        try:
            with ThreadPoolExecutor(size) as pool:
                return [f.result() for f in [pool.submit(run, g) for g in groups]]
        finally:
            for group in groups:
                group.destroy()


def test_parts_of_the_memory_overlap() -> None:
    for size in range(1, 130):
        assert flag_offset(0) == RUNTIME_BYTES
        assert flag_offset(size - 1) + FLAG_BYTES <= slots_offset(size)
        starts = [slot_offset(size, rank, index) for rank in range(size) for index in range(2)]
        assert starts == list(range(slots_offset(size), shared_memory_bytes(size), SLOT_BYTES))
        assert slots_offset(size) % 4096 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_get_different_bits(size: int, dtype: torch.dtype) -> None:
    def reduce(group: SharedMemoryGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        return group.all_reduce_(torch.randn(7, 33, generator=generator).to(dtype))

    results = run_ranks(size, reduce)
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    expected = torch.randn(7, 33, generator=generators[0]).to(dtype)
    for generator in generators[1:]:
        expected += torch.randn(7, 33, generator=generator).to(dtype)
    for result in results:
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("num", [0, 1, SLOT_ITEMS - 1, SLOT_ITEMS, SLOT_ITEMS + 1, 3 * SLOT_ITEMS])
def test_a_tensor_longer_than_a_slot_is_cut_off(num: int) -> None:
    def reduce(group: SharedMemoryGroup) -> torch.Tensor:
        return group.all_reduce_(torch.arange(num, dtype=torch.float32) * (group.rank + 1))

    for result in run_ranks(2, reduce):
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, torch.arange(num, dtype=torch.float32) * 3)


def test_a_tensor_with_gaps_is_not_changed_in_place() -> None:
    def reduce(group: SharedMemoryGroup) -> torch.Tensor:
        whole = torch.full((4, 6), float(group.rank + 1))
        assert group.all_reduce_(whole[:, ::2]).data_ptr() == whole.data_ptr()
        return whole

    for result in run_ranks(2, reduce):
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result[:, ::2], torch.full((4, 3), 3.0))


@pytest.mark.parametrize("num_rows", [1, 5, 3000])
def test_gathered_columns_are_in_another_order(num_rows: int) -> None:
    widths = (96, 64, 97)

    def gather(group: SharedMemoryGroup) -> torch.Tensor | None:
        rows = torch.arange(num_rows, dtype=torch.float32)[:, None]
        columns = torch.arange(widths[group.rank], dtype=torch.float32)
        return group.gather_columns(rows * 1000 + columns + group.rank * 0.25, widths)

    first, *others = run_ranks(3, gather)
    assert others == [None, None]
    assert isinstance(first, torch.Tensor)
    rows = torch.arange(num_rows, dtype=torch.float32)[:, None] * 1000
    expected = [
        rows + torch.arange(w, dtype=torch.float32) + r * 0.25 for r, w in enumerate(widths)
    ]
    assert torch.equal(first, torch.cat(expected, dim=1))


@pytest.mark.parametrize("num", [3, SLOT_ITEMS + 5])
def test_a_broadcast_brings_another_ranks_numbers(num: int) -> None:
    def broadcast(group: SharedMemoryGroup) -> list[int]:
        return group.broadcast_(torch.arange(num) * (1 if group.rank == 0 else -1)).tolist()

    assert run_ranks(3, broadcast) == [list(range(num))] * 3


def test_a_fast_rank_overwrites_what_a_slow_one_still_reads() -> None:
    """Any mix of collectives, with ranks that dawdle at random places."""

    def run(group: SharedMemoryGroup) -> None:
        delays, kinds = random.Random(group.rank), random.Random(0)
        for i in range(1500):
            if delays.random() < 0.02:
                time.sleep(0.0005)
            mine = torch.full((2, 3), float(i * (group.rank + 1)))
            match kinds.choice(("reduce", "gather", "broadcast")):
                case "reduce":
                    assert group.all_reduce_(mine).tolist() == [[6.0 * i] * 3] * 2
                case "gather":
                    found = group.gather_columns(mine, (3, 3, 3))
                    row = [float(i * (r + 1)) for r in range(3) for _ in range(3)]
                    assert found is None or found.tolist() == [row] * 2
                case "broadcast":
                    assert group.broadcast_(mine).tolist() == [[float(i)] * 3] * 2

    run_ranks(3, run)


def test_a_dead_peer_is_waited_for() -> None:
    has_died = threading.Event()
    with memory_file(2) as fd, ThreadPoolExecutor(1) as pool:
        group = SharedMemoryGroup(fd, rank=0, size=2, is_aborted=has_died.is_set, timeout=60.0)
        waiting = pool.submit(group.all_reduce_, torch.ones(3))
        has_died.set()
        with pytest.raises(WorkerDiedError, match=r"rank 0 waited for rank 1"):
            waiting.result(timeout=30)
        group.destroy()


def test_a_peer_that_never_comes_is_waited_for_without_end() -> None:
    with memory_file(2) as fd:
        group = SharedMemoryGroup(fd, rank=1, size=2, is_aborted=lambda: False, timeout=0.05)
        with pytest.raises(WorkerHungError, match=r"rank 1 waited 0\.05 s for rank 0"):
            group.broadcast_(torch.ones(3))
        group.destroy()


def test_memory_that_is_too_short_is_mapped() -> None:
    with memory_file(2) as fd, pytest.raises(ConfigError, match="3 ranks need"):
        SharedMemoryGroup(fd, rank=0, size=3, is_aborted=lambda: False, timeout=1.0)


def test_a_group_that_was_left_keeps_its_mapping() -> None:
    with memory_file(1) as fd:
        group = SharedMemoryGroup(fd, rank=0, size=1, is_aborted=lambda: False, timeout=1.0)
        group.broadcast_(torch.ones(3))
        group.destroy()
        group.destroy()
        assert "llmrt-test" not in Path("/proc/self/maps").read_text()


@pytest.mark.slow
def test_processes_get_other_sums_and_outlive_a_killed_rank() -> None:
    """Three processes on the cores there are; the last one is killed in the middle."""
    size = 3
    with memory_file(size) as fd:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.reducing_rank", str(fd), str(r), str(size)],
                pass_fds=[fd],
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]
        try:
            for rank in ranks:
                assert rank.stdout is not None
                assert rank.stdout.readline() == "20000 sums were right\n"
            ranks[-1].send_signal(signal.SIGKILL)
            ranks[-1].wait(30)
            os.pwrite(fd, b"\1", 0)
            for rank in ranks[:-1]:
                out, _ = rank.communicate(timeout=30)
                assert out == "WorkerDiedError\n"
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
