"""TPGroup: what the ranks of one engine do together, and the choice of how they do it."""

from __future__ import annotations

import platform
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from llmrt.config import Rendezvous, WorkerContext
from llmrt.errors import ConfigError
from llmrt.worker.shared_memory import SharedMemoryGroup

COLLECTIVE_TIMEOUT_S = 600.0
"""How long a rank waits for its peers. A net under the engine's own step limit, not a replacement:
it must outlast a logits processor that thinks."""


class TPGroup(Protocol):
    """The ranks that hold one model. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace *x* by the sum over all ranks, the same bits on each, and return it."""
        ...

    def gather_columns(self, x_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Return all ranks' columns side by side on rank 0, None elsewhere.

        Args:
            x_RV: this rank's columns.
            widths: number of columns by rank.
        """
        ...

    def broadcast_(self, x: Tensor) -> Tensor:
        """Replace *x* by rank 0's and return it."""
        ...

    def destroy(self) -> None:
        """Leave the group; waits for no peer."""
        ...


class SingleGroup:
    """A group of one: nothing to do."""

    rank = 0
    size = 1

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Return *x*: it is the sum."""
        return x

    def gather_columns(self, x_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Return *x_RV*: it has all columns."""
        return x_RV

    def broadcast_(self, x: Tensor) -> Tensor:
        """Return *x*: it is rank 0's."""
        return x

    def destroy(self) -> None:
        """Do nothing."""


class TorchGroup:
    """A torch.distributed backend: gloo between CPUs, NCCL between GPUs.

    The backend object is used directly, so no default process group is set in this process.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        # Any: torch's annotations leave the collectives of a backend out.
        self._backend = backend
        self.rank = rank
        self.size = size

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over all ranks in place."""
        self._backend.allreduce([x]).wait()
        return x

    def gather_columns(self, x_RV: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        """Gather on rank 0; columns travel padded to the widest rank's."""
        padded = x_RV.new_zeros(x_RV.shape[0], max(widths))
        padded[:, : x_RV.shape[1]] = x_RV
        gathered = [torch.empty_like(padded) for _ in widths]
        self._backend.allgather([gathered], [padded]).wait()
        if self.rank != 0:
            return None
        return torch.cat([g[:, :w] for g, w in zip(gathered, widths, strict=True)], dim=1)

    def broadcast_(self, x: Tensor) -> Tensor:
        """Copy rank 0's in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._backend.broadcast([x], options).wait()
        return x

    def destroy(self) -> None:
        """Shut the backend down without waiting for peers."""
        self._backend.abort()


def join_group(context: WorkerContext, device: torch.device) -> TPGroup:
    """Join the group of *context*: NCCL on GPUs, on CPUs shared memory where it is sound, or gloo.

    Raises:
        ConfigError: the ranks were given no way to meet.
    """
    if context.world_size == 1:
        return SingleGroup()
    if device.type == "cuda":
        return _join_nccl(context, device)
    if context.shared_memory_fd is not None and shared_memory_is_sound():
        return SharedMemoryGroup(
            context.shared_memory_fd,
            rank=context.rank,
            size=context.world_size,
            is_aborted=context.is_aborted,
            timeout=COLLECTIVE_TIMEOUT_S,
        )
    return _join_gloo(context)


def shared_memory_is_sound() -> bool:
    """Return whether this machine's stores become visible in the order they were made."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")


def _join_gloo(context: WorkerContext) -> TorchGroup:
    rendezvous = _rendezvous(context)
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    # Without an address gloo listens wherever this machine's host name points.
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(rendezvous))]
    store = _store(context, rendezvous)
    backend = ProcessGroupGloo(store, context.rank, context.world_size, options)
    return TorchGroup(backend, context.rank, context.world_size)


def _join_nccl(context: WorkerContext, device: torch.device) -> TorchGroup:
    torch.cuda.set_device(device)
    store = _store(context, _rendezvous(context))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    backend = dist.ProcessGroupNCCL(store, context.rank, context.world_size, options)
    return TorchGroup(backend, context.rank, context.world_size)


def _rendezvous(context: WorkerContext) -> Rendezvous:
    if context.rendezvous is None:
        raise ConfigError(
            f"rank {context.rank} of {context.world_size} was given no address to meet its peers."
        )
    return context.rendezvous


def _store(context: WorkerContext, rendezvous: Rendezvous) -> Store:
    """Return the store of the group, on the listening socket that the runtime bound."""
    return PrefixStore(
        "llmrt",
        TCPStore(
            rendezvous.host,
            rendezvous.port,
            world_size=context.world_size,
            is_master=context.rank == 0,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=rendezvous.listen_fd if context.rank == 0 else None,
        ),
    )


def _own_address(rendezvous: Rendezvous) -> str:
    """Return this machine's address on the network of the rendezvous; nothing is sent."""
    if rendezvous.own_host is not None:
        return rendezvous.own_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))
        return probe.getsockname()[0]
