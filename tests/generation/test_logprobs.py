"""Log-probabilities: of what is generated, of the prompt, and of a given continuation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrt import AsyncEngine, Engine, Logprob, RequestError, SamplingParams
from tests.support.reference import logprobs_reference

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=1.5, seed=4, top_k=50)
VOCAB = 261
LONG = [5 + (7 * i) % 250 for i in range(150)]
"""More than two steps of the `llm` fixture hold, and more than one block."""


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[list[float]]:
    """transformers' log-probabilities after each token of LONG."""
    return logprobs_reference(tiny_model, [LONG])[0]


def check_entry(entry: dict[int, Logprob], token_id: int, k: int, row: Sequence[float]) -> None:
    """Check that a position lists the *k* best and the actual token, as the reference has them.

    Tokens that the reference finds equally likely, but for its last digits, may change places.
    """
    assert {*range(1, k + 1)} <= {found.rank for found in entry.values()}
    assert token_id in entry
    assert len(entry) <= k + 1
    ranked = sorted(row, reverse=True)
    for found_id, found in entry.items():
        assert found.logprob == pytest.approx(row[found_id], abs=1e-4)
        assert ranked[found.rank - 1] == pytest.approx(row[found_id], abs=1e-4)


@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_prompt_logprobs_differ_from_transformers_in_chunks(
    llm: Engine, reference: list[list[float]], k: int
) -> None:
    output = llm.generate([LONG], replace(GREEDY, prompt_logprobs=k, max_tokens=0))[0]
    assert output.prompt_logprobs is not None
    assert output.outputs[0].token_ids == ()
    assert len(output.prompt_logprobs) == len(LONG)
    assert output.prompt_logprobs[0] is None
    num_best = VOCAB if k == -1 else k
    for entry, token_id, row in zip(output.prompt_logprobs[1:], LONG[1:], reference, strict=False):
        assert entry is not None
        check_entry(entry, token_id, num_best, row)


def test_prompt_logprobs_are_lost_to_a_cached_prefix_or_siblings(llm: Engine) -> None:
    asked = replace(RANDOM, prompt_logprobs=1, n=3)
    llm.generate([LONG], GREEDY)
    first, second = llm.generate([LONG], asked)[0], llm.generate([LONG, LONG], asked)[1]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(LONG)
    assert _values(first.prompt_logprobs) == pytest.approx(
        _values(second.prompt_logprobs), abs=1e-4
    )
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    plain = llm.generate([LONG], replace(RANDOM, n=3))[0]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in plain.outputs]


def test_prompt_logprobs_are_given_twice_or_not_at_all_after_a_preemption(
    llm: Engine, tiny_model: Path
) -> None:
    asked = replace(GREEDY, prompt_logprobs=0, max_tokens=60)
    prompts = [[5 + i] * 30 for i in range(5)]
    expected = llm.generate(prompts, asked)
    with Engine(tiny_model, kv_cache_bytes=9 * 8192, max_num_batched_tokens=64) as tight:
        outputs = tight.generate(prompts, asked)
        assert tight.stats().num_preemptions > 0
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert _values(got.prompt_logprobs) == pytest.approx(
            _values(wanted.prompt_logprobs), abs=1e-4
        )


def _values(prompt_logprobs: Any) -> list[float]:
    return [e.logprob for entry in prompt_logprobs[1:] for e in entry.values()]


@pytest.mark.parametrize("k", [0, 1, 5, -1])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_logprobs_do_not_hold_the_sampled_token(
    llm: Engine, tiny_model: Path, k: int, params: SamplingParams
) -> None:
    prompt = LONG[:9]
    completions = llm.generate([prompt], replace(params, logprobs=k, n=2))[0].outputs
    references = logprobs_reference(tiny_model, [[*prompt, *c.token_ids] for c in completions])
    for completion, rows in zip(completions, references, strict=True):
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        total = 0.0
        for i, entry in enumerate(completion.logprobs):
            token_id = completion.token_ids[i]
            check_entry(entry, token_id, VOCAB if k == -1 else k, rows[len(prompt) - 1 + i])
            total += entry[token_id].logprob
            assert entry[token_id].decoded_token == llm.tokenizer.token_text(token_id)
        assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_depend_on_how_a_token_is_chosen(llm: Engine) -> None:
    forced = {"logit_bias": {40: 1e4}, "logprobs": 2, "max_tokens": 1}
    found = [
        llm.generate("a", replace(RANDOM, **{**forced, **change}))[0].outputs[0].logprobs
        for change in ({"temperature": 0.5}, {"temperature": 1.0}, {"repetition_penalty": 1.5})
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] is not None
    assert 40 in found[0][0]
    assert found[0][0][40].rank > 2


