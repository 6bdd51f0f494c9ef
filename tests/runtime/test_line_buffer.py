from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmrt.runtime.line_buffer import LineBuffer


@given(st.lists(st.binary(max_size=50)))
def test_nothing_is_lost_or_reordered(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    lines = b"".join(buffer.feed(chunk) for chunk in chunks) + buffer.finish()
    whole = b"".join(chunks)
    assert lines == (whole if whole.endswith(b"\n") or not whole else whole + b"\n")


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"d\ne\n"]), max_size=400))
def test_the_tail_is_the_last_fifty_lines(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    for chunk in chunks:
        buffer.feed(chunk)
    text = b"".join(chunks).decode()
    expected = text.split("\n")
    expected = expected if expected[-1] else expected[:-1]
    assert buffer.tail() == tuple(expected[-50:])


def test_a_line_without_end_does_not_fill_memory() -> None:
    buffer = LineBuffer()
    num_out = sum(len(buffer.feed(b"x" * 10_000)) for _ in range(100))
    assert num_out > 900_000


def test_bytes_that_are_no_text_are_shown() -> None:
    buffer = LineBuffer()
    buffer.feed(b"\xff\xfe\n")
    assert buffer.tail() == ("\\xff\\xfe",)


def test_dropped_lines_are_counted_once() -> None:
    buffer = LineBuffer()
    buffer.drop(buffer.feed(b"a\nb\n"))
    assert (buffer.take_num_dropped(), buffer.take_num_dropped()) == (2, 0)
