from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmrt.worker.sampler import Sampled, Sampler
from tests.support.sequences import make_sequence


def force(token_id: int, logits_V: torch.Tensor) -> torch.Tensor:
    forced_V = torch.full_like(logits_V, -math.inf)
    forced_V[token_id] = 0
    return forced_V


def by_output(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """Count upwards from the last output token."""
    return force(output_ids[-1] + 1, logits_V)


def by_prompt_and_output(
    prompt_ids: list[int], output_ids: list[int], logits_V: torch.Tensor
) -> torch.Tensor:
    return force(sum(prompt_ids) + len(output_ids), logits_V)


def with_default(output_ids: list[int], logits_V: torch.Tensor, step: int = 2) -> torch.Tensor:
    return force(output_ids[-1] + step, logits_V)


def in_place(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    logits_V[3] = math.inf
    return logits_V


def raises(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    logits_V.fill_(math.nan)
    raise RuntimeError("no such rule")


def returns_nothing(output_ids: list[int], logits_V: torch.Tensor) -> None:
    logits_V[3] = 100


def returns_another_shape(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    return logits_V[:2]


class Counting:
    """Counts its own calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return force(self.num_calls, logits_V)


class FailsToLoad:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (int, ("not a number",))


def sample(*processors: Callable[..., Any], temperature: float = 0) -> Sampled:
    """Sample a row with these processors, between two ordinary rows."""
    plain = [make_sequence(seq_id=i, temperature=temperature, seed=i) for i in (0, 2)]
    processed = make_sequence([1, 1], [4], seq_id=1, processors=processors, temperature=temperature)
    logits_RV = torch.tensor([[0.0, 50.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 3)
    sampled = Sampler().sample(logits_RV, [plain[0], processed, plain[1]])
    assert (sampled.token_ids[0], sampled.token_ids[2]) == (1, 1), "a neighbour was changed"
    return sampled


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (by_output, 5),
        (by_prompt_and_output, 3),
        (with_default, 6),
        (functools.partial(force, 7), 7),
        (functools.partial(by_prompt_and_output, [2]), 3),
        (in_place, 3),
        (lambda *args: force(2, args[-1]), 2),
    ],
)
def test_a_processor_decides_its_own_row(processor: Callable[..., Any], expected: int) -> None:
    if isinstance(processor, functools.partial) and processor.func is force:
        processor = functools.partial(lambda token_id, _, logits: force(token_id, logits), 7)
    assert sample(processor).token_ids[1] == expected
    assert sample(processor, temperature=0.5).token_ids[1] == expected


def test_processors_run_in_order_and_before_the_penalties() -> None:
    def first(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits_V)

    def second(output_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        logits_V[2], logits_V[3] = 2.0, 1.5
        return logits_V

    assert sample(first, second).token_ids[1] == 2
    state = make_sequence([0], [2], processors=[first, second], temperature=0, presence_penalty=1.0)
    assert Sampler().sample(torch.zeros(1, 8), [state]).token_ids == [3]


@pytest.mark.parametrize(
    ("processor", "type_name", "message"),
    [
        (raises, "RuntimeError", "no such rule"),
        (returns_nothing, "TypeError", "must return the logits, of shape [8]; it returned None"),
        (returns_another_shape, "TypeError", "it returned shape [2]"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_failing_processor_fails_its_sequence_alone(
    processor: Callable[..., Any], type_name: str, message: str, temperature: float
) -> None:
    sampled = sample(by_output, processor, temperature=temperature)
    (failed,) = sampled.failures
    assert (failed.seq_id, failed.failure.rank) == (1, 0)
    assert failed.failure.type_name == type_name
    assert message in failed.failure.message
    assert type_name in failed.failure.traceback
    assert [token.seq_id for token in sampled.tokens] == [0, 2]


def test_the_traceback_names_the_users_function() -> None:
    (failed,) = sample(raises).failures
    assert "in raises" in failed.failure.traceback


def test_a_processor_that_cannot_be_unpickled_fails_its_sequence_alone() -> None:
    (failed,) = sample(FailsToLoad()).failures  # pyright: ignore[reportArgumentType]
    assert (failed.seq_id, failed.failure.type_name) == (1, "ValueError")


def test_one_that_excludes_everything_fails_its_sequence() -> None:
    (failed,) = sample(lambda output, logits: logits - math.inf).failures
    assert "together exclude all" in failed.failure.message


def test_it_is_unpickled_once_and_keeps_its_state_until_forgotten() -> None:
    sampler = Sampler()
    state = make_sequence(seq_id=9, processors=[Counting()], temperature=0)
    logits_RV = torch.zeros(1, 8)
    assert [sampler.sample(logits_RV, [state]).token_ids[0] for _ in range(3)] == [1, 2, 3]
    sampler.forget(9)
    assert sampler.sample(logits_RV, [state]).token_ids == [1]
    sampler.forget(1234)
