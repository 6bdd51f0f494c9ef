"""Who may call in, and who may not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from llmrt.runtime.doorway import Address, Doorway, connect
from llmrt.runtime.handshake import Guest, HandshakeError, Purpose, introduce, new_secret

SECRET = new_secret()


@pytest.fixture
def doorway() -> Iterator[Doorway]:
    doorway = Doorway("127.0.0.1", SECRET, num_ranks=2)
    yield doorway
    doorway.close()


class Caller:
    """Somebody on a thread of its own who calls in."""

    def __init__(self, address: Address, secret: bytes, rank: int, purpose: Purpose) -> None:
        self.call: Future[socket.socket] = Future()
        self._arguments = ((address,), secret, rank, purpose)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.call.set_result(connect(*self._arguments))
        except Exception as error:
            self.call.set_exception(error)


def serve(doorway: Doorway, *callers: Caller) -> list[Guest]:
    """Answer the door until the callers have their answer."""
    guests: list[Guest] = []
    for _ in range(1000):
        guests += doorway.admit()
        if all(caller.call.done() for caller in callers):
            break
        threading.Event().wait(0.005)
    for caller in callers:
        caller.thread.join(5)
    return guests


@pytest.mark.parametrize("way", [0, 1], ids=["unix", "tcp"])
def test_who_knows_the_secret_is_let_in_once_for_each_purpose(doorway: Doorway, way: int) -> None:
    address = doorway.addresses[way]
    callers = [Caller(address, SECRET, rank, purpose) for purpose in Purpose for rank in (0, 1)]
    guests = serve(doorway, *callers)
    assert {(guest.purpose, guest.rank) for guest in guests} == {
        (p, r) for p in Purpose for r in (0, 1)
    }
    assert doorway.is_complete
    for guest, _ in zip(guests, callers, strict=True):
        guest.sock.close()
    for caller in callers:
        caller.call.result().close()


def test_a_second_caller_of_the_same_name_is_turned_away(doorway: Doorway) -> None:
    callers = [Caller(doorway.addresses[1], SECRET, 0, Purpose.CONTROL) for _ in range(2)]
    guests = serve(doorway, *callers)
    assert len(guests) == 1
    guests[0].sock.close()
    ends = [caller.call.result().recv(1) for caller in callers]
    assert ends == [b"", b""]
    for caller in callers:
        caller.call.result().close()


@pytest.mark.parametrize(
    ("secret", "rank"), [(new_secret(), 0), (SECRET, 2)], ids=["wrong secret", "wrong rank"]
)
def test_strangers_are_not_let_in(doorway: Doorway, secret: bytes, rank: int) -> None:
    caller = Caller(doorway.addresses[1], secret, rank, Purpose.CHANNEL)
    assert serve(doorway, caller) == []
    error = caller.call.exception()
    if error is None:  # it knew the secret, but nobody of that rank is expected
        sock = caller.call.result()
        assert sock.recv(1) == b""
        sock.close()
    else:
        assert isinstance(error, (HandshakeError, OSError))
    assert not doorway.is_complete


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n" * 10, b"\0" * 76, b"LRTH"])
def test_noise_is_not_let_in_and_does_not_hold_the_door(doorway: Doorway, noise: bytes) -> None:
    address = doorway.addresses[1]
    with socket.create_connection((address.host, address.port), timeout=5) as noisy:
        noisy.sendall(noise)
        caller = Caller(address, SECRET, 0, Purpose.CONTROL)
        guests = serve(doorway, caller)
    assert [guest.rank for guest in guests] == [0]
    guests[0].sock.close()
    caller.call.result().close()


def test_a_crowd_of_silent_visitors_does_not_keep_a_worker_out(doorway: Doorway) -> None:
    address = doorway.addresses[1]
    crowd = [socket.create_connection((address.host, address.port), timeout=5) for _ in range(80)]
    for _ in range(100):
        doorway.admit()
    caller = Caller(address, SECRET, 1, Purpose.CONTROL)
    guests = serve(doorway, caller)
    assert [guest.rank for guest in guests] == [1]
    for sock in [*crowd, guests[0].sock, caller.call.result()]:
        sock.close()


def test_a_worker_does_not_trust_who_does_not_know_the_secret() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"n" * 32 + b"p" * 32)
        with pytest.raises(HandshakeError, match="not the engine"):
            introduce(ours, SECRET, 0, Purpose.CONTROL, 5)


def test_listening_sockets_are_of_one_address(doorway: Doorway) -> None:
    unix, tcp = doorway.addresses
    assert unix.host.startswith("\0llmrt-")
    assert tcp.host == "127.0.0.1"
    with pytest.raises(OSError, match="cannot be reached"):
        connect((Address(kind="tcp", host="127.0.0.3", port=tcp.port),), SECRET, 0, Purpose.CONTROL)
