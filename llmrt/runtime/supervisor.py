"""Waits on everything of a running group at once, and keeps what is known of each rank.

    channels of all ranks ┐
    the launcher's events ├─► one selector ─► answers, deaths, failures, progress, output
    wake() of any thread  ┘

It records; what a death means to whoever waits is decided in `worker_group`.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence

from llmrt.errors import RankFailure
from llmrt.messages import Stopped
from llmrt.runtime import descriptors
from llmrt.runtime.channel import (
    START_ID,
    Call,
    Channel,
    ChannelError,
    Failure,
    Frame,
    Progress,
    Reply,
    describe_error,
    encode,
)
from llmrt.runtime.events import (
    EXECUTING,
    THREADS_PROVEN,
    Connected,
    DumpStacks,
    Event,
    ForwardOutput,
    GuardExited,
    LaunchFailed,
    Output,
    OutputForwarded,
    Phase,
    RankDoomed,
    RankExited,
    RankStarted,
    RankState,
    Stacks,
)
from llmrt.runtime.launchers.base import Launched
from llmrt.runtime.rank_view import PendingCall, RankView, WorkerOutput

_STATUS_GRACE = 0.5
"""How long the launcher is given to say how a rank ended whose channel closed."""


class Supervisor:
    """The owner's view of one launched group. Used by one thread, except `wake`."""

    def __init__(
        self,
        launched: Launched,
        *,
        on_output: Callable[[WorkerOutput], None],
        on_phase: Callable[[int | None, str, str], None],
    ) -> None:
        self.launched = launched
        self.ranks = [
            RankView(rank=rank, channel=Channel(sock))
            for rank, sock in enumerate(launched.channels)
        ]
        self.guard_exited: GuardExited | None = None
        self.launch_failed: LaunchFailed | None = None
        self.deaths: list[RankExited] = []
        self.start_failures: list[RankFailure] = []
        self.broken: RankFailure | None = None
        """The first rank that sent what is no frame."""
        self.num_progress = 0
        """Counts everything that shows that a rank or the guard gets on."""
        self._guard_phase = ""
        self._on_output = on_output
        self._on_phase = on_phase
        self._calls: dict[int, PendingCall] = {}
        self._last_id = START_ID
        self._has_news = False
        self._selector = selectors.DefaultSelector()
        try:
            self._woken, self._waker = descriptors.socket_pair()
        except BaseException:
            self._selector.close()
            raise
        for sock in (self._woken, self._waker):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._selector.register(launched.fileno(), selectors.EVENT_READ, self._on_launcher)
        for view in self.ranks:
            self._selector.register(view.channel, selectors.EVENT_READ, view)
        self.sockets = [launched.lifeline, *launched.channels, self._woken, self._waker]
        """Every socket that is open on our account."""

    @property
    def guard_phase(self) -> str:
        """What the guard said last that it was doing."""
        return self._guard_phase

    def wake(self) -> None:
        """Make the current or next `pump` return. Takes no lock; any thread may call it."""
        try:
            self._waker.send(b"\0", socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno is None:  # a TimeoutError that a signal handler of the user's raised
                raise
            # It is full, so somebody will wake; or closed, so nobody waits.

    def close(self) -> None:
        """Release the descriptors."""
        self._selector.close()
        self._woken.close()
        self._waker.close()
        for view in self.ranks:
            view.channel.close()

    def ask_where(self, views: Sequence[RankView], seconds: float) -> None:
        """Have ranks write their stacks, and wait for as much of that as comes."""
        self.launched.tell(DumpStacks(ranks=tuple(view.rank for view in views)))
        self.pump_for(seconds)

    def catch_up_with_output(self, seconds: float) -> None:
        """Handle what ranks have printed by now: their answers take a shorter way."""
        views = [view for view in self.ranks if view.is_alive]
        for view in views:
            view.owes_output = True
        self.launched.tell(ForwardOutput(ranks=tuple(view.rank for view in views)))
        self.pump_for(seconds, until=lambda: not any(v.owes_output and v.is_alive for v in views))

    # ---- calls ----

    def submit(self, command: object, ranks: Sequence[int]) -> PendingCall:
        """Send a command, pickled once, to some ranks."""
        self._last_id += 1
        name = type(command).__name__
        call = PendingCall(id=self._last_id, ranks=tuple(ranks), command=name)
        data = encode(Call(call.id, command))
        self._calls[call.id] = call
        for rank in call.ranks:
            view = self.ranks[rank]
            view.last_command = name
            view.channel.send(data)
            if view.channel.num_unsent_bytes:
                self._set_interest(view)
        return call

    # ---- events ----

    def pump(self, timeout: float | None) -> bool:
        """Handle what happens next, or a `wake`; return False where the time was up."""
        if any(view.closed_at is not None for view in self.ranks):
            timeout = _STATUS_GRACE if timeout is None else min(timeout, _STATUS_GRACE)
        happened = False
        for key, ready in self._selector.select(timeout):
            happened = True
            if isinstance(key.data, RankView):
                self._on_channel(key.data, ready)
            else:
                key.data()
        self._give_up_on_status()
        return happened

    def died_beside(self, failed: Collection[int]) -> bool:
        """Return whether a rank died that did not itself say what was wrong: others only suffer."""
        return any(death.rank not in failed for death in self.deaths)

    def pump_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Handle what happens for a while, or until something is so."""
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            self.pump(left)

    def _on_wake(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return

    def _on_channel(self, view: RankView, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            view.channel.flush()
            if not view.channel.num_unsent_bytes:
                self._set_interest(view)
        if ready & selectors.EVENT_READ:
            self._read_channel(view)

    def _set_interest(self, view: RankView) -> None:
        if view.channel.fileno() not in self._selector.get_map():
            return
        wanted = selectors.EVENT_READ
        if view.channel.num_unsent_bytes:
            wanted |= selectors.EVENT_WRITE
        self._selector.modify(view.channel, wanted, view)

    def _read_channel(self, view: RankView) -> None:
        try:
            for frame in view.channel.receive():
                self._on_frame(view, frame)
        except ChannelError as error:
            self._on_garbage(view, error)
            return
        if view.channel.is_at_end:
            self._stop_reading(view)
            if view.exited is None:
                view.closed_at = time.monotonic()

    def _stop_reading(self, view: RankView) -> None:
        if view.channel.fileno() in self._selector.get_map():
            self._selector.unregister(view.channel)

    def _on_garbage(self, view: RankView, error: ChannelError) -> None:
        """Take what is no frame as a failure of whatever the rank was asked."""
        self._stop_reading(view)
        failure = describe_error(view.rank, error)
        waiting = [call for call in self._calls.values() if view.rank in call.missing]
        for call in waiting:
            call.failures.append(failure)
        if not view.is_ready:
            self.start_failures.append(failure)
        if self.broken is None:
            self.broken = failure

    def _on_frame(self, view: RankView, frame: Frame) -> None:
        match frame:
            case Reply(id=call_id, body=answer):
                self._on_reply(view, call_id, answer)
            case Failure(id=call_id, body=failure):
                self._on_failure(call_id, failure)
            case Progress(body=(phase, done, total)):
                self.num_progress += 1
                view.phase = phase
                view.proved_threads = view.proved_threads or phase == THREADS_PROVEN
                self._on_phase(view.rank, phase, f"{100 * done // total} %" if total else "")
            case _:
                raise ChannelError(f"Rank {view.rank} sent a {type(frame).__name__} frame.")

    def _on_reply(self, view: RankView, call_id: int, answer: object) -> None:
        if call_id == START_ID:
            view.is_ready = True
            self.num_progress += 1
            return
        if isinstance(answer, Stopped):
            view.stopped = answer
        call = self._calls.get(call_id)
        if call is None:  # nobody waits for it any more
            return
        call.replies[view.rank] = answer
        if call.is_done:
            del self._calls[call_id]

    def _on_failure(self, call_id: int, failure: RankFailure) -> None:
        if call_id == START_ID:
            self.start_failures.append(failure)
        elif (call := self._calls.get(call_id)) is not None:
            call.failures.append(failure)

    def _on_launcher(self) -> None:
        for event in self.launched.events():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case Phase(rank=rank, phase=phase, detail=detail):
                self.num_progress += 1
                if phase == EXECUTING and rank is not None:
                    self.ranks[rank].proved_threads = True  # nothing of the fork is left in it
                if rank is None:
                    self._guard_phase = f"{phase} {detail}".strip()
                self._on_phase(rank, phase, detail)
            case Connected(rank=rank, sock=sock):
                self._connect(self.ranks[rank], sock)
            case RankStarted(rank=rank, pid=pid, host=host):
                self.num_progress += 1
                self.ranks[rank].pid = pid
                self.ranks[rank].host = host
                self.ranks[rank].phase = "starting"
                self._on_phase(rank, "started", f"process {pid}")
            case RankDoomed(rank=rank, cause=cause):
                self.ranks[rank].doom = cause
            case RankExited():
                self._on_rank_exited(event)
            case Output(rank=rank, stream=stream, text=text, num_dropped_lines=num_dropped):
                self._on_output(
                    WorkerOutput(rank=rank, stream=stream, text=text, num_dropped_lines=num_dropped)
                )
            case OutputForwarded(rank=rank):
                self.ranks[rank].owes_output = False
            case Stacks(rank=rank, text=text):
                self.ranks[rank].stacks += text
            case RankState(rank=rank, state=state):
                self.ranks[rank].state = state
            case LaunchFailed():
                self.launch_failed = event
            case GuardExited():
                self._on_guard_exited(event)

    def _connect(self, view: RankView, sock: socket.socket) -> None:
        """Put a rank's real channel in the place of the one that stood for it."""
        self.num_progress += 1
        self._stop_reading(view)
        view.channel.close()
        view.channel = Channel(sock)
        self._selector.register(view.channel, selectors.EVENT_READ, view)
        self.sockets.append(sock)

    def _on_rank_exited(self, event: RankExited) -> None:
        view = self.ranks[event.rank]
        if view.exited is not None:
            return
        self._read_channel(view)  # its last words come before its end
        view.exited = event
        view.closed_at = None
        if event.rank not in {death.rank for death in self.deaths}:
            self.deaths.append(event)

    def _on_guard_exited(self, event: GuardExited) -> None:
        self.guard_exited = event
        self._selector.unregister(self.launched.fileno())
        for view in self.ranks:
            if view.is_alive:
                self._read_channel(view)
                view.exited = RankExited(rank=view.rank, pid=view.pid, exit_code=None)
                view.closed_at = None

    def _give_up_on_status(self) -> None:
        """Take for dead a rank whose channel closed and of which the guard says nothing."""
        for view in self.ranks:
            if view.closed_at is None or time.monotonic() - view.closed_at < _STATUS_GRACE:
                continue
            view.closed_at = None
            death = RankExited(rank=view.rank, pid=view.pid, exit_code=None, cause=view.doom)
            self.deaths.append(death)
