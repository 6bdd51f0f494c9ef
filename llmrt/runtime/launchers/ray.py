"""`backend="ray"`: workers where a Ray cluster places them; calls go over connections of our own.

this thread ◄─► control and channel of every rank      (sockets; authenticated)
     │ lifeline, inbox
llmrt-ray thread ◄─► Ray: group, actors, their ends     (see `ray_crew`)
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmrt.config import Timeouts
from llmrt.runtime import descriptors
from llmrt.runtime.channel import Call, Channel, Note, encode
from llmrt.runtime.doorway import Doorway
from llmrt.runtime.events import (
    Abort,
    Connected,
    ControlCommand,
    DumpStacks,
    Event,
    ForwardOutput,
    GuardExited,
    Output,
    OutputForwarded,
    Phase,
    RankDoomed,
    RankExited,
    RankStarted,
    RankState,
    Shutdown,
    SignalRank,
    Stacks,
)
from llmrt.runtime.handshake import Guest, Purpose
from llmrt.runtime.launchers.base import GroupSpec
from llmrt.runtime.own_ray import OWN_RAY, OwnRay
from llmrt.runtime.placement import PlacementError, RayRequest
from llmrt.runtime.ray_crew import Crew, launch_failure
from llmrt.runtime.ray_inbox import ActorLost, ActorPlaced, Inbox, News
from llmrt.runtime.start_method import StartMethod

_RELEASE_SECONDS = 15.0
_UNEXPLAINED = "Its actor is gone; Ray does not say why: look at `ray status` and its node's logs."
_METHOD = StartMethod(name="spawn", reason="Ray starts a process for every rank on its node.")


class RayLauncher:
    """Has Ray start an actor for every rank."""

    name = "ray"

    def __init__(self, request: RayRequest, own_ray: OwnRay = OWN_RAY) -> None:
        self._request = request
        self._own_ray = own_ray

    def launch(self, spec: GroupSpec, timeouts: Timeouts) -> RayHandle:
        """Begin to bring the actors up, on a thread."""
        return RayHandle(
            replace(spec, start_method=_METHOD), self._request, timeouts, self._own_ray
        )

    def distrust(self, spec: GroupSpec, reason: str) -> GroupSpec | None:
        """Nothing is forked from this process."""
        return None


@dataclass(kw_only=True)
class _Link:
    """What is known of one rank's actor and of its guard."""

    rank: int
    address: str = ""
    control: Channel | None = None
    """None until its guard's actor has called in."""
    pid: int = 0
    """Of the rank's process; 0 where there is none, or none any more."""
    is_over: bool = False
    """Whether nothing more comes from it."""
    cause: str = ""