def test_streamed_logprobs_differ_from_the_whole(llm: Engine) -> None:
    asked = replace(RANDOM, logprobs=1, n=2)
    whole = llm.generate("a", asked)[0]
    increments = list(llm.stream("a", asked))
    for completion in whole.outputs:
        own = [i for i in increments if i.index == completion.index]
        joined = tuple(entry for i in own for entry in i.logprobs or ())
        assert joined == completion.logprobs


def test_more_logprobs_than_tokens_are_promised(llm: Engine) -> None:
    with pytest.raises(RequestError, match="logprobs=400 is above the vocabulary of 261"):
        llm.generate("a", replace(GREEDY, logprobs=400))


# ---- scores ----


@pytest.mark.parametrize("split", [1, 16, 17, 100, 149])
def test_a_score_differs_from_transformers(
    llm: Engine, reference: list[list[float]], split: int
) -> None:
    prompt, continuation = LONG[:split], LONG[split:]
    for _ in range(2):  # the second one may find the prompt in the prefix cache
        (score,) = llm.score([prompt], [continuation])
        expected = [reference[i - 1][LONG[i]] for i in range(split, len(LONG))]
        assert score.token_ids == tuple(continuation)
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-3)


def test_a_scored_prompt_is_computed_again(llm: Engine) -> None:
    prompt = [9 + i for i in range(64)]
    llm.score([prompt], [[5, 6]])
    before = llm.stats().num_cached_tokens
    llm.score([prompt], [[7, 8]])
    assert llm.stats().num_cached_tokens - before == 48


def test_the_greedy_answer_does_not_score_as_greedy(llm: Engine) -> None:
    prompt = LONG[:20]
    answer = llm.generate([prompt], replace(GREEDY, logprobs=0))[0].outputs[0]
    other = [*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % VOCAB]
    same, different = llm.score([prompt], [answer.token_ids, other])
    assert same.is_greedy
    assert not different.is_greedy
    assert answer.cumulative_logprob is not None
    assert same.logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)
    assert different.logprob < same.logprob


def test_text_is_scored_as_other_tokens(llm: Engine) -> None:
    text, ids = llm.score("The capital", " is"), llm.tokenizer.encode(" is", False)
    assert text == llm.score([llm.tokenizer.encode("The capital")], [ids])
    assert text[0].token_ids == tuple(ids)
    several = llm.score("The capital", [" is", " was"])
    assert several[0].logprob == pytest.approx(text[0].logprob, abs=1e-5)
    assert several[1].token_ids == tuple(llm.tokenizer.encode(" was", False))


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ("a", "", "adds no token"),
        ("", "a", "first token"),
        (["a", "b"], ["c"], "2 prompts came with 1"),
        ([[5] * 600], [[6]], "601 tokens"),
        ([[5]], [[999]], "999"),
    ],
)
def test_what_cannot_be_scored_is_scored(
    llm: Engine, prompts: Any, continuations: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score(prompts, continuations)


def test_awaited_scores_differ(llm: Engine, tiny_model: Path) -> None:
    async def ask() -> Any:
        async with AsyncEngine(tiny_model) as engine:
            return await engine.score("The capital", [" is", " was"])

    awaited = [s.logprob for s in asyncio.run(ask())]
    assert awaited == pytest.approx([s.logprob for s in llm.score("The capital", [" is", " was"])])
    assert all(math.isfinite(v) for v in awaited)
