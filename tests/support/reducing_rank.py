"""A process that is one rank of a shared-memory group: it reduces until a peer dies.

Run as `python -m tests.support.reducing_rank FD RANK SIZE`. The first byte of the memory is the
runtime's word that a rank died.
"""

from __future__ import annotations

import os
import sys

import torch

from llmrt.errors import LlmrtError
from llmrt.worker.shared_memory import SharedMemoryGroup

NUM_CHECKED = 20_000
WIDTH = 576


def main(fd: int, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    group = SharedMemoryGroup(
        fd,
        rank=rank,
        size=size,
        is_aborted=lambda: os.pread(fd, 1, 0) == b"\1",
        timeout=60.0,
    )
    try:
        check_sums(group)
        print(f"{NUM_CHECKED} sums were right", flush=True)
        while True:
            group.all_reduce_(torch.ones(WIDTH))
    except LlmrtError as error:
        print(type(error).__name__, flush=True)
    finally:
        group.destroy()


def check_sums(group: SharedMemoryGroup) -> None:
    ranks_sum = group.size * (group.size + 1) / 2
    mine = torch.empty(WIDTH)
    for i in range(NUM_CHECKED):
        mine.fill_((i % 1000) * (group.rank + 1))
        group.all_reduce_(mine)
        assert (mine == (i % 1000) * ranks_sum).all(), f"reduction {i} is wrong: {mine}"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