class RayHandle:
    """The owner's hold on the actors of one engine."""

    def __init__(
        self, spec: GroupSpec, request: RayRequest, timeouts: Timeouts, own_ray: OwnRay
    ) -> None:
        self.start_method = spec.start_method
        self.host = socket.gethostname()
        self._owner_pid = os.getpid()
        self._events: list[Event] = []
        self._links = [_Link(rank=rank) for rank in range(spec.world_size)]
        self._doorway: Doorway | None = None
        self._is_told_to_end = False
        self._has_ended = False
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.EpollSelector())
            self._inbox = Inbox()
            undo.callback(self._inbox.close)
            self._selector.register(self._inbox, selectors.EVENT_READ, self._on_news)
            self.channels = tuple(self._placeholder(undo) for _ in range(spec.world_size))
            self.lifeline, theirs = descriptors.socket_pair()
            undo.callback(self.lifeline.close)
            crew = Crew(spec, request, timeouts, own_ray, theirs, self._inbox.post)
            self._thread = threading.Thread(target=crew.run, name="llmrt-ray", daemon=True)
            self._thread.start()
            self._resources = undo.pop_all()

    def _placeholder(self, undo: contextlib.ExitStack) -> socket.socket:
        """Return what stands for a rank's channel until the rank has called in."""
        ours, silent = descriptors.socket_pair()
        undo.callback(ours.close)
        undo.callback(silent.close)
        return ours

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""
        return self._selector.fileno()

    # ---- events ----

    def events(self) -> list[Event]:
        """Return what has happened."""
        if self._has_ended:
            return []
        for key, ready in self._selector.select(0):
            handler: Callable[[int], None] = key.data
            handler(ready)
        events, self._events = self._events, []
        if self._is_told_to_end and all(link.is_over or not link.control for link in self._links):
            self._has_ended = True
            events.append(GuardExited(pid=0, exit_code=0))
        return events

    def _on_news(self, _ready: int) -> None:
        for news in self._inbox.take():
            self._on_piece_of_news(news)

    def _on_piece_of_news(self, news: News) -> None:
        match news:
            case Doorway():
                self._open(news)
            case ActorPlaced(rank=rank, address=address):
                self._links[rank].address = address
                self._events.append(Phase(rank=rank, phase="placed", detail=f"on node {address}"))
            case ActorLost(rank=rank, cause=cause):
                self._on_actor_lost(self._links[rank], cause)
            case _:
                self._events.append(news)

    def _on_actor_lost(self, link: _Link, cause: str) -> None:
        link.cause = cause
        if link.pid != 0:
            self._mourn(link)
        elif link.control is None:
            error = PlacementError(f"the actor of rank {link.rank} ended too early. {cause}")
            self._events.append(launch_failure(error))

    def _mourn(self, link: _Link, pid: int | None = None, tail: tuple[str, ...] = ()) -> None:
        """Say once that a rank is gone whose guard could not say so."""
        self._events.append(
            RankExited(
                rank=link.rank,
                pid=link.pid if pid is None else pid,
                exit_code=None,
                stderr_tail=tail,
                cause=link.cause,
            )
        )
        link.pid = 0

    # ---- callers ----

    def _open(self, doorway: Doorway) -> None:
        if self._is_told_to_end:
            doorway.close()
            return
        self._doorway = doorway
        self._selector.register(doorway, selectors.EVENT_READ, self._on_callers)

    def _on_callers(self, _ready: int) -> None:
        assert self._doorway is not None
        for guest in self._doorway.admit():
            self._welcome(guest)
        if self._doorway.is_complete:
            self._close_doorway()

    def _welcome(self, guest: Guest) -> None:
        if guest.purpose is Purpose.CHANNEL:
            self._events.append(Connected(rank=guest.rank, sock=guest.sock))
            return
        link = self._links[guest.rank]
        link.control = Channel(guest.sock)
        self._selector.register(
            guest.sock, selectors.EVENT_READ, functools.partial(self._on_control, link)
        )

    def _close_doorway(self) -> None:
        if self._doorway is not None:
            self._selector.unregister(self._doorway)
            self._doorway.close()
            self._doorway = None

    # ---- what the guards say ----

    def _on_control(self, link: _Link, ready: int) -> None:
        assert link.control is not None
        if ready & selectors.EVENT_WRITE:
            link.control.flush()
            self._update_interest(link)
        for frame in link.control.receive():
            if isinstance(frame, Note):
                self._pass_on(link, frame.body)
        if link.control.is_at_end:
            self._selector.unregister(link.control)
            link.control.close()
            link.is_over = True
            self._on_silence(link)

    def _on_silence(self, link: _Link) -> None:
        """Say that a rank is gone with its actor; where Ray may still say why, leave it time to."""
        if link.pid == 0:
            return
        if link.cause:
            self._mourn(link)
        else:
            self._events.append(RankDoomed(rank=link.rank, cause=_UNEXPLAINED))

    def _pass_on(self, link: _Link, event: Event) -> None:
        """Turn what a guard says of its only rank into what is so in the group."""
        match event:
            case RankStarted(pid=pid):
                link.pid = pid
                self._events.append(replace(event, rank=link.rank, host=link.address))
            case RankDoomed(cause=cause):
                link.cause = cause
                self._events.append(replace(event, rank=link.rank))
            case RankExited():
                link.pid = 0
                self._events.append(replace(event, rank=link.rank, cause=link.cause))
            case GuardExited():
                self._on_guard_exited(link, event)
            case Phase() | Output() | OutputForwarded() | Stacks() | RankState():
                self._events.append(replace(event, rank=link.rank))
            case _:
                self._events.append(event)

    def _on_guard_exited(self, link: _Link, event: GuardExited) -> None:
        if link.pid == 0:
            return
        code = event.exit_code
        how = "ended" if code is None else f"ended with code {code}"
        link.cause = link.cause or f"The guard process {event.pid} above it {how}."
        self._mourn(link, tail=event.output_tail)

    # ---- commands ----

    def tell(self, command: ControlCommand) -> None:
        """Pass a command on to the guards it concerns."""
        match command:
            case SignalRank(rank=rank):
                self._send(self._links[rank], replace(command, rank=0))
            case DumpStacks(ranks=ranks) | ForwardOutput(ranks=ranks):
                for rank in ranks:
                    self._send(self._links[rank], replace(command, ranks=(0,)))
            case Abort():
                for link in self._links:
                    self._send(link, command)
            case Shutdown(force=force):
                self._end(force)

    def _end(self, force: bool) -> None:
        self._is_told_to_end = True
        self._close_doorway()
        if force:
            self._cut_lifeline()  # the crew kills every actor
        for link in self._links:
            self._send(link, Shutdown())
        self._inbox.ring()

    def _send(self, link: _Link, command: ControlCommand) -> None:
        if link.control is None or link.is_over:
            if link.pid != 0:  # it cannot be told anything, so it has ended with its actor
                link.cause = link.cause or _UNEXPLAINED
                self._mourn(link)
                self._inbox.ring()
            return
        link.control.send(encode(Call(0, command)))
        self._update_interest(link)

    def _update_interest(self, link: _Link) -> None:
        assert link.control is not None
        wanted = selectors.EVENT_READ
        if link.control.num_unsent_bytes:
            wanted |= selectors.EVENT_WRITE
        key = self._selector.get_key(link.control)
        self._selector.modify(link.control, wanted, key.data)

    def _cut_lifeline(self) -> None:
        with contextlib.suppress(OSError):
            self.lifeline.shutdown(socket.SHUT_RDWR)

    # ---- the end ----

    def release(self) -> None:
        """Have the crew give everything back to Ray, and close every descriptor."""
        if os.getpid() != self._owner_pid:
            return
        self._cut_lifeline()
        self._close_doorway()
        for link in self._links:
            if link.control is not None and not link.is_over:
                self._selector.unregister(link.control)
                link.control.close()
        self._thread.join(_RELEASE_SECONDS)
        for news in self._inbox.take():
            if isinstance(news, Doorway):
                news.close()
        self._resources.close()
