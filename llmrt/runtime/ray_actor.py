"""RankActor: what Ray starts for one rank. It holds the rank's resources and its guard's life.

    engine ══ control, TCP ══ RankActor ══ guard ──fork──► rank r      (one each, on r's node)
    engine ══ channel, TCP or a unix socket ═══════════════► rank r

The worker itself never runs in the actor's process: that one has Ray's threads, and what Ray does
with it must not depend on what a model does. The guard dies with the actor, and the rank with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from llmrt.config import Rendezvous
from llmrt.runtime import shared_memory
from llmrt.runtime.channel import describe_error
from llmrt.runtime.doorway import Address, connect
from llmrt.runtime.events import LaunchFailed, Membership
from llmrt.runtime.forwarded_environment import NO_DEVICES
from llmrt.runtime.handshake import Purpose
from llmrt.runtime.interpreter import python_command
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.launchers.mp import GuardHandle, Seat
from llmrt.runtime.ray_relay import Relay
from llmrt.version import __version__

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where Ray put an actor."""

    node_id: str
    address: str
    """Of its node, as Ray knows it."""
    pid: int
    version: str
    """Of llmrt there."""
    rendezvous_port: int
    """Bound by this actor on that address, in case it becomes rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFile:
    """A memory file that an actor holds open, for others of its node."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What an actor is to run, and whom it reports to."""

    rank: int
    world_size: int
    spec: GroupSpec = field(repr=False)
    """With the configuration of this rank alone."""
    addresses: tuple[Address, ...]
    secret: bytes = field(repr=False)
    rendezvous: Rendezvous | None
    memory: SharedFile | None
    has_own_device: bool
    """Whether Ray gave this actor a device of its own."""


class RankActor:
    """One rank's place on a cluster."""

    def __init__(self) -> None:
        self._address = _node_address()
        self._listener: socket.socket | None = _listen(self._address)
        self._memory_fd: int | None = None

    def where(self) -> Whereabouts:
        """Return where this is."""
        assert self._listener is not None
        return Whereabouts(
            node_id=_context().get_node_id(),
            address=self._address,
            pid=os.getpid(),
            version=__version__,
            rendezvous_port=self._listener.getsockname()[1],
        )

    def share_memory(self, num_bytes: int) -> SharedFile:
        """Make the memory file of the group and hold it open."""
        self._memory_fd = shared_memory.create(num_bytes)
        return SharedFile(path=f"/proc/{os.getpid()}/fd/{self._memory_fd}")

    def can_open(self, memory: SharedFile) -> bool:
        """Open a memory file of another actor; return whether that worked."""
        if self._memory_fd is None:
            with contextlib.suppress(OSError):  # another user, or another container
                self._memory_fd = os.open(memory.path, os.O_RDWR | os.O_CLOEXEC)
        return self._memory_fd is not None

    def run(self, orders: Orders) -> None:
        """Run a rank, to its end or the engine's."""
        with contextlib.ExitStack() as stack:
            control = stack.enter_context(_call_in(orders, Purpose.CONTROL))
            relay = Relay(control, _raylet_pid())
            try:
                channel = stack.enter_context(_call_in(orders, Purpose.CHANNEL))
                spec = replace(orders.spec, env=self._environment(orders))
                handle = GuardHandle(
                    replace(spec, python=python_command()),
                    spec.start_method,
                    self._seat(orders, channel),
                )
            except Exception as error:
                what = f"starting the guard of rank {orders.rank}"
                relay.say(LaunchFailed(what=what, failure=describe_error(orders.rank, error)))
                relay.flush()
                return
            channel.close()  # it is the rank's now
            self._let_go()
            relay.run(handle)

    def _seat(self, orders: Orders, channel: socket.socket) -> Seat:
        rendezvous = orders.rendezvous
        if rendezvous is not None:
            rendezvous = replace(rendezvous, own_host=self._address)
        listens = rendezvous is not None and orders.rank == 0
        membership = Membership(
            rank=orders.rank,
            world_size=orders.world_size,
            rendezvous=rendezvous,
            device_index=0 if orders.has_own_device else None,
            shares_memory=orders.memory is not None,
            listens=listens,
        )
        return Seat(
            membership=membership,
            channel=channel,
            memory_fd=self._memory_fd if orders.memory is not None else None,
            listener=self._listener if listens else None,
        )

    def _environment(self, orders: Orders) -> dict[str, str]:
        """Return the rank's variables: threads as the cores that Ray gave this actor."""
        # Ray says OMP_NUM_THREADS=1 by itself, and shows all GPUs to an actor that asked for none.
        num_cpus = _context().get_assigned_resources().get("CPU", 0.0)
        own = {_THREADS: str(max(1, int(num_cpus)))}
        if not orders.has_own_device:
            own |= NO_DEVICES
        return {**own, **orders.spec.env}

    def _let_go(self) -> None:
        """Close what the guard has now."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None


def _raylet_pid() -> int | None:
    """Return the process that started this one for Ray."""
    pid = os.environ.get("RAY_RAYLET_PID", "")
    return int(pid) if pid.isdecimal() else None


def _call_in(orders: Orders, purpose: Purpose) -> socket.socket:
    return connect(orders.addresses, orders.secret, orders.rank, purpose)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def _node_address() -> str:
    return str(import_module("ray.util").get_node_ip_address())


def _context() -> Any:
    return import_module("ray").get_runtime_context()
