"""The sampler against a reference in plain Python, over generated parameters and logits."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from llmrt.worker.sampler import Sampler
from llmrt.worker.sampling.random_numbers import uniform
from llmrt.worker.sequence import SequenceState
from tests.support.sampling_reference import expected_token
from tests.support.sequences import make_sequence

VOCAB_SIZES = (2, 3, 12, 300, 700)
SAFE_MARGIN = 1e-5
"""Closer decisions may fall either way in float32."""


@st.composite
def sequences(draw: st.DrawFn, vocab_size: int, seq_id: int) -> SequenceState:
    """A sequence with some parameters set; what changes logits is dyadic, so that ties stay ties."""
    token = st.integers(0, vocab_size - 1)
    some_tokens = st.lists(token, max_size=6)
    params = {
        "temperature": st.sampled_from([0.0, 1e-6, 1e-5, 0.3, 0.7, 1.0, 1.7]),
        "top_k": st.integers(0, vocab_size + 2),
        "top_p": st.sampled_from([1e-4, 0.13, 0.5, 0.77, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.21, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.25, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.75, 2.0]),
        "logit_bias": st.dictionaries(token, st.sampled_from([-math.inf, -2.5, 0.5, 4.0])),
        "allowed_token_ids": st.lists(st.integers(0, vocab_size + 3), min_size=1, max_size=8),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": some_tokens,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(params)), max_size=5))
    return make_sequence(
        draw(st.lists(token, min_size=1, max_size=6)),
        draw(some_tokens),
        seq_id=seq_id,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        eos=draw(some_tokens),
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)),
        **{name: draw(params[name]) for name in sorted(chosen)},
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SequenceState]]:
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    num_rows = draw(st.integers(1, 4))
    rng = random.Random(draw(st.integers(0, 2**32)))
    logits = [[rng.randrange(-64, 64) / 8 for _ in range(vocab_size)] for _ in range(num_rows)]
    return logits, [draw(sequences(vocab_size, row)) for row in range(num_rows)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_every_row_gives_the_token_of_the_reference(
    batch: tuple[list[list[float]], list[SequenceState]],
) -> None:
    rows, states = batch
    logits_RV = torch.tensor(rows)
    sampled = Sampler().sample(logits_RV, states)
    assert torch.equal(logits_RV, torch.tensor(rows)), "the model's logits were written to"
    failed = {failure.seq_id for failure in sampled.failures}
    for row, (logits, state) in enumerate(zip(rows, states, strict=True)):
        number = uniform(state.spec.seed, len(state.token_ids) - state.num_prompt_tokens)
        expected = expected_token(logits, state, number)
        assert (expected is None) == (row in failed)
        if expected is not None and expected.margin > SAFE_MARGIN:
            assert sampled.token_ids[row] == expected.token_id


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.randoms())
def test_a_row_is_the_same_alone_and_among_others_in_any_order(
    batch: tuple[list[list[float]], list[SequenceState]], rng: random.Random
) -> None:
    rows, states = batch
    assume(len(rows) > 1)
    together = Sampler().sample(torch.tensor(rows), states).token_ids
    order = list(range(len(rows)))
    rng.shuffle(order)
    shuffled = Sampler().sample(torch.tensor([rows[i] for i in order]), [states[i] for i in order])
    assert [shuffled.token_ids[order.index(i)] for i in range(len(rows))] == together
    for i, token_id in enumerate(together):
        assert Sampler().sample(torch.tensor([rows[i]]), [states[i]]).token_ids == [token_id]
