from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llmrt.runtime.events import Output
from llmrt.runtime.rank_process import OutputPipe


@pytest.fixture
def ends() -> Iterator[tuple[OutputPipe, int]]:
    read_end, write_end = os.pipe()
    output = OutputPipe(3, "stderr", read_end)
    yield output, write_end
    output.end.close()
    os.close(write_end)


def test_lines_that_nobody_could_take_are_counted_even_if_nothing_follows(
    ends: tuple[OutputPipe, int],
) -> None:
    output, write_end = ends
    os.write(write_end, b"one\ntwo\n")
    assert output.read(may_forward=False) is None
    assert output.read_rest() == [Output(rank=3, stream="stderr", text="", num_dropped_lines=2)]
    assert output.tail() == ("one", "two")


def test_the_last_line_needs_no_end(ends: tuple[OutputPipe, int]) -> None:
    output, write_end = ends
    os.write(write_end, b"half a line")
    assert output.read() is None
    assert [o.text for o in output.read_rest()] == ["half a line\n"]


def test_reading_what_is_not_there_does_not_block(ends: tuple[OutputPipe, int]) -> None:
    output, _ = ends
    assert output.read() is None
    assert output.read_rest() == []
