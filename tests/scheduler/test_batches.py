"""What a step consists of: decodes and chunks of prompts within the budget, and what the workers
are told."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from llmrt.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import Simulation, make_config, make_request


def test_nothing_to_do_is_no_batch() -> None:
    simulation = Simulation(make_config())
    assert simulation.schedule() is None
    assert not simulation.scheduler.has_work


def test_a_long_prompt_runs_in_chunks_of_the_budget_and_samples_after_the_last() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=8))
    simulation.add(make_request("a", range(20), max_tokens=1))
    simulation.run()
    chunks = [(s.start, s.num_tokens, s.samples) for b in simulation.batches for s in b.scheduled]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_chunks_of_one_prompt_do_not_wait_for_each_other_s_results() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=8))
    simulation.add(make_request("a", range(20), max_tokens=1))
    first, second = simulation.schedule(), simulation.schedule()
    assert first is not None
    assert second is not None
    assert second.scheduled[0].start == 8


def test_decodes_come_first_and_a_prompt_takes_the_rest_of_the_budget() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=10))
    for i in range(3):
        simulation.add(make_request(str(i), [i], max_tokens=20, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("long", range(30), max_tokens=5))
    simulation.step()
    assert [s.num_tokens for s in simulation.batches[-1].scheduled] == [1, 1, 1, 7]


def test_a_prompt_ahead_of_decodes_leaves_a_token_for_each_of_them() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=8, max_num_seqs=8))
    for i in range(4):
        simulation.add(make_request(str(i), [i], max_tokens=20, ignore_eos=True))
    simulation.step()
    simulation.add(make_request("first", range(30), max_tokens=5, priority=-1))
    for _ in range(3):
        simulation.step()
        assert [s.num_tokens for s in simulation.batches[-1].scheduled] == [1, 1, 1, 1, 4]


def test_a_better_priority_does_not_wait_until_a_long_prompt_has_run() -> None:
    simulation = Simulation(make_config(max_num_batched_tokens=8))
    simulation.add(make_request("long", range(40), max_tokens=2, priority=5))
    simulation.step()
    simulation.add(make_request("urgent", [7] * 9, max_tokens=2))
    steps = [simulation.schedule(), simulation.schedule()]
    chunks = [[(s.seq_id, s.num_tokens) for s in b.scheduled] for b in steps if b]
    assert chunks == [[(1, 7), (0, 1)], [(1, 2), (0, 6)]]
    simulation.run()
    simulation.check_results()


def test_a_sequence_whose_token_is_still_in_the_workers_decodes_on() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1, 2, 3], max_tokens=4, ignore_eos=True))
    simulation.schedule()
    batch = simulation.schedule()
    assert batch is not None
    assert [(s.start, s.num_tokens, s.samples) for s in batch.scheduled] == [(3, 1, True)]


def test_the_last_token_of_a_length_limit_is_foreseen_and_no_step_wasted_on_it() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1, 2, 3], max_tokens=2, ignore_eos=True))
    assert simulation.schedule() is not None
    assert simulation.schedule() is not None
    simulation.update()
    assert simulation.schedule() is None
    simulation.update()
    assert len(simulation.completion("a").token_ids) == 2
    assert len(simulation.batches) == 2


def test_no_more_than_max_num_seqs_run_and_the_others_follow_in_order_of_arrival() -> None:
    simulation = Simulation(make_config(max_num_seqs=2))
    for i in range(5):
        simulation.add(make_request(str(i), [i, 1], max_tokens=3, ignore_eos=True))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [0, 1, 2, 3, 4]
    assert max(len(b.scheduled) for b in simulation.batches) == 2
    simulation.check_results()


def test_better_priorities_are_admitted_first() -> None:
    simulation = Simulation(make_config(max_num_seqs=1))
    for i, priority in enumerate([5, 0, -3, 0]):
        simulation.add(make_request(str(i), [i, 1], max_tokens=2, priority=priority))
    simulation.run()
    introduced = [spec.seq_id for batch in simulation.batches for spec in batch.new]
    assert introduced == [2, 1, 3, 0]


def test_workers_forget_what_is_finished_with_the_next_step() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1], max_tokens=1))
    simulation.run()
    simulation.add(make_request("b", [1], max_tokens=1))
    batch = simulation.schedule()
    assert batch is not None
    assert batch.finished == (0,)
    assert simulation.worker.known_sequences == {1}


def test_each_completion_has_its_own_seed_and_only_the_first_scores_the_prompt() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1, 2], n=3, seed=40, max_tokens=2, prompt_logprobs=1))
    simulation.run()
    specs = sorted((s for b in simulation.batches for s in b.new), key=lambda s: s.seq_id)
    assert [s.seed for s in specs] == [40, 41, 42]
    assert [s.params.prompt_logprobs for s in specs] == [1, None, None]


def test_workers_are_told_the_ends_that_min_tokens_keeps_out() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1], max_tokens=1))
    simulation.add(make_request("b", [1], max_tokens=1, ignore_eos=True))
    batch = simulation.schedule()
    assert batch is not None
    assert [s.eos_token_ids for s in batch.new] == [(0,), ()]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_is_gone_at_the_next_step_with_all_its_sequences(overlap: bool) -> None:
    simulation = Simulation(make_config(max_num_seqs=4))
    simulation.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=50, n=3, ignore_eos=True))
    simulation.add(make_request("queued", range(9), max_tokens=5, n=2))
    for _ in range(2):
        simulation.step()
    if overlap:
        simulation.schedule()
    simulation.abort("a")
    simulation.abort("queued")
    while simulation.num_in_flight:
        simulation.update()
    assert simulation.schedule() is None
    simulation.check_all_released()
    assert not simulation.scheduler.abort("a")


def test_an_aborted_request_that_waited_is_never_prefilled() -> None:
    simulation = Simulation(make_config(max_num_seqs=1))
    simulation.add(make_request("a", [1, 2], max_tokens=4, ignore_eos=True))
    simulation.add(make_request("b", [3, 4], max_tokens=4))
    simulation.step()
    simulation.abort("b")
    simulation.run()
    assert [s.seq_id for b in simulation.batches for s in b.new] == [0]


def test_stats_count_tokens_requests_and_blocks() -> None:
    simulation = Simulation(make_config(max_num_seqs=1, block_size=4))
    simulation.add(make_request("a", [1] * 9, max_tokens=3, ignore_eos=True))
    simulation.add(make_request("b", [1] * 9, max_tokens=3, ignore_eos=True))
    simulation.step()
    stats = simulation.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_blocks, stats.num_free_blocks) == (64, 61)
    simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (18, 8)
    assert (stats.num_generated_tokens, stats.num_preemptions) == (6, 0)


def test_a_step_costs_the_same_however_many_requests_wait() -> None:
    def calls_per_step(num_waiting: int) -> int:
        simulation = Simulation(make_config(max_num_seqs=4))
        for i in range(4 + num_waiting):
            request = make_request(str(i), [i % 7, 1], max_tokens=50, priority=i % 3)
            simulation.scheduler.add(request)
        for _ in range(3):
            batch = simulation.scheduler.schedule()
            assert batch is not None
            simulation.scheduler.update(simulation.worker.execute(batch))
        return _count_calls(simulation.scheduler)

    assert calls_per_step(10_000) <= calls_per_step(10) + 5


def _count_calls(scheduler: Scheduler) -> int:
    """Return how many functions, Python's or C's, a call of `schedule` calls."""
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        scheduler.schedule()
    finally:
        sys.setprofile(None)
    return num_calls
