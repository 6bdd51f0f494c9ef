"""Prompts and lengths at the edge of what can be served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrt import Engine, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MAX_LEN = 64
BLOCK_BYTES = 2 * 2 * 16 * 16 * 4 * 2
"""Of the tiny model: keys and values, 2 KV heads, 16 tokens, head size 16, float32, 2 layers."""


@pytest.fixture(scope="module")
def short(tiny_model: Path) -> Iterator[Engine]:
    """An engine whose sequences have at most 64 tokens."""
    with Engine(tiny_model, max_model_len=MAX_LEN) as engine:
        yield engine


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Engine]:
    """An engine whose cache holds 4 blocks: 64 tokens, where the model allows 512."""
    with Engine(tiny_model, kv_cache_bytes=4 * BLOCK_BYTES) as engine:
        yield engine


@pytest.mark.parametrize("bad", ["", [], {"prompt_token_ids": []}])
def test_an_empty_prompt_takes_the_others_down(llm: Engine, bad: object) -> None:
    before = llm.stats().num_prompt_tokens
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["hi", bad], GREEDY)  # type: ignore[list-item]
    assert llm.stats().num_prompt_tokens == before, "one of the prompts was started"
    assert llm.generate("hi", GREEDY)[0].token_ids


def test_a_long_prompt_in_the_middle_shifts_the_outputs(short: Engine) -> None:
    with pytest.raises(RequestError, match="70 tokens"):
        short.generate([[5] * 3, [6] * 70, [7] * 4], GREEDY)
    futures = [short.submit([t] * n, GREEDY) for t, n in [(5, 3), (7, 4)]]
    assert [len(f.result(30).prompt_token_ids) for f in futures] == [3, 4]


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [
        (MAX_LEN - 1, 1, 1),
        (MAX_LEN - 1, 10, 1),
        (MAX_LEN - 2, 10, 2),
        (MAX_LEN - 1, None, 1),
        (MAX_LEN, 0, 0),
    ],
)
def test_a_prompt_near_the_limit_kills_or_overruns(
    short: Engine, length: int, max_tokens: int | None, expected: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = short.generate([[5] * length], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (expected, "length")


@pytest.mark.parametrize(("length", "max_tokens"), [(MAX_LEN, 1), (MAX_LEN, 10), (MAX_LEN + 1, 0)])
def test_a_prompt_beyond_the_limit_is_not_refused_at_once(
    short: Engine, length: int, max_tokens: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with pytest.raises(RequestError, match=rf"{length} tokens.*max_model_len is {MAX_LEN}"):
        short.submit([5] * length, params)
    with pytest.raises(RequestError, match=rf"{length} tokens"):
        short.stream([5] * length, params)


def test_a_prompt_beyond_the_cache_makes_everybody_wait(small: Engine) -> None:
    with pytest.raises(RequestError, match=r"96 tokens.*KV cache holds 64"):
        small.generate([[5] * 96, [6] * 4], GREEDY)
    assert len(small.generate([[6] * 4], GREEDY)[0].token_ids) == 8


def test_output_beyond_the_cache_does_not_end_with_length(small: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = small.generate([[6] * 4], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (60, "length")


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_asked_for_is_never_answered(llm: Engine, n: int) -> None:
    params = SamplingParams(max_tokens=0, n=n)
    output = llm.submit("hello", params).result(30)
    assert [(o.text, o.token_ids, o.finish_reason) for o in output.outputs] == [
        ("", (), "length")
    ] * n
    increments = list(llm.stream("hello", params))
    assert [i.finish_reason for i in increments] == ["length"] * n


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs"])
def test_a_negative_number_reaches_the_engine(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: -2})


def test_a_bad_prompt_is_an_error_of_python_and_not_of_llmrt(llm: Engine) -> None:
    for prompt in (3, None, [["a"]], [1.5], {"text": "a"}):
        with pytest.raises(RequestError):
            llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.submit(prompt, GREEDY)  # type: ignore[arg-type]
    assert llm.is_healthy()
