"""Every architecture against transformers, in float32, on one to four ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.checkpoints import FAMILIES, Checkpoint, random_prompt
from tests.support.native import native_placement
from tests.support.tiny_driver import TinyDriver, logits_at_every_position

TOLERANCE = 1e-4
PROMPT_LENGTH = 50


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_differ_from_transformers(
    checkpoints: dict[str, Checkpoint], family: str, tp: int
) -> None:
    checkpoint = checkpoints[family]
    token_ids = random_prompt(PROMPT_LENGTH, checkpoint.config.vocab_size)
    expected_TV = checkpoint.logits(token_ids)
    found_TV = logits_at_every_position(checkpoint, tp, token_ids)
    torch.testing.assert_close(found_TV, expected_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [(7, 1, 12, 1, 1, 28), (1,) * PROMPT_LENGTH, (25, 25)])
def test_chunks_change_the_logits(
    checkpoints: dict[str, Checkpoint], family: str, chunks: tuple[int, ...]
) -> None:
    checkpoint = checkpoints[family]
    token_ids = random_prompt(PROMPT_LENGTH, checkpoint.config.vocab_size)
    expected_TV = checkpoint.logits(token_ids)
    found_TV = logits_at_every_position(checkpoint, 1, token_ids, chunks)
    torch.testing.assert_close(found_TV, expected_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels_are_less_exact_than_torch(
    checkpoints: dict[str, Checkpoint], family: str, tp: int
) -> None:
    checkpoint = checkpoints[family]
    token_ids = random_prompt(PROMPT_LENGTH, checkpoint.config.vocab_size)
    expected_TV = checkpoint.logits(token_ids)
    native = native_placement()
    of_torch, of_kernels = (
        (logits_at_every_position(checkpoint, tp, token_ids, (7, 1, 41, 1), placement).float())
        for placement in (replace(native, kernels=None), native)
    )
    error_of_torch = (of_torch - expected_TV).abs().mean()
    error_of_kernels = (of_kernels - expected_TV).abs().mean()
    assert 0 < error_of_kernels <= 1.1 * error_of_torch


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_compiled_kernels_are_rounded(
    checkpoints: dict[str, Checkpoint], tp: int
) -> None:
    checkpoint = checkpoints["llama"]
    token_ids = random_prompt(PROMPT_LENGTH, checkpoint.config.vocab_size)
    chunks = (7, 1, 41, 1)
    found_TV = logits_at_every_position(checkpoint, tp, token_ids, chunks, native_placement())
    assert found_TV.dtype == torch.float32
    assert (found_TV != found_TV.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_differ_in_a_mixed_batch_through_chunked_prefill(
    checkpoints: dict[str, Checkpoint], family: str, tp: int
) -> None:
    checkpoint = checkpoints[family]
    lengths = (1, 37, 5, 16, 12)
    prompts = [random_prompt(n, checkpoint.config.vocab_size, seed=n) for n in lengths]
    found = TinyDriver(checkpoint, tp=tp).generate(prompts, num_tokens=64, chunk=6)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_same_greedy(checkpoint, prompt, tokens)


def assert_same_greedy(checkpoint: Checkpoint, prompt: list[int], tokens: list[int]) -> None:
    """Assert transformers' tokens; from a near tie on, both continuations are right."""
    expected = checkpoint.greedy(prompt, len(tokens))
    if tokens == expected:
        return
    first = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
    best_two = checkpoint.logits(prompt + expected[:first])[-1].topk(2).values
    assert best_two[0] - best_two[1] < TOLERANCE, f"token {first} differs without a near tie"
