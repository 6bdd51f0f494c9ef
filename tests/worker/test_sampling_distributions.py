"""Frequencies of drawn tokens against exact probabilities. Seeds are fixed: runs are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmrt.sampling import SamplingParams
from llmrt.worker.sampler import Sampler
from llmrt.worker.sampling.choice import choose_tokens
from llmrt.worker.sampling.edits import edit_logits
from llmrt.worker.sampling.ordering import rank_of, top
from llmrt.worker.sampling.plan import SamplingPlan
from llmrt.worker.sampling.random_numbers import uniform
from tests.support.sequences import make_sequence

NUM_DRAWS = 4000


def frequencies(logits_V: torch.Tensor, **params: float) -> torch.Tensor:
    states = [make_sequence(seq_id=i, seed=i, **params) for i in range(NUM_DRAWS)]
    sampled = Sampler().sample(logits_V.expand(NUM_DRAWS, -1), states)
    return torch.bincount(torch.tensor(sampled.token_ids), minlength=len(logits_V)).double()


def assert_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square, five standard deviations above its mean; rare outcomes pooled."""
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that is not allowed"
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed_cells = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected_cells = torch.cat((expected[~rare], expected[rare].sum().clamp(min=1)[None]))
    statistic = float(((observed_cells - expected_cells) ** 2 / expected_cells).sum())
    freedom = max(len(expected_cells) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


WARPERS = {
    "temperature": lambda value: [TemperatureLogitsWarper(value)],
    "min_p": lambda value: [MinPLogitsWarper(value)],
    "top_k": lambda value: [TopKLogitsWarper(value)],
    "top_p": lambda value: [TopPLogitsWarper(value)],
}


@pytest.mark.parametrize("vocab_size", [20, 700])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 15, "top_p": 0.5},
    ],
)
def test_draws_follow_the_distribution_of_transformers(
    params: dict[str, float], vocab_size: int
) -> None:
    logits_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    warpers = LogitsProcessorList()
    for name, warp in WARPERS.items():
        if name in params:
            warpers.extend(warp(params[name]))
    expected = warpers(torch.tensor([[0]]), logits_V[None].clone())[0].softmax(-1)
    assert_fits(frequencies(logits_V, **params), expected)


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 4
    histories: Sequence[list[int]] = [[1, 2, 3, 2], [40, 40, 0, 1], [9, 8, 7, 6]]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(histories), logits_RV.clone())
    states = [make_sequence(h[:2], h[2:], repetition_penalty=penalty) for h in histories]
    edit_logits(logits_RV, [SamplingPlan(state, 50) for state in states])
    torch.testing.assert_close(logits_RV, expected, rtol=1e-6, atol=0)


def test_a_wide_nucleus_is_found_beyond_the_first_candidates() -> None:
    logits_V = torch.randn(9000, generator=torch.Generator().manual_seed(3)) / 10
    states = [make_sequence(seq_id=i, seed=i, top_p=0.5) for i in range(300)]
    drawn = torch.tensor(Sampler().sample(logits_V.expand(300, -1), states).token_ids)
    order = logits_V.argsort(descending=True)
    size = int((logits_V.softmax(-1)[order].cumsum(-1) < 0.5).sum()) + 1
    ranks = torch.isin(drawn, order[:size])
    assert ranks.all()
    assert torch.isin(drawn, order[size // 2 :]).any()


def test_the_largest_random_number_never_draws_an_excluded_token_at_a_block_end() -> None:
    logits_RV = torch.randn(200, 512, generator=torch.Generator().manual_seed(5))
    logits_RV[:, 500:] = -math.inf
    drawn = choose_tokens(logits_RV, [SamplingParams()] * 200, [1 - 2.0**-52] * 200)
    assert max(drawn) == 499


@pytest.mark.parametrize("along", ["seeds", "indices"])
def test_random_numbers_are_uniform_and_unrelated_along_seeds_and_indices(along: str) -> None:
    numbers = torch.tensor(
        [uniform(i, 3) if along == "seeds" else uniform(3, i) for i in range(20_000)]
    )
    cells = (numbers * 64).long()
    assert_fits(torch.bincount(cells, minlength=64).double(), torch.full((64,), 1 / 64))
    pairs = (numbers[:-1] * 8).long() * 8 + (numbers[1:] * 8).long()
    assert_fits(torch.bincount(pairs, minlength=64).double(), torch.full((64,), 1 / 64))


def test_a_seed_means_the_same_in_every_version() -> None:
    numbers = [uniform(0, 0), uniform(-1, 5), uniform(2**63 - 1, 10**6)]
    assert numbers == [0.6524484863740321, 0.15403342580516743, 0.39854775898749706]


@pytest.mark.parametrize("k", [1, 2, 5, 63, 64, 99])
def test_equal_logits_are_ordered_by_id(k: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randint(0, 6, (20, 64), generator=generator).float()
    values_RK, ids_RK = top(logits_RV, k)
    for logits, values, ids in zip(
        logits_RV.tolist(), values_RK.tolist(), ids_RK.tolist(), strict=True
    ):
        expected = sorted(range(64), key=lambda i: (-logits[i], i))[:k]
        assert ids == expected
        assert values == [logits[i] for i in expected]
    places = rank_of(logits_RV, ids_RK[:, -1])
    assert places.tolist() == [min(k, 64)] * 20
