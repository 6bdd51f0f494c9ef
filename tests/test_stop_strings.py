from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.stop_strings import StopStrings


def run(
    pieces: list[str], stops: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    """Feed the pieces until a stop; return what came out of each, and the stop."""
    checker = StopStrings(stops, include_in_text=include)
    out: list[str] = []
    for piece in pieces:
        text, stop = checker.feed(piece, may_stop=True)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, checker.finish()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (list("ABCDEFG"), ["DEF"], "ABC"),
        (["AB", "CDE", "FG"], ["DEF"], "ABC"),
        (["ABCDEFG"], ["DEF"], "ABC"),
        (list("aaab"), ["aab"], "a"),
        (list("abcabd"), ["abd"], "abc"),
        (["x\n", "\ny"], ["\n\n"], "x"),
        (list("abc"), ["c", "bc"], "a"),
        (["xyz"], ["z", "y"], "x"),
        (["abcd"], ["abcd", "b"], "a"),
        (["😀 stop"], [" stop"], "😀"),
    ],
)
def test_text_ends_before_the_first_stop(
    pieces: list[str], stops: list[str], expected: str
) -> None:
    out, stop = run(pieces, stops)
    assert "".join(out) == expected
    assert stop in stops


def test_nothing_of_a_stop_string_is_shown_before_it_is_whole() -> None:
    out, stop = run(list("ABCDEFG"), ["DEF"])
    assert out == ["A", "B", "C", "", "", ""]
    assert stop == "DEF"


def test_text_that_only_began_like_a_stop_is_shown_at_once() -> None:
    out, stop = run(list("ABCDEX"), ["DEF"])
    assert out == ["A", "B", "C", "", "", "DEX", ""]
    assert stop is None


def test_held_text_comes_out_at_the_end() -> None:
    out, stop = run(list("ABCDE"), ["DEF"])
    assert out[-1] == "DE"
    assert stop is None


def test_the_stop_string_is_shown_where_asked() -> None:
    out, stop = run(list("ABCDEFG"), ["DEF"], include=True)
    assert "".join(out) == "ABCDEF"
    assert stop == "DEF"


def test_a_stop_that_ends_too_early_is_text_and_the_next_one_counts() -> None:
    checker = StopStrings(["ab"], include_in_text=False)
    assert checker.feed("ab", may_stop=False) == ("ab", None)
    assert checker.feed("a", may_stop=False) == ("", None)
    assert checker.feed("bc", may_stop=True) == ("", "ab")


def first_end(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Return where the stop that ends first begins and ends: the obvious way."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_however_the_text_is_cut_the_result_is_that_of_the_whole(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    whole = "".join(pieces)
    found = first_end(whole, stops)
    out, stop = run(pieces, stops, include=include)
    expected = whole if found is None else whole[: found[1] if include else found[0]]
    assert "".join(out) == expected
    assert (stop is None) == (found is None)
