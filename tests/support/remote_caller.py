"""A fresh process that runs calls sent by value: `python -m tests.support.remote_caller`."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from llmrt.by_value import dumps, dumps_call, loads, loads_reply
from llmrt.errors import RequestError


class RemoteCaller:
    """The caller's side of that process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> RemoteCaller:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _write(self._process.stdin, dumps_call(function, args, kwargs))
        return loads_reply(_read(self._process.stdout))


def serve(calls: BinaryIO, replies: BinaryIO) -> None:
    """Run each call; an error is the reply, as text, where the call or its result cannot cross."""
    while call := _read(calls):
        try:
            function, args, kwargs = loads(call, "the call")
            reply = dumps(function(*args, **kwargs), "the result")
        except RequestError as error:
            reply = dumps(str(error), "the error")
        _write(replies, reply)


def _write(stream: Any, data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: Any) -> bytes:
    header = stream.read(8)
    return stream.read(*struct.unpack("<Q", header)) if header else b""


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
