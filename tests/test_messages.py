"""What crosses between driver and worker comes out as it went in."""

from __future__ import annotations

import pickle

import pytest

from llmrt.errors import RankFailure
from llmrt.messages import (
    Batch,
    BatchResult,
    Execute,
    SampledToken,
    ScheduledSequence,
    SequenceFailure,
    TokenLogprobs,
)

DECODE = ScheduledSequence(seq_id=3, start=7, num_tokens=1, new_block_ids=(), samples=True)
CHUNK = ScheduledSequence(seq_id=9, start=0, num_tokens=64, new_block_ids=(4, 5), samples=False)
TOP = TokenLogprobs(token_ids=(5,), logprobs=(-0.5,), ranks=(1,))
FAILURE = RankFailure(rank=0, type_name="ValueError", message="no", traceback="")


@pytest.mark.parametrize("scheduled", [(), (DECODE,), (DECODE, CHUNK)])
def test_a_batch_changes_on_its_way(scheduled: tuple[ScheduledSequence, ...]) -> None:
    batch = Batch(step=5, scheduled=scheduled, finished=(1, 2))
    command = pickle.loads(pickle.dumps(Execute(batch=batch)))
    assert command == Execute(batch=batch)
    assert all(isinstance(item, ScheduledSequence) for item in command.batch.scheduled)


@pytest.mark.parametrize(
    "tokens",
    [
        (),
        (SampledToken(seq_id=3, token_id=5),),
        (SampledToken(seq_id=3, token_id=5, logprob=-0.5, top=TOP), SampledToken(4, 6)),
    ],
)
def test_a_result_changes_on_its_way(tokens: tuple[SampledToken, ...]) -> None:
    failures = (SequenceFailure(seq_id=8, failure=FAILURE),)
    result = BatchResult(step=5, tokens=tokens, failures=failures)
    found = pickle.loads(pickle.dumps(result))
    assert found == result
    assert all(isinstance(token, SampledToken) for token in found.tokens)


def test_a_thousand_sequences_make_a_long_message() -> None:
    scheduled = tuple(ScheduledSequence(i, 100_000 + i, 1, (), True) for i in range(1000))
    assert len(pickle.dumps(Batch(step=1, scheduled=scheduled))) < 12_000
