from __future__ import annotations

import pytest
import torch

from llmrt.messages import TokenLogprobs
from llmrt.worker.sampler import Sampler
from tests.support.sequences import make_sequence

LOGITS = [1.0, 4.0, 2.0, 3.0, 0.0]
RAW = torch.tensor(LOGITS).log_softmax(-1).tolist()
BEST_FIRST = [1, 3, 2, 0, 4]


def logprobs_of(token_id: int, num_top: int | None, **params: object) -> TokenLogprobs | None:
    """Sample a certain token, and return what comes with it."""
    state = make_sequence(allowed_token_ids=[token_id], logprobs=num_top, **params)
    (token,) = Sampler().sample(torch.tensor([LOGITS]), [state]).tokens
    assert token.token_id == token_id
    assert token.logprob == (None if num_top is None else pytest.approx(RAW[token_id]))
    return token.top


def test_none_where_not_asked_for() -> None:
    assert logprobs_of(1, None) is None


def test_zero_is_the_sampled_token_alone() -> None:
    assert logprobs_of(0, 0) == TokenLogprobs(token_ids=(0,), logprobs=(RAW[0],), ranks=(4,))


def test_a_sampled_token_below_the_best_is_added_with_its_rank() -> None:
    top = logprobs_of(0, 2)
    assert top is not None
    assert top.token_ids == (1, 3, 0)
    assert top.ranks == (1, 2, 4)
    assert top.logprobs == pytest.approx([RAW[1], RAW[3], RAW[0]])


def test_a_sampled_token_among_the_best_is_listed_once() -> None:
    top = logprobs_of(3, 2)
    assert top is not None
    assert top.token_ids == (1, 3)


@pytest.mark.parametrize("num_top", [-1, 5, 50])
def test_all_are_all_in_order(num_top: int) -> None:
    top = logprobs_of(2, num_top)
    assert top is not None
    assert top.token_ids == tuple(BEST_FIRST)
    assert top.ranks == (1, 2, 3, 4, 5)
    assert sum(torch.tensor(top.logprobs).exp()) == pytest.approx(1)


def test_they_are_raw_whatever_the_parameters_do() -> None:
    plain = logprobs_of(0, 3)
    changed = logprobs_of(
        0, 3, temperature=0.3, top_k=1, logit_bias={0: 9.0}, repetition_penalty=1.7
    )
    assert plain == changed


def test_rows_that_ask_for_different_numbers_share_a_batch() -> None:
    states = [
        make_sequence(seq_id=i, temperature=0, logprobs=asked)
        for i, asked in enumerate([None, 2, 0, -1, 2])
    ]
    tokens = Sampler().sample(torch.tensor([LOGITS] * 5), states).tokens
    assert [token.top and len(token.top.token_ids) for token in tokens] == [None, 2, 1, 5, 2]


def test_equal_logits_have_different_ranks_by_id() -> None:
    state = make_sequence(allowed_token_ids=[3], logprobs=2)
    (token,) = Sampler().sample(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), [state]).tokens
    assert token.top is not None
    assert (token.top.token_ids, token.top.ranks) == ((1, 2, 3), (1, 2, 3))


@pytest.mark.parametrize("chunks", [[150], [1] * 150, [100, 50], [64, 65, 21]])
def test_prompt_logprobs_cover_all_but_the_first_token_however_it_is_chunked(
    chunks: list[int],
) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 30, (140,), generator=generator).tolist()
    logits_TV = torch.randn(150, 30, generator=generator)
    raw_TV = logits_TV.log_softmax(-1)
    state = make_sequence(prompt, [1] * 10, seq_id=6, prompt_logprobs=2)
    expected_start, covered = 1, []
    for rows in logits_TV.split(chunks):
        result = Sampler().prompt_logprobs(rows, state, expected_start - 1)
        assert (result.seq_id, result.start) == (6, expected_start)
        covered += result.positions
        expected_start += len(rows)
    assert len(covered) == 139
    for position, entry in enumerate(covered, 1):
        own = entry.logprobs[entry.token_ids.index(prompt[position])]
        assert own == pytest.approx(float(raw_TV[position - 1, prompt[position]]), abs=1e-6)
        assert entry.token_ids[:2] == tuple(raw_TV[position - 1].topk(2).indices.tolist())
