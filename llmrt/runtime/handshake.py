"""How a worker on another node proves that it belongs to an engine, and the engine to it.

    engine ── nonce ───────────────────────────────► worker
    engine ◄── purpose, rank, nonce, proof ───────── worker
    engine ── proof ───────────────────────────────► worker

A proof is an HMAC-SHA256 over both nonces, with a secret that is made for one opening of one engine
and reaches its workers through Ray. It keeps strangers out; it does not hide what is sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

_NONCE_BYTES = 32
_HELLO = struct.Struct("!4sBxxxI32s32s")
_MAGIC = b"LRTH"


class Purpose(IntEnum):
    """What a connection is for."""

    CONTROL = 0
    """Events of a rank's guard, and commands to it."""
    CHANNEL = 1
    """Calls to the rank itself, and its answers."""


class HandshakeError(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """Somebody who knows the secret."""

    purpose: Purpose
    rank: int
    sock: socket.socket


def new_secret() -> bytes:
    """Return the secret of one opening of one engine."""
    return secrets.token_bytes(32)


def introduce(
    sock: socket.socket, secret: bytes, rank: int, purpose: Purpose, timeout: float
) -> None:
    """Prove to an engine who this is, and have it prove that it is the engine.

    Raises:
        HandshakeError: it is not.
        OSError: it did not answer in time, or hung up.
    """
    sock.settimeout(timeout)
    theirs, ours = _receive_exactly(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    proof = _proof(secret, b"worker", purpose, rank, theirs, ours)
    sock.sendall(_HELLO.pack(_MAGIC, purpose, rank, ours, proof), socket.MSG_NOSIGNAL)
    answer = _receive_exactly(sock, len(proof))
    if not hmac.compare_digest(answer, _proof(secret, b"engine", purpose, rank, theirs, ours)):
        raise HandshakeError("What answered at the engine's address is not the engine.")
    sock.settimeout(None)


class Visitor:
    """Somebody who has connected and has proved nothing yet. Never blocks."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = b""
        sock.send(self._nonce, socket.MSG_NOSIGNAL)

    def receive(self) -> Guest | None:
        """Read on; return who it is once that is proved.

        Raises:
            HandshakeError: it proved nothing.
            OSError: it hung up.
        """
        try:
            data = self.sock.recv(_HELLO.size - len(self._received))
        except BlockingIOError:
            return None
        if not data:
            raise HandshakeError("It hung up before it said who it is.")
        self._received += data
        return self._judge() if len(self._received) == _HELLO.size else None

    def _judge(self) -> Guest:
        magic, number, rank, nonce, proof = _HELLO.unpack(self._received)
        expected = _proof(self._secret, b"worker", number, rank, self._nonce, nonce)
        if magic != _MAGIC or not hmac.compare_digest(proof, expected):
            raise HandshakeError("It does not know the secret of this engine.")
        answer = _proof(self._secret, b"engine", number, rank, self._nonce, nonce)
        self.sock.send(answer, socket.MSG_NOSIGNAL)
        return Guest(purpose=Purpose(number), rank=rank, sock=self.sock)


def _proof(secret: bytes, who: bytes, purpose: int, rank: int, *nonces: bytes) -> bytes:
    message = who + struct.pack("!BI", purpose, rank) + b"".join(nonces)
    return hmac.digest(secret, message, "sha256")


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise HandshakeError("The engine hung up before the connection was made.")
        data += part
    return data
