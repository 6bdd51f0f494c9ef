from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.runtime.channel import (
    Call,
    Channel,
    ChannelError,
    Failure,
    Frame,
    FrameReader,
    Note,
    Pipe,
    Progress,
    Reply,
    decode,
    describe_error,
    encode,
)

FRAMES: list[Frame] = [
    Call(1, {"a": 1}),
    Reply(2**63, None),
    Progress(3, ("loading", 1, 2)),
    Note(0, b"x" * 100_000),
    Failure(4, describe_error(1, ValueError("no"))),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


@given(st.lists(st.integers(1, 70_000), max_size=30))
def test_frames_survive_any_chopping(sizes: list[int]) -> None:
    stream = b"".join(encode(frame) for frame in FRAMES)
    reader, received, at = FrameReader(), [], 0
    for size in [*sizes, len(stream)]:
        received += reader.feed(stream[at : at + size])
        at += size
    assert [decode(raw) for raw in received] == FRAMES
    assert not reader.is_mid_frame


@given(st.binary(min_size=4, max_size=200).filter(lambda data: data[:4] != b"LRT1"))
def test_garbage_is_an_error_and_never_a_wait(data: bytes) -> None:
    with pytest.raises(ChannelError, match="Expected a frame"):
        FrameReader().feed(data)


def test_a_length_beyond_reason_is_an_error_and_never_a_wait() -> None:
    header = encode(Call(1, None))[:16] + (2**60).to_bytes(8, "big")
    with pytest.raises(ChannelError):
        FrameReader().feed(header)


def test_a_body_that_cannot_be_unpickled_is_an_error() -> None:
    data = bytearray(encode(Call(1, "abcdefgh")))
    data[24:] = b"\xff" * (len(data) - 24)
    (raw,) = FrameReader().feed(bytes(data))
    with pytest.raises(ChannelError, match="cannot be unpickled"):
        decode(raw)


def test_a_body_that_cannot_be_pickled_raises_before_anything_is_sent() -> None:
    with pytest.raises((pickle.PicklingError, TypeError)):
        encode(Reply(1, threading.Lock()))


def test_sending_never_blocks_and_loses_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    channel, pipe = Channel(pair[0]), Pipe(pair[1])
    bodies = [bytes([number]) * 300_000 for number in range(8)]
    for number, body in enumerate(bodies):
        channel.send(encode(Call(number, body)))
    assert channel.num_unsent_bytes > 0
    received = []
    reader = threading.Thread(
        target=lambda: received.extend(decode(pipe.receive()).body for _ in bodies)  # type: ignore[arg-type]
    )
    reader.start()
    while channel.num_unsent_bytes:
        channel.flush()
    reader.join(10)
    assert received == bodies


def test_what_was_sent_before_the_end_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    pipe, channel = Pipe(pair[0]), Channel(pair[1])
    pipe.send(Reply(1, "last words"))
    pipe.close()
    frames = channel.receive() + channel.receive()
    assert frames == [Reply(1, "last words")]
    assert channel.is_at_end


def test_sending_to_the_dead_is_not_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(pair[0])
    pair[1].close()
    channel.send(encode(Call(1, b"x" * 1_000_000)))
    assert channel.num_unsent_bytes == 0


def test_an_error_whose_message_raises_is_still_described() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    failure = describe_error(3, RudeError())
    assert failure.rank == 3
    assert failure.type_name.endswith("RudeError")


def test_builtin_exceptions_have_short_names() -> None:
    assert describe_error(0, ValueError("x")).type_name == "ValueError"
