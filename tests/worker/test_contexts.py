"""Contexts kept from step to step are what a copy out of the cache is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from llmrt.worker.attention.contexts import ContextKeeper, Contexts, CopiedContexts, Decode
from llmrt.worker.kv_cache import KVCache
from tests.support.tiny_driver import FLOAT32_CPU

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 3, 4, 4


class CountingCache(KVCache):
    """A cache that counts the copies made out of it."""

    num_gathers = 0

    def gather(self, layer: int, places: torch.Tensor, num_sequences: int) -> torch.Tensor:
        self.num_gathers += 1
        return super().gather(layer, places, num_sequences)


@dataclass
class Running:
    """A sequence with its keys and values as they were made."""

    block_ids: list[int]
    tokens: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """By position: kv_LHD."""


class Steps:
    """Runs decodes over one cache and checks what each reads."""

    def __init__(self, num_blocks: int = 512) -> None:
        self.cache = CountingCache(
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            placement=FLOAT32_CPU,
        )
        self.keeper = ContextKeeper(self.cache)
        self._free = list(torch.randperm(num_blocks).tolist())

    def start(self, num_tokens: int) -> Running:
        """Return a sequence whose first tokens are in the cache."""
        sequence = Running([])
        for _ in range(num_tokens):
            self.write(sequence)
        return sequence

    def step(self, *sequences: Running) -> Contexts:
        """Run one token of each, and compare what attention reads with what was written."""
        for sequence in sequences:
            self.write(sequence)
        decodes = [Decode(len(s.tokens) - 1, s.block_ids) for s in sequences]
        contexts = self.keeper.contexts(decodes)
        self.keeper.forget_unused()
        for layer in range(NUM_LAYERS):
            new_NHD = torch.stack([s.tokens[-1][layer] for s in sequences])
            keys_NKSD, values_NKSD = contexts.read(layer, new_NHD)
            assert keys_NKSD.shape[2] == contexts.num_blocks * BLOCK_SIZE
            for n, sequence in enumerate(sequences):
                expected_HSD = torch.stack([t[layer] for t in sequence.tokens], dim=1)
                num_tokens = len(sequence.tokens)
                found_HSD = torch.cat((keys_NKSD[n], values_NKSD[n]))[:, :num_tokens]
                assert torch.equal(found_HSD, expected_HSD)
        return contexts

    def write(self, sequence: Running) -> None:
        """Put the next token of a sequence into the cache."""
        position = len(sequence.tokens)
        if position == len(sequence.block_ids) * BLOCK_SIZE:
            sequence.block_ids.append(self._free.pop())
        sequence.tokens.append(torch.randn(NUM_LAYERS, 2 * NUM_KV_HEADS, HEAD_DIM))
        slot = sequence.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for layer in range(NUM_LAYERS):
            self.cache.write(layer, sequence.tokens[-1][layer][None], torch.tensor([slot]))


def test_a_steady_group_is_copied_in_every_step() -> None:
    steps = Steps()
    group = [steps.start(length) for length in (5, 1, 11)]
    for _ in range(40):
        steps.step(*group)
    assert steps.cache.num_gathers <= NUM_LAYERS * 10, "once, and where a copy has no room left"


def test_a_group_that_changes_reads_what_another_left() -> None:
    steps = Steps()
    first, second, third = (steps.start(length) for length in (5, 9, 2))
    steps.step(first, second)
    steps.step(second, first)
    steps.step(second)
    steps.step(first, second, third)
    steps.step(third)
    steps.step(first, second)


def test_a_sequence_that_sat_out_a_step_misses_a_token() -> None:
    steps = Steps()
    sequence, other = steps.start(5), steps.start(5)
    steps.step(sequence)
    steps.write(sequence)
    steps.step(other)
    steps.step(sequence)


def test_another_sequence_in_the_same_blocks_reads_the_first_ones_tokens() -> None:
    steps = Steps()
    first = steps.start(5)
    steps.step(first)
    second = Running(list(first.block_ids))
    for _ in first.tokens:
        steps.write(second)
    steps.step(second)


@pytest.mark.parametrize("num_tokens", [200, 1])
def test_kept_copies_take_more_than_their_share_of_the_cache(num_tokens: int) -> None:
    steps = Steps(num_blocks=128)
    group = [steps.start(num_tokens), steps.start(1)]
    contexts = steps.step(*group)
    assert isinstance(contexts, CopiedContexts) == (num_tokens == 200)
    steps.step(*group)
