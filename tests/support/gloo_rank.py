"""A process that is one rank of a gloo group, on a socket that its parent bound.

Run as `python -m tests.support.gloo_rank PORT FD RANK SIZE`; prints what it found, as JSON.
"""

from __future__ import annotations

import json
import sys

import psutil
import torch

from llmrt.config import Rendezvous, WorkerContext
from llmrt.worker.tensor_parallel import TorchGroup, join_group


def main(port: int, fd: int, rank: int, size: int) -> None:
    context = WorkerContext(
        rank=rank,
        world_size=size,
        report=lambda phase, done=0, total=0: None,
        rendezvous=Rendezvous(host="127.0.0.1", port=port, listen_fd=fd if rank == 0 else None),
    )
    group = join_group(context, torch.device("cpu"))
    widths = (32, 16, 9)[:size]
    mine = torch.full((2, widths[rank]), float(rank))
    found = {
        "kind": type(group).__name__,
        "sum": group.all_reduce_(torch.full((2, 3), rank + 1.0, dtype=torch.bfloat16)).tolist(),
        "columns": _as_list(group.gather_columns(mine, widths)),
        "first": group.broadcast_(torch.tensor([rank, 7 - rank])).tolist(),
        "default_group": torch.distributed.is_initialized(),
        "listens_on": sorted(
            {
                c.laddr.ip
                for c in psutil.Process().net_connections()
                if c.status == psutil.CONN_LISTEN
            }
        ),
    }
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    assert isinstance(group, TorchGroup)
    group.destroy()


def _as_list(columns: torch.Tensor | None) -> list[list[float]] | None:
    return None if columns is None else columns.tolist()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
