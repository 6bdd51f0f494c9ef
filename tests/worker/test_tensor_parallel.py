"""How ranks meet, and which collectives they use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from llmrt.config import WorkerContext
from llmrt.errors import ConfigError
from llmrt.shared_memory_layout import shared_memory_bytes
from llmrt.worker import tensor_parallel
from llmrt.worker.shared_memory import SharedMemoryGroup
from llmrt.worker.tensor_parallel import SingleGroup, join_group

CPU = torch.device("cpu")


def context(world_size: int, shared_memory_fd: int | None = None) -> WorkerContext:
    return WorkerContext(
        rank=0,
        world_size=world_size,
        report=lambda phase, done=0, total=0: None,
        shared_memory_fd=shared_memory_fd,
    )


def test_one_rank_waits_for_others() -> None:
    group = join_group(context(1), CPU)
    assert isinstance(group, SingleGroup)
    ones = torch.ones(2, 3)
    assert group.all_reduce_(ones) is ones
    assert group.gather_columns(ones, (3,)) is ones
    assert group.broadcast_(ones) is ones
    group.destroy()


def test_ranks_of_one_host_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("llmrt-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, shared_memory_bytes(2))
    group = join_group(context(2, fd), CPU)
    assert isinstance(group, SharedMemoryGroup)
    group.destroy()
    monkeypatch.setattr(tensor_parallel.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="no address to meet"):
        join_group(context(2, fd), CPU)
    os.close(fd)


def test_ranks_without_any_way_to_meet_wait() -> None:
    with pytest.raises(ConfigError, match="rank 0 of 2 was given no address"):
        join_group(context(2), CPU)


@pytest.mark.slow
def test_gloo_ranks_disagree_or_listen_to_the_world() -> None:
    size = 3
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.gloo_rank", *map(str, (port, fd, r, size))],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]
    try:
        found = [json.loads(r.stdout.readline()) for r in ranks if r.stdout is not None]
        ended = [rank.communicate("\n", timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert len(ended) == size
    assert [rank.returncode for rank in ranks] == [0] * size
    for rank, answers in enumerate(found):
        assert answers["kind"] == "TorchGroup"
        assert answers["sum"] == [[6.0] * 3] * 2
        assert answers["first"] == [0, 7]
        assert answers["default_group"] is False
        assert answers["listens_on"] == ["127.0.0.1"]
        columns = [[0.0] * 32 + [1.0] * 16 + [2.0] * 9] * 2
        assert answers["columns"] == (columns if rank == 0 else None)
