from __future__ import annotations

import math

import pytest
import torch

from llmrt.worker.sampler import Sampler
from llmrt.worker.sampling.edits import edit_logits
from llmrt.worker.sampling.plan import SamplingPlan
from llmrt.worker.sequence import SequenceState
from tests.support.sequences import make_sequence


def sample_one(logits: list[float], sequence: SequenceState) -> int:
    sampled = Sampler().sample(torch.tensor([logits]), [sequence])
    assert sampled.failures == ()
    return sampled.token_ids[0]


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> torch.Tensor:
    """As a bfloat16 model gives them: with many equal ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).bfloat16().float()


def test_no_sequence_no_token() -> None:
    sampled = Sampler().sample(torch.empty(0, 5), [])
    assert (sampled.token_ids, sampled.tokens, sampled.failures) == ([], (), ())


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    assert sample_one([1.0, 3.0, 3.0, 2.0], make_sequence(temperature=0)) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-8},
        {"top_p": 1e-4},
        {"top_k": 1},
        {"temperature": 1e-5, "top_p": 1e-4, "top_k": 3},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_parameters_that_leave_one_token_equal_greedy_without_nan(
    params: dict[str, float], scale: float
) -> None:
    logits_RV = random_logits(8, 1000) * scale
    logits_RV[:, 7] = logits_RV.amax(-1) + scale
    states = [make_sequence(seq_id=i, seed=i, **params) for i in range(8)]
    assert Sampler().sample(logits_RV, states).token_ids == [7] * 8


def test_ties_at_the_top_equal_greedy_for_top_k_1_and_tiny_top_p() -> None:
    for params in ({"top_k": 1}, {"top_p": 1e-4}):
        for seed in range(20):
            assert sample_one([1.0, 2.0, 2.0], make_sequence(seed=seed, **params)) == 1


def test_a_banned_token_in_a_greedy_row_beside_a_random_row_gives_no_nan() -> None:
    logits_RV = torch.tensor([[5.0, 1.0, 0.0], [0.0, 1.0, 5.0]])
    greedy = make_sequence(temperature=0, logit_bias={0: -math.inf})
    random = make_sequence(seq_id=1, temperature=0.5, seed=3)
    sampled = Sampler().sample(logits_RV, [greedy, random])
    assert sampled.failures == ()
    assert sampled.token_ids[0] == 1
    assert sampled.token_ids[1] == sample_one([0.0, 1.0, 5.0], random)


def test_a_seeded_row_does_not_depend_on_neighbours_or_place() -> None:
    vocab_size, num_rows = 5000, 12
    logits_RV = random_logits(num_rows, vocab_size)
    kinds = [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.01},
        {"temperature": 0},
        {"temperature": 5.0, "top_p": 0.999},
        {"top_k": 7},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    ]
    states = [
        make_sequence([1, 2, 3], [4, 5], seq_id=i, seed=i, **kinds[i % len(kinds)])
        for i in range(num_rows)
    ]
    together = Sampler().sample(logits_RV, states).token_ids
    backwards = Sampler().sample(logits_RV.flip(0), states[::-1]).token_ids
    alone = [Sampler().sample(logits_RV[i : i + 1], [states[i]]).token_ids[0] for i in range(12)]
    assert backwards[::-1] == together == alone


def test_a_seed_gives_other_numbers_at_every_token_and_the_same_when_repeated() -> None:
    flat = [0.0] * 1000

    def run(seed: int) -> list[int]:
        sampler, state = Sampler(), make_sequence(seed=seed)
        for _ in range(20):
            state.token_ids += sampler.sample(torch.tensor([flat]), [state]).token_ids
        return state.output_token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len(set(run(1))) > 15


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.9, "frequency_penalty": 0.35},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": -0.4},
    ],
)
def test_penalties_are_the_same_step_by_step_and_after_a_preemption(
    params: dict[str, float],
) -> None:
    sampler, state = Sampler(), make_sequence([3, 3, 9], seed=5, temperature=0.9, **params)
    for step in range(30):
        logits_RV = random_logits(1, 12, seed=step)
        back_again = make_sequence(
            [3, 3, 9], state.output_token_ids, seed=5, temperature=0.9, **params
        )
        afresh = Sampler().sample(logits_RV, [back_again]).token_ids
        assert sampler.sample(logits_RV, [state]).token_ids == afresh
        state.token_ids += afresh


def test_repetition_counts_prompt_and_output_the_others_the_output_alone() -> None:
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    logits_RV = torch.tensor([[8.0, 8.0, 8.0, -8.0, 8.0]])
    state = make_sequence([0, 1, 0], [1, 2, 2, 3], **penalties)
    edit_logits(logits_RV, [SamplingPlan(state, 5)])
    assert logits_RV.tolist() == [[4.0, 3.25, 2.75, -16.75, 8.0]]


def test_a_sequence_that_comes_back_under_its_id_starts_afresh_without_forget() -> None:
    sampler = Sampler()
    state = make_sequence([0], [1, 1], temperature=0, frequency_penalty=2.0)
    assert sampler.sample(torch.tensor([[0.0, 3.0, 0.5]]), [state]).token_ids == [2]
    other = make_sequence([0], [2], temperature=0, frequency_penalty=2.0)
    assert sampler.sample(torch.tensor([[0.0, 3.0, 0.5]]), [other]).token_ids == [1]


def test_min_tokens_keeps_out_eos_and_stop_ids_until_there_are_enough() -> None:
    logits = [0.0, 9.0, 8.0, 1.0]
    params = {"eos": [1], "stop_token_ids": [2], "min_tokens": 2, "temperature": 0}
    assert sample_one(logits, make_sequence(**params)) == 3
    assert sample_one(logits, make_sequence([0], [3], **params)) == 3
    assert sample_one(logits, make_sequence([0], [3, 3], **params)) == 1


def test_a_bad_word_is_kept_out_only_where_the_output_has_begun_it() -> None:
    logits = [0.0, 1.0, 2.0, 9.0]
    params = {"bad_words": [[1, 2, 3]], "temperature": 0}
    assert sample_one(logits, make_sequence([1, 2], **params)) == 3
    assert sample_one(logits, make_sequence([0], [2], **params)) == 3
    assert sample_one(logits, make_sequence([0], [1, 2], **params)) == 2
    assert sample_one(logits, make_sequence(bad_words=[[3]], temperature=0)) == 2


def test_an_infinite_bias_forces_its_token() -> None:
    state = make_sequence(logit_bias={2: math.inf}, temperature=0.5)
    assert sample_one([5.0, 4.0, -3.0], state) == 2


def test_ids_outside_the_vocabulary_do_no_harm() -> None:
    state = make_sequence(
        [0, 99],
        [98],
        temperature=0,
        eos=[70],
        stop_token_ids=[71],
        min_tokens=5,
        bad_words=[[72], [98, 73]],
        logit_bias={74: 1.0},
        allowed_token_ids=[1, 75],
        repetition_penalty=1.5,
    )
    assert sample_one([5.0, 4.0, 3.0], state) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_no_token_left_fails_alone_and_says_why(temperature: float) -> None:
    params = {"temperature": temperature, "top_k": 2}
    stuck = make_sequence(seq_id=4, eos=[1], min_tokens=1, allowed_token_ids=[1], **params)
    free = make_sequence(seq_id=5, seed=1, **params)
    sampled = Sampler().sample(torch.tensor([[1.0, 2.0, 3.0]] * 2), [stuck, free])
    assert [token.seq_id for token in sampled.tokens] == [5]
    assert sampled.tokens[0].token_id == sampled.token_ids[1]
    assert [failure.seq_id for failure in sampled.failures] == [4]
    assert "No token is left to sample: allowed_token_ids" in str(sampled.failures[0].failure)
    assert sampled.token_ids[0] == 0


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
)
def test_nan_logits_fail_their_row_alone_and_blame_the_model(params: dict[str, float]) -> None:
    logits_RV = random_logits(2, 600)
    logits_RV[0, 3] = math.nan
    states = [make_sequence(seq_id=i, seed=7, logprobs=2, **params) for i in range(2)]
    sampled = Sampler().sample(logits_RV, states)
    assert [failure.seq_id for failure in sampled.failures] == [0]
    assert "logits are not finite numbers" in sampled.failures[0].failure.message
    assert sampled.tokens == Sampler().sample(logits_RV[1:], states[1:]).tokens
