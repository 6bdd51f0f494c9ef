"""Frames over one stream socket: how an owner, its guard and its workers talk.

    ┌───────┬──────┬─────────┬────┬────────┬──────────────────────┐
    │ magic │ kind │ padding │ id │ length │ body, pickled once   │
    │ 4     │ 1    │ 3       │ 8  │ 8      │ `length` bytes       │
    └───────┴──────┴─────────┴────┴────────┴──────────────────────┘

Every frame carries the id of the call it belongs to, so a late answer is never taken for the next
one's. `Channel` is the end of someone who waits for many at once and never blocks; `Pipe` is the
end of a worker, which has only this one.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import traceback
from dataclasses import dataclass
from typing import Any

from llmrt.errors import RankFailure

START_ID = 0
"""The id of what a worker says of its own start, before any call."""

_HEADER = struct.Struct("!4sBxxxQQ")
_MAGIC = b"LRT1"
_MAX_BODY_BYTES = 1 << 33
_RECEIVE_BYTES = 1 << 16


class ChannelError(Exception):
    """What arrived is no frame: the other end is broken, or somebody else wrote to its socket."""


@dataclass(frozen=True, slots=True)
class Call:
    """Asks the other end for something."""

    id: int
    body: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers a call."""

    id: int
    body: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Answers a call that raised; the body is a RankFailure."""

    id: int
    body: RankFailure


@dataclass(frozen=True, slots=True)
class Progress:
    """Says how far a call is: (phase, done, total)."""

    id: int
    body: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Note:
    """Tells the other end something that has no answer."""

    id: int
    body: Any


Frame = Call | Reply | Failure | Progress | Note

_TYPES: tuple[type[Frame], ...] = (Call, Reply, Failure, Progress, Note)
_KINDS = {frame_type: kind for kind, frame_type in enumerate(_TYPES)}


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame whose body is still pickled."""

    kind: int
    id: int
    payload: bytes


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame; whatever pickling its body raises, is raised."""
    payload = pickle.dumps(frame.body, protocol=5)
    return _HEADER.pack(_MAGIC, _KINDS[type(frame)], frame.id, len(payload)) + payload


def decode(raw: RawFrame) -> Frame:
    """Return a frame with its body; a body that cannot be unpickled is a ChannelError."""
    try:
        body = pickle.loads(raw.payload)
    except Exception as error:
        raise ChannelError(
            f"The body of a {_TYPES[raw.kind].__name__} frame of {len(raw.payload)} bytes cannot "
            f"be unpickled: {type(error).__name__}: {error}"
        ) from error
    return _TYPES[raw.kind](raw.id, body)


def describe_error(rank: int, error: BaseException) -> RankFailure:
    """Return an exception as text, whatever its class does in `__str__`."""
    error_type = type(error)
    module = error_type.__module__
    name = error_type.__qualname__
    try:
        message = str(error)
    except Exception:
        message = "<its message cannot be printed>"
    try:
        trace = "".join(traceback.format_exception(error_type, error, error.__traceback__))
    except Exception:
        trace = f"{name}: {message}\n"
    return RankFailure(
        rank=rank,
        type_name=name if module == "builtins" else f"{module}.{name}",
        message=message,
        traceback=trace,
    )


class FrameReader:
    """Cuts a stream of bytes, however it was chopped up, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[RawFrame]:
        """Return the frames that these bytes complete."""
        self._buffer += data
        frames: list[RawFrame] = []
        while (frame := self._take()) is not None:
            frames.append(frame)
        return frames

    def _take(self) -> RawFrame | None:
        if len(self._buffer) < _HEADER.size:
            self._check_magic()
            return None
        magic, kind, call_id, length = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or kind >= len(_TYPES) or length > _MAX_BODY_BYTES:
            raise ChannelError(f"Expected a frame, received {bytes(self._buffer[:32])!r}.")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return RawFrame(kind, call_id, payload)

    def _check_magic(self) -> None:
        start = bytes(self._buffer[: len(_MAGIC)])
        if not _MAGIC.startswith(start):
            raise ChannelError(f"Expected a frame, received {bytes(self._buffer)!r}.")


class Channel:
    """An end that never blocks: what cannot be sent now waits here until `flush`.

    Every send says MSG_NOSIGNAL: the user's process may have SIGPIPE at its deadly default.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.is_at_end = False
        """Whether the other end is closed and everything it sent was received."""

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the other end to read."""
        return len(self._unsent)

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._sock.fileno()

    def send(self, data: bytes) -> None:
        """Send an encoded frame, or as much as the socket takes now."""
        if self._unsent:
            self._unsent += data
            return
        num_sent = self._send_some(data)
        if num_sent < len(data):
            self._unsent += memoryview(data)[num_sent:]

    def flush(self) -> None:
        """Send as much of what waits as the socket takes now."""
        num_sent = self._send_some(self._unsent)
        del self._unsent[:num_sent]

    def _send_some(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            # The other end is gone. Its death is noticed by whoever watches it, with its cause.
            return len(data)

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; notice the end of the stream."""
        frames: list[Frame] = []
        while not self.is_at_end:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_at_end = not data
            frames += [decode(raw) for raw in self._reader.feed(data)]
            if len(data) < _RECEIVE_BYTES:
                break
        return frames

    def shut_down(self) -> None:
        """Let the other end read EOF, also where some other process holds a copy of this socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and release the descriptor."""
        self.shut_down()
        self._sock.close()


class Pipe:
    """A worker's end: it blocks, because a worker has nothing else to wait for."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader()
        self._ready: list[RawFrame] = []

    def send(self, frame: Frame) -> None:
        """Send a frame; where nobody listens any more, the next `receive` says so."""
        data = encode(frame)
        with contextlib.suppress(OSError):
            self._sock.sendall(data, socket.MSG_NOSIGNAL)

    def receive(self) -> RawFrame | None:
        """Return the next frame, or None at the end of the stream."""
        while not self._ready:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._ready = self._reader.feed(data)
        return self._ready.pop(0)

    def close(self) -> None:
        """Release the descriptor."""
        self._sock.close()
