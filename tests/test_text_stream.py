from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.sampling import SamplingParams
from llmrt.text_stream import TextStream
from tests.support.tokenizers import BACKENDS, tokenizer_of

TOKENIZERS = {name: tokenizer_of(backend()) for name, backend in BACKENDS.items()}
BYTES = TOKENIZERS["byte-level"]


def letters(text: str) -> list[int]:
    """Return one token per byte, whatever merges there are."""
    return [token_id for letter in text for token_id in BYTES.encode(letter)]


def stream(**params: Any) -> TextStream:
    return TextStream(BYTES, SamplingParams(max_tokens=None, **params))


def test_a_stop_string_over_token_borders_ends_the_text_and_says_after_how_many_tokens() -> None:
    text = stream(stop="DEF")
    delta = text.append(letters("ABCDEFG"))
    assert (delta.text, delta.stop, delta.num_tokens) == ("ABC", "DEF", 6)
    assert text.finish() == ""


def test_streamed_and_plain_text_are_equal() -> None:
    plain, streamed = stream(stop=["DEF"]), stream(stop=["DEF"])
    whole = plain.append(letters("ABCDEFG")).text
    pieces = [streamed.append([token_id]).text for token_id in letters("ABCDEF")]
    assert "".join(pieces) == whole == "ABC"


def test_a_stop_string_in_the_middle_of_a_token_ends_the_text_there() -> None:
    the = BYTES.encode("the")
    assert len(the) == 1
    delta = stream(stop="h").append(the)
    assert (delta.text, delta.stop, delta.num_tokens) == ("t", "h", 1)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "abxa"), (7, None)])
def test_a_stop_string_counts_once_the_least_tokens_are_there(
    min_tokens: int, expected: str | None
) -> None:
    delta = stream(stop="b", min_tokens=min_tokens).append(letters("abxab"))
    assert delta.text == (expected or "abxab")
    assert delta.stop == (None if expected is None else "b")


def test_a_special_token_neither_shows_nor_breaks_a_stop_string() -> None:
    eos = BYTES.eos_token_id
    assert eos is not None
    delta = stream(stop="ab").append([*letters("xa"), eos, *letters("b")])
    assert (delta.text, delta.stop, delta.num_tokens) == ("x", "ab", 4)


def test_special_tokens_are_shown_where_asked() -> None:
    eos = BYTES.eos_token_id
    assert eos is not None
    assert stream(skip_special_tokens=False).append([*letters("x"), eos]).text == "x</s>"


def test_what_is_held_back_comes_with_the_end() -> None:
    text = stream(stop="DEF")
    half_an_emoji = BYTES.encode("😀")[:1]
    assert text.append([*letters("ABCDE"), *half_an_emoji]).text == "ABC"
    assert text.finish() == "DE\ufffd"


def test_a_stop_string_that_the_end_completes_is_not_shown() -> None:
    llama = TOKENIZERS["llama"]
    text = TextStream(llama, SamplingParams(stop="好"))
    ids = llama.encode("x你好")
    assert text.append(ids).text == "x"
    assert text.finish() == "你"
    assert text.stop == "好"


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    text=st.text("the ab😀é你.", max_size=30),
    stops=st.lists(st.text("theab 😀é", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 5), min_size=1),
)
def test_chunks_of_any_size_give_the_same_text_stop_and_count(
    name: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    params = SamplingParams(stop=stops, max_tokens=None)
    ids = tokenizer.encode(text)

    def run(sizes: list[int]) -> tuple[str, str | None, int]:
        stream, start, out = TextStream(tokenizer, params), 0, ""
        for size in sizes:
            delta = stream.append(ids[start : start + size])
            out += delta.text
            start += delta.num_tokens
            if delta.stop is not None:
                return out, delta.stop, start
        return out + stream.finish(), stream.stop, start

    in_chunks = run((cuts * (len(ids) + 1))[: len(ids)])
    assert in_chunks == run([1] * len(ids))
    if in_chunks[1] is None:
        assert in_chunks[0] == tokenizer.decode(ids)
    assert not any(stop in in_chunks[0] for stop in stops)
