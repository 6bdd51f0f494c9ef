"""Where the workers of one engine call in: from other nodes over TCP, from this one without it."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Literal

from llmrt.runtime.handshake import Guest, HandshakeError, Purpose, Visitor, introduce

_MAX_VISITORS = 64
_VISIT_SECONDS = 10.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """One way to reach an engine."""

    kind: Literal["unix", "tcp"]
    host: str
    """Of a unix socket: its abstract name, which only this host has."""
    port: int = 0


class Doorway:
    """Listening sockets on one address of this node, never on all of them; open only while needed.

    Lets in whoever knows the secret, each rank once for each purpose.
    """

    def __init__(self, host: str, secret: bytes, num_ranks: int) -> None:
        self._secret = secret
        self._expected = {(purpose, rank) for purpose in Purpose for rank in range(num_ranks)}
        self._visitors: dict[Visitor, float] = {}
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.EpollSelector())
            self._tcp = undo.enter_context(_listen_tcp(host))
            self._unix = undo.enter_context(_listen_unix())
            self._resources = undo.pop_all()
        self.addresses = (
            Address(kind="unix", host=self._unix.getsockname().decode()),
            Address(kind="tcp", host=host, port=self._tcp.getsockname()[1]),
        )
        for listener in (self._tcp, self._unix):
            self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def is_complete(self) -> bool:
        """Whether everybody who may come has come."""
        return not self._expected

    def fileno(self) -> int:
        """Return a descriptor that is readable while somebody is at the door."""
        return self._selector.fileno()

    def admit(self) -> list[Guest]:
        """Return who came in, without waiting."""
        guests: list[Guest] = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._answer_the_door(key.fileobj)  # type: ignore[arg-type]
            elif (guest := self._hear(key.data)) is not None:
                guests.append(guest)
        return guests

    def _answer_the_door(self, listener: socket.socket) -> None:
        self._send_away_the_late()
        try:
            sock, _ = listener.accept()
        except OSError:  # it has left already
            return
        try:
            visitor = Visitor(sock, self._secret)
        except OSError:
            sock.close()
            return
        self._visitors[visitor] = time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: Visitor) -> Guest | None:
        try:
            guest = visitor.receive()
        except (OSError, HandshakeError):
            self._send_away(visitor)
            return None
        if guest is None:
            return None
        self._forget(visitor)
        if (guest.purpose, guest.rank) not in self._expected:
            guest.sock.close()
            return None
        self._expected.remove((guest.purpose, guest.rank))
        return guest

    def _send_away_the_late(self) -> None:
        now = time.monotonic()
        for visitor, since in list(self._visitors.items()):
            if now - since > _VISIT_SECONDS or len(self._visitors) >= _MAX_VISITORS:
                self._send_away(visitor)

    def _send_away(self, visitor: Visitor) -> None:
        self._forget(visitor)
        visitor.sock.close()

    def _forget(self, visitor: Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor]

    def close(self) -> None:
        """Listen no more, and send away whoever has proved nothing."""
        for visitor in list(self._visitors):
            self._send_away(visitor)
        self._resources.close()


def connect(
    addresses: tuple[Address, ...], secret: bytes, rank: int, purpose: Purpose
) -> socket.socket:
    """Return a connection to an engine over the first of its addresses that works.

    Raises:
        OSError: none does; the message lists them.
        HandshakeError: what answered is not that engine.
    """
    errors: list[str] = []
    for address in addresses:
        try:
            sock = _dial(address)
        except OSError as error:
            errors.append(f"{address.host}:{address.port} ({error})")
            continue
        try:
            introduce(sock, secret, rank, purpose, _CONNECT_SECONDS)
        except BaseException:
            sock.close()
            raise
        return sock
    raise OSError(f"The engine cannot be reached from here: {'; '.join(errors)}.")


def _dial(address: Address) -> socket.socket:
    family = socket.AF_UNIX if address.kind == "unix" else _family(address.host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_SECONDS)
        target = address.host if address.kind == "unix" else (address.host, address.port)
        sock.connect(target)
        keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Send small frames at once, and notice a node that vanished within a few seconds."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


def _listen_tcp(host: str) -> socket.socket:
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind((host, 0))
        sock.listen(128)
        keep_alive(sock)  # inherited by what it accepts
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_unix() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(f"\0llmrt-{secrets.token_hex(8)}")
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
