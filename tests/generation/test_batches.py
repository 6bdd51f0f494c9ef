"""A request gives the same tokens whatever runs beside it, was cached before, or preempts it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrt import Engine, RequestOutput, SamplingParams
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2 * 2 * 16 * 16 * 4 * 2
PROMPTS = ["The capital", "a", "Once upon a time there was", "0123456789" * 6, "zz", "Name it:"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MANY: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=1.0, seed=5),
    "nucleus": replace(GREEDY, temperature=0.8, top_p=0.7, top_k=40, seed=9),
    "penalised": replace(
        GREEDY,
        temperature=0.7,
        seed=2,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
    "min_p": replace(GREEDY, temperature=1.5, min_p=0.05, seed=1),
    "restricted": replace(
        GREEDY,
        temperature=1.0,
        seed=3,
        allowed_token_ids=tuple(range(20, 90)),
        logit_bias={30: 1.0},
    ),
}
"""Ways of sampling that depend on the seed, on the prompt and on the output."""


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers see 8 tokens back."""
    directory = tmp_path_factory.mktemp("windowed") / "m"
    return write_tiny_model(directory, seed=3, num_heads=4, model_type="mistral", sliding_window=8)


@pytest.fixture(scope="module")
def tight(tiny_model: Path) -> Iterator[Engine]:
    """An engine whose cache holds one and a half of the requests made to it."""
    with Engine(tiny_model, kv_cache_bytes=9 * BLOCK_BYTES) as engine:
        yield engine


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("kind", MANY)
def test_neighbours_or_their_order_change_an_answer(llm: Engine, kind: str) -> None:
    params = [replace(MANY[kind], seed=i) for i in range(len(PROMPTS))]
    alone = [llm.generate(p, s)[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
    order = list(range(len(PROMPTS)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        outputs = llm.generate([PROMPTS[i] for i in order], [params[i] for i in order])
        assert tokens(outputs) == [alone[i] for i in order]


def test_a_neighbour_without_a_seed_changes_a_seeded_answer(llm: Engine) -> None:
    seeded, free = MANY["seeded"], replace(MANY["seeded"], seed=None)
    alone = llm.generate("The capital", seeded)[0].token_ids
    pairs = [llm.generate(["The capital", "a"], [seeded, free]) for _ in range(4)]
    assert {pair[0].token_ids for pair in pairs} == {alone}
    assert len({pair[1].token_ids for pair in pairs}) > 1, "without a seed nothing varies"


def test_greedy_beside_random_with_a_banned_token_is_nan(llm: Engine) -> None:
    first = llm.generate("a", GREEDY)[0].token_ids[0]
    banned = replace(GREEDY, logit_bias={first: float("-inf")})
    alone = llm.generate("a", banned)[0].token_ids
    assert alone[0] != first
    assert llm.generate(["a", "b"], [banned, MANY["seeded"]])[0].token_ids == alone


@pytest.mark.parametrize("change", [{"temperature": 1e-5}, {"temperature": 1e-8}, {"top_p": 1e-4}])
def test_a_tiny_temperature_or_nucleus_is_not_greedy(llm: Engine, change: dict[str, Any]) -> None:
    params = replace(GREEDY, **{"temperature": 1.0, **change})
    assert tokens(llm.generate(PROMPTS, params)) == tokens(llm.generate(PROMPTS, GREEDY))


# ---- too little cache ----


@pytest.mark.parametrize("kind", MANY)
def test_a_preempted_request_says_something_else(llm: Engine, tight: Engine, kind: str) -> None:
    params = replace(MANY[kind], max_tokens=64)
    prompts = [[5 + i] * 20 for i in range(6)]
    expected = tokens(llm.generate(prompts, params))
    before = tight.stats().num_preemptions
    assert tokens(tight.generate(prompts, params)) == expected
    assert tight.stats().num_preemptions > before
    assert tight.stats().num_free_blocks == 9


def test_sixty_four_requests_in_a_small_cache_starve(llm: Engine, tight: Engine) -> None:
    params = [replace(GREEDY, max_tokens=1 + i % 60) for i in range(64)]
    prompts = [[5 + i % 7] * (1 + i) for i in range(64)]
    futures = [
        tight.submit(prompt, p, priority=i % 3)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    assert tokens([f.result(60) for f in futures]) == tokens(llm.generate(prompts, params))


# ---- a cached prefix ----


@pytest.mark.parametrize("kind", MANY)
def test_a_cached_prefix_changes_an_answer(tiny_model: Path, kind: str) -> None:
    base = list(range(10, 75))
    asked = [base, base, base[:40], [*base, 80, 81], base[:64], base]
    with Engine(tiny_model, prefix_caching=False) as llm:
        expected = tokens(llm.generate(asked, MANY[kind]))
    with Engine(tiny_model) as llm:
        outputs = [llm.generate([prompt], MANY[kind])[0] for prompt in asked]
        assert tokens(outputs) == expected
        assert [o.num_cached_tokens for o in outputs] == [0, 64, 32, 64, 48, 64]


def test_a_cached_prefix_of_a_model_with_a_window_changes_an_answer(windowed: Path) -> None:
    prompt = list(range(10, 75))
    with Engine(windowed, prefix_caching=False) as llm:
        expected = llm.generate([prompt], GREEDY)[0].token_ids
    with Engine(windowed) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for _ in range(4)]
    assert {o.token_ids for o in outputs} == {expected}
    assert outputs[-1].num_cached_tokens == 64


def test_completions_of_one_prompt_compute_it_each(tiny_model: Path) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=2, ignore_eos=True)
    with Engine(tiny_model) as llm:
        output = llm.generate([list(range(10, 75))], params)[0]
        stats = llm.stats()
        assert len({c.token_ids for c in output.outputs}) > 1
        assert stats.num_cached_tokens == 3 * 64
        alone = [
            llm.generate([list(range(10, 75))], replace(params, n=1, seed=1 + i))[0].token_ids
            for i in range(4)
        ]
    assert [c.token_ids for c in output.outputs] == alone


# ---- split ----


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_sample_something_else(llm: Engine, tiny_model: Path, tp: int) -> None:
    with Engine(tiny_model, tp=tp, max_num_batched_tokens=64, kv_cache_bytes=1 << 18) as split:
        for params in MANY.values():
            asked = replace(params, n=2) if params.seed is not None else params
            assert tokens(split.generate(PROMPTS, asked)) == tokens(llm.generate(PROMPTS, asked))


def test_defaults_of_the_model_win_over_a_given_parameter(tiny_model: Path, tmp_path: Path) -> None:
    from tests.support.scripts import copy_model

    config = {"repetition_penalty": 1.1, "temperature": 0.0, "max_new_tokens": 5}
    with Engine(copy_model(tiny_model, tmp_path / "m", generation_config=config)) as llm:
        assert llm.default_params == SamplingParams(
            repetition_penalty=1.1, temperature=0.0, max_tokens=5
        )
        given = llm.generate("a", replace(llm.default_params, ignore_eos=False))[0]
        assert llm.generate("a")[0].token_ids == given.token_ids
        chatted = llm.chat([{"role": "user", "content": "a"}])[0]
        assert len(chatted.token_ids) <= 5
        explicit = llm.generate("a", replace(GREEDY, max_tokens=9))[0]
        assert len(explicit.token_ids) == 9
