"""A common beginning is computed once, and sharing it never changes a token."""

from __future__ import annotations

import pytest

from tests.scheduler.simulation import Simulation, make_config, make_request

PROMPT = list(range(12)) * 2


def run_one(simulation: Simulation, request_id: str, prompt: list[int], **params: object) -> int:
    """Run a request to its end, and return how many of its prompt tokens were cached."""
    request = simulation.add(make_request(request_id, prompt, **params))
    simulation.run()
    simulation.check_results()
    return request.num_cached_tokens


def test_a_repeated_prompt_is_cached_but_for_its_last_block() -> None:
    simulation = Simulation(make_config(block_size=4))
    assert run_one(simulation, "first", PROMPT) == 0
    assert run_one(simulation, "again", PROMPT) == 20
    assert simulation.completion("first") == simulation.completion("again")


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (24, 20)])
def test_the_last_token_of_a_prompt_is_always_run(length: int, cached: int) -> None:
    simulation = Simulation(make_config(block_size=4))
    run_one(simulation, "first", PROMPT)
    assert run_one(simulation, "beginning", PROMPT[:length]) == cached


def test_an_extension_finds_the_blocks_of_prompt_and_answer() -> None:
    simulation = Simulation(make_config(block_size=4))
    run_one(simulation, "turn 1", PROMPT, max_tokens=9, ignore_eos=True)
    answer = list(simulation.completion("turn 1").token_ids)
    # The last token of the answer was never run: 24 + 8 tokens are in the cache.
    assert run_one(simulation, "turn 2", [*PROMPT, *answer, 1, 2, 3]) == 32


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    simulation = Simulation(make_config(block_size=4))
    run_one(simulation, "first", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run_one(simulation, "other", [4, 3, 2, 1, 5, 6, 7, 8, 9]) == 0
    assert run_one(simulation, "shifted", [5, 6, 7, 8, 5, 6, 7, 8, 9]) == 0


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    simulation = Simulation(make_config(prefix_caching=False))
    run_one(simulation, "first", PROMPT)
    assert run_one(simulation, "again", PROMPT) == 0
    simulation.add(make_request("many", PROMPT, n=3, max_tokens=4))
    batch = simulation.schedule()
    assert batch is not None
    assert len(batch.new) == 3, "nobody waits for another"


@pytest.mark.parametrize("overlap", [False, True])
def test_completions_of_one_prompt_share_its_blocks(overlap: bool) -> None:
    simulation = Simulation(make_config(block_size=4))
    simulation.add(make_request("a", PROMPT, n=4, max_tokens=8, ignore_eos=True))
    simulation.run(overlap=overlap)
    simulation.check_results()
    # 24 tokens once, then 4 each for the other three; 7 tokens of each answer are run.
    assert simulation.worker.num_run_tokens == 24 + 3 * 4 + 4 * 7


def test_completions_of_a_prompt_without_a_full_block_start_together() -> None:
    simulation = Simulation(make_config(block_size=16))
    simulation.add(make_request("a", [1, 2, 3], n=4, max_tokens=4))
    batch = simulation.schedule()
    assert batch is not None
    assert len(batch.scheduled) == 4


def test_requests_that_arrive_together_compute_their_common_beginning_once() -> None:
    simulation = Simulation(make_config(block_size=4, max_num_batched_tokens=16))
    for i in range(8):
        simulation.add(make_request(str(i), [*PROMPT, i], max_tokens=2, ignore_eos=True))
    simulation.run()
    simulation.check_results()
    assert simulation.worker.num_run_tokens == 24 + 8 + 8


def simulate_waiting() -> Simulation:
    """Return one in which "first" computes what "second" waits for, with a token left to spare.

    Whoever is about to end is kept a token that it does not need.
    """
    simulation = Simulation(make_config(block_size=4, max_num_batched_tokens=16))
    simulation.add(make_request("ending", [7], max_tokens=2, ignore_eos=True, priority=1))
    simulation.step()
    simulation.add(make_request("first", PROMPT * 2, max_tokens=20, ignore_eos=True))
    simulation.add(make_request("second", PROMPT * 2, max_tokens=2))
    simulation.schedule()
    return simulation


def test_an_unrelated_request_is_not_held_up_by_those_that_wait_for_a_prefix() -> None:
    simulation = simulate_waiting()
    simulation.add(make_request("other", [5, 5, 5], max_tokens=2))
    batch = simulation.schedule()
    assert batch is not None
    assert [(s.seq_id, s.num_tokens) for s in batch.scheduled] == [(1, 15), (3, 1)]
    simulation.run()
    simulation.check_results()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_aborted(overlap: bool) -> None:
    simulation = simulate_waiting()
    batch = simulation.schedule()
    assert batch is not None
    assert [s.seq_id for s in batch.scheduled] == [1]
    if not overlap:
        simulation.update()
        simulation.update()
    simulation.abort("first")
    simulation.run(overlap=overlap)
    simulation.check_results()
    assert simulation.completion("second").finish_reason is not None


def test_an_aborted_request_that_waits_for_a_prefix_is_not_woken() -> None:
    simulation = simulate_waiting()
    simulation.schedule()
    assert simulation.scheduler.stats().num_waiting == 1
    simulation.abort("second")
    assert simulation.scheduler.stats().num_waiting == 0
    simulation.run()
    assert [spec.seq_id for b in simulation.batches for spec in b.new] == [0, 1]


def test_a_better_priority_does_not_wait_for_a_worse_one_s_prefix() -> None:
    simulation = Simulation(make_config(block_size=4, max_num_batched_tokens=16))
    simulation.add(make_request("low", PROMPT, max_tokens=2, priority=1))
    simulation.schedule()
    simulation.add(make_request("high", PROMPT, max_tokens=2))
    simulation.update()
    batch = simulation.schedule()
    assert batch is not None
    assert 1 in [spec.seq_id for spec in batch.new]


def test_blocks_are_shared_with_the_step_that_fills_them_and_the_next() -> None:
    simulation = Simulation(make_config(block_size=4))
    simulation.add(make_request("first", PROMPT, max_tokens=4))
    simulation.add(make_request("same step", PROMPT, max_tokens=4))
    batch = simulation.schedule()
    assert batch is not None
    assert [(s.seq_id, s.start) for s in batch.scheduled] == [(0, 0), (1, 20)]
    request = simulation.add(make_request("next step", PROMPT, max_tokens=4))
    simulation.schedule()
    assert request.num_cached_tokens == 20
    simulation.run()
    simulation.check_results()


def test_prompt_logprobs_run_the_whole_prompt_though_it_is_cached() -> None:
    simulation = Simulation(make_config(block_size=4))
    run_one(simulation, "first", PROMPT)
    assert run_one(simulation, "scored", PROMPT, prompt_logprobs=1) == 0
    assert run_one(simulation, "many", PROMPT, prompt_logprobs=1, n=2) == 0


def test_the_least_recently_used_blocks_are_given_up_first() -> None:
    simulation = Simulation(make_config(num_blocks=8, block_size=4))
    old, new = [1] * 9, [2] * 9
    run_one(simulation, "old", old, max_tokens=1)
    run_one(simulation, "new", new, max_tokens=1)
    run_one(simulation, "old again", old, max_tokens=1)
    run_one(simulation, "large", [3] * 18, max_tokens=1)
    assert run_one(simulation, "is old there", old, max_tokens=1) == 8
    assert run_one(simulation, "is new there", new, max_tokens=1) < 8


def test_a_reset_forgets_every_prefix() -> None:
    simulation = Simulation(make_config(block_size=4))
    run_one(simulation, "first", PROMPT)
    simulation.scheduler.reset_prefix_cache()
    assert run_one(simulation, "again", PROMPT) == 0


def test_what_runs_through_a_reset_is_not_cached_afterwards() -> None:
    simulation = Simulation(make_config(block_size=4, max_num_batched_tokens=8))
    simulation.add(make_request("old", PROMPT, max_tokens=9, ignore_eos=True))
    simulation.step()
    simulation.scheduler.reset_prefix_cache()
    simulation.run()
    # Were the later blocks of the old one there, they would be found behind these.
    run_one(simulation, "beginning", PROMPT[:9])
    assert run_one(simulation, "whole", PROMPT) == 8


def test_a_reset_wakes_who_waits_for_a_prefix() -> None:
    simulation = simulate_waiting()
    simulation.schedule()
    simulation.scheduler.reset_prefix_cache()
    simulation.run()
    simulation.check_results()
    batch = next(b for b in simulation.batches if 2 in [spec.seq_id for spec in b.new])
    assert [(s.seq_id, s.start) for s in batch.scheduled] == [(1, 46), (2, 0)]


def test_a_salt_keeps_the_hashes_of_two_engines_apart() -> None:
    one, two = (Simulation(make_config(cache_salt=salt)) for salt in (b"one", b"two"))
    hashes: list[list[bytes]] = []
    for simulation in (one, two):
        request = simulation.add(make_request("a", PROMPT, max_tokens=2))
        simulation.schedule()
        hashes.append(list(request.sequences[0].block_hashes))
    assert hashes[0]
    assert not set(hashes[0]) & set(hashes[1])


def test_preempted_work_is_found_in_the_cache_again_while_it_is_there() -> None:
    simulation = Simulation(make_config(num_blocks=12, block_size=4, max_model_len=48))
    for i in range(2):
        simulation.add(make_request(str(i), [i] * 8, max_tokens=32, ignore_eos=True))
    simulation.run()
    simulation.check_results()
    again = next(b for b in simulation.batches if any(s.seq_id == 1 for s in b.new) and b.step)
    (item,) = [s for s in again.scheduled if s.seq_id == 1]
    assert item.start > 0
