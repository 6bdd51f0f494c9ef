"""A cache that is too small for all: everybody finishes, with the tokens that a large cache gives,
and in fair order."""

from __future__ import annotations

import pytest

from tests.scheduler.simulation import Simulation, make_config, make_request


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_requests", [6, 64])
def test_requests_finish_with_the_same_tokens_in_a_cache_for_one_and_a_half(
    num_requests: int, prefix_caching: bool, overlap: bool
) -> None:
    # Each needs 8 + 64 tokens: 18 blocks of 4.
    config = make_config(
        num_blocks=27, max_num_seqs=64, max_model_len=100, prefix_caching=prefix_caching
    )
    simulation = Simulation(config)
    for i in range(num_requests):
        prompt = [i % 12, i // 12, 1, 2, 3, 4, 5, 6]
        simulation.add(make_request(str(i), prompt, max_tokens=64, ignore_eos=True))
    simulation.run(overlap=overlap, max_steps=num_requests * 200)
    simulation.check_results()
    simulation.check_all_released()
    assert simulation.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_to_arrive_is_preempted_and_the_first_never(overlap: bool) -> None:
    simulation = Simulation(make_config(num_blocks=10, block_size=4, max_model_len=40))
    for i in range(3):
        simulation.add(make_request(str(i), [i, 1, 2, 3], max_tokens=30, ignore_eos=True))
    simulation.run(overlap=overlap)
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced.count(0) == 1
    assert introduced.count(2) > 1
    ends = [simulation.requests[str(i)].sequences[0].seq_id for i in range(3)]
    assert ends == [0, 1, 2]
    simulation.check_results()


def test_the_worst_priority_is_preempted_though_it_came_first() -> None:
    simulation = Simulation(make_config(num_blocks=10, block_size=4, max_model_len=40))
    simulation.add(make_request("low", [1, 1], max_tokens=30, priority=1, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("high", [2, 1], max_tokens=30, ignore_eos=True))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [0, 1, 0]
    simulation.check_results()


def test_a_preempted_sequence_comes_back_before_those_that_never_ran() -> None:
    simulation = Simulation(make_config(num_blocks=10, max_num_seqs=2, max_model_len=40))
    for i in range(4):
        simulation.add(make_request(str(i), [i, 1, 2, 3], max_tokens=30, ignore_eos=True))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced[:3] == [0, 1, 1]
    simulation.check_results()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_sampled_while_it_was_being_preempted_is_kept(overlap: bool) -> None:
    simulation = Simulation(make_config(num_blocks=10, block_size=4, max_model_len=40))
    for i in range(2):
        simulation.add(make_request(str(i), [i, 1, 2, 3], max_tokens=30, ignore_eos=True))
    simulation.run(overlap=overlap)
    again = [s for b in simulation.batches for s in b.new][2]
    sampled = [
        item
        for batch in simulation.batches
        for item in batch.scheduled
        if item.samples and item.seq_id == again.seq_id
    ]
    assert len(sampled) == 30, "no token is sampled twice"


def test_a_large_head_of_the_queue_is_not_overtaken_by_small_ones_behind_it() -> None:
    simulation = Simulation(make_config(num_blocks=16, block_size=4, max_model_len=60))
    simulation.add(make_request("running", [1] * 8, max_tokens=20, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("large", [2] * 50, max_tokens=3, ignore_eos=True))
    simulation.add(make_request("small", [3], max_tokens=3, ignore_eos=True))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [0, 1, 2]


@pytest.mark.parametrize("priority", [0, -1, -1000])
@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_starves_while_others_of_better_or_equal_priority_keep_arriving(
    priority: int, overlap: bool
) -> None:
    # Room for little more than one, so that the patient one is also a candidate for preemption.
    config = make_config(num_blocks=12, block_size=4, max_num_seqs=2, max_model_len=40)
    simulation = Simulation(config)
    simulation.add(make_request("blocker", [9], max_tokens=20, priority=priority))
    simulation.add(make_request("patient", [5, 6, 7], max_tokens=20, ignore_eos=True))
    for i in range(400):
        for k in range(2):
            prompt = [i % 12, k, 1, 2]
            simulation.add(
                make_request(f"{i}-{k}", prompt, max_tokens=20, priority=priority, ignore_eos=True)
            )
        for _ in range(4):
            if overlap and not simulation.num_in_flight:
                simulation.schedule()
            simulation.step()
        if simulation.completion("patient").finish_reason:
            break
    assert simulation.completion("patient").finish_reason == "length"
    assert simulation.scheduler.stats().num_waiting > 5, "others must still have been queueing"
    simulation.check_results()


def test_prompt_logprobs_are_reported_once_though_the_prompt_runs_twice() -> None:
    # Two tokens a step: the long prompt is still running when the other one needs its blocks.
    config = make_config(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=40)
    simulation = Simulation(config)
    simulation.add(make_request("low", range(30), max_tokens=3, priority=1, prompt_logprobs=1))
    simulation.step()
    simulation.step()
    assert simulation.collected["low", 0].logprob_positions
    simulation.add(make_request("high", [1, 2], max_tokens=30, ignore_eos=True))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [0, 1, 0]
    simulation.check_results()


def test_a_prompt_that_was_scored_is_not_scored_again_after_a_preemption() -> None:
    simulation = Simulation(make_config(num_blocks=10, block_size=4, max_model_len=40))
    simulation.add(make_request("first", [1, 2, 3], max_tokens=30, ignore_eos=True))
    scored = make_request("scored", [4, 5, 6], max_tokens=30, ignore_eos=True, prompt_logprobs=1)
    simulation.add(scored)
    simulation.run()
    introduced = [spec for batch in simulation.batches for spec in batch.new if spec.seq_id == 1]
    assert [spec.params.prompt_logprobs for spec in introduced] == [1, None]
    simulation.check_results()


def test_nobody_is_admitted_only_to_be_preempted_by_the_next_block_that_is_needed() -> None:
    simulation = Simulation(make_config(num_blocks=4, block_size=4, max_model_len=16))
    simulation.add(make_request("first", [1] * 12, max_tokens=4, ignore_eos=True))
    simulation.add(make_request("second", [2] * 3, max_tokens=4, ignore_eos=True))
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 0
    simulation.check_results()


def test_a_prompt_that_made_way_for_the_head_of_the_queue_can_still_be_preempted() -> None:
    config = make_config(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=3, max_model_len=48)
    simulation = Simulation(config)
    simulation.add(make_request("decodes", [1] * 4, max_tokens=30, ignore_eos=True))
    simulation.step()
    simulation.step()
    simulation.add(make_request("long", [2] * 28, max_tokens=2, priority=1))
    simulation.step()
    simulation.add(make_request("large", [3] * 40, max_tokens=2))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [0, 1, 2, 1]
    simulation.check_results()
