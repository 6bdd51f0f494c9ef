"""What a launcher tells the owner of a group, and what the owner tells it.

    owner ── Setup (once), SignalRank, DumpStacks, ForwardOutput, Abort, Shutdown ──► guard
    owner ◄── Phase, RankStarted, RankExited, Output, OutputForwarded, RankState, Stacks,
              LaunchFailed ── guard

GuardExited is what the owner's side of the launcher adds when the guard itself is gone, RankDoomed
what is added by whoever stands above a guard.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmrt.config import Rendezvous
from llmrt.errors import RankFailure

Stream = Literal["stdout", "stderr"]

EXECUTING = "executing"
"""The phase of a rank that is started afresh because the guard could not safely be forked."""

THREADS_PROVEN = "thread pools proven"
"""The phase that a rank of a fork-born guard reports before anything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What the one rank of a guard is in a group whose other ranks have guards of their own."""

    rank: int
    world_size: int
    rendezvous: Rendezvous | None
    """Where the group meets, as this rank reaches it; its `listen_fd` is not filled in."""
    device_index: int | None
    shares_memory: bool
    """Whether the descriptor of the group's memory file follows that of the channel."""
    listens: bool
    """Whether the bound rendezvous socket follows those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the guard is to run."""

    entry: str
    configs: tuple[bytes, ...] = field(repr=False)
    """Pickled, one per rank: only the rank itself unpickles its own."""
    preload: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    shared_memory_bytes: int
    rendezvous: bool
    python: tuple[str, ...]
    """How to start an interpreter, for ranks that cannot be forked."""
    membership: Membership | None = None
    """None where these are all the ranks of their group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalRank:
    """Send a rank a signal."""

    rank: int
    signum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpStacks:
    """Have these ranks say where they are."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardOutput:
    """Pass on what these ranks have printed by now, then say OutputForwarded for each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Tell ranks that wait for a peer to give up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """End whatever still runs, the launcher's own process too."""

    force: bool = False
    """Whether the launcher's process is killed instead of asked."""


ControlCommand = SignalRank | DumpStacks | ForwardOutput | Abort | Shutdown


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The start has come this far."""

    rank: int | None
    phase: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStarted:
    """A rank's process exists."""

    rank: int
    pid: int
    host: str = ""
    """Where, if not on the launcher's host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected:
    """A rank has called in: from now on this is its channel."""

    rank: int
    sock: socket.socket


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDoomed:
    """What held a rank's process is gone: it ends, and perhaps nobody is left to say so."""

    rank: int
    cause: str
    """Why, as a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExited:
    """A rank's process has ended and was reaped."""

    rank: int
    pid: int
    exit_code: int | None
    """Negative for a signal, as in subprocess; None where nobody could tell."""
    stderr_tail: tuple[str, ...] = ()
    was_out_of_memory: bool | None = None
    """Whether the kernel killed for memory in this cgroup since the start; None: unreadable."""
    cause: str = ""
    """What somebody above the guard knows of the reason, as a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Whole lines that a rank, or with None the guard, wrote."""

    rank: int | None
    stream: Stream
    text: str
    num_dropped_lines: int = 0
    """Lines before these that were thrown away because nobody read them fast enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForwarded:
    """What a rank had printed when ForwardOutput came has been sent."""

    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """A part of a rank's answer to DumpStacks."""

    rank: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What the kernel says of a rank, sent before its stacks."""

    rank: int
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFailed:
    """The guard itself could not start the ranks."""

    what: str
    """What it was doing: `importing torch`."""
    failure: RankFailure


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardExited:
    """The launcher's own process is gone, and with it every rank."""

    pid: int
    exit_code: int | None
    output_tail: tuple[str, ...] = ()


Event = (
    Phase
    | RankStarted
    | Connected
    | RankDoomed
    | RankExited
    | Output
    | OutputForwarded
    | Stacks
    | RankState
    | LaunchFailed
    | GuardExited
)
