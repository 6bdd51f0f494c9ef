"""What is refused at once, with the numbers on both sides, and where a completion ends for want of
room."""

from __future__ import annotations

import pytest

from llmrt.errors import ConfigError, RequestError
from tests.scheduler.fake_worker import Completion
from tests.scheduler.simulation import Simulation, make_config, make_request


def test_an_empty_prompt_is_refused_and_the_next_request_is_served() -> None:
    simulation = Simulation(make_config())
    with pytest.raises(RequestError, match="empty prompt"):
        simulation.add(make_request("empty", []))
    simulation.add(make_request("hi", [1, 2], max_tokens=3, ignore_eos=True))
    simulation.run()
    assert len(simulation.completion("hi").token_ids) == 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_one_below_the_limit_gets_one_token(max_tokens: int | None, overlap: bool) -> None:
    simulation = Simulation(make_config(max_model_len=20))
    simulation.add(make_request("a", [1] * 19, max_tokens=max_tokens, ignore_eos=True))
    simulation.run(overlap=overlap)
    completion = simulation.completion("a")
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


@pytest.mark.parametrize("num_prompt_tokens", [20, 21, 1000])
@pytest.mark.parametrize("max_tokens", [1, 10, None])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    num_prompt_tokens: int, max_tokens: int | None
) -> None:
    simulation = Simulation(make_config(max_model_len=20))
    with pytest.raises(RequestError, match=rf"{num_prompt_tokens} tokens.*max_model_len is 20"):
        simulation.add(make_request("a", [1] * num_prompt_tokens, max_tokens=max_tokens))
    assert not simulation.scheduler.has_unfinished


def test_an_over_long_prompt_does_not_disturb_those_around_it() -> None:
    simulation = Simulation(make_config(max_model_len=20))
    simulation.add(make_request("first", [1, 2, 3], max_tokens=5))
    with pytest.raises(RequestError):
        simulation.add(make_request("long", [1] * 30))
    simulation.add(make_request("last", [3, 2, 1], max_tokens=5))
    simulation.run()
    assert {request_id for request_id, _ in simulation.collected} == {"first", "last"}
    simulation.check_results()


def test_a_prompt_larger_than_the_cache_is_refused_and_the_short_one_behind_it_is_served() -> None:
    simulation = Simulation(make_config(num_blocks=4, block_size=4))
    with pytest.raises(RequestError, match=r"24 tokens.*KV cache holds 16 \(4 blocks of 4\)"):
        simulation.add(make_request("long", [1] * 24))
    simulation.add(make_request("short", [1, 2], max_tokens=4))
    simulation.run()
    simulation.check_results()


def test_a_prompt_that_fits_the_cache_but_not_with_its_max_tokens_ends_with_length() -> None:
    simulation = Simulation(make_config(num_blocks=4, block_size=4))
    simulation.add(make_request("a", [1] * 10, max_tokens=100, ignore_eos=True))
    simulation.run()
    completion = simulation.completion("a")
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")


@pytest.mark.parametrize(("num_prompt_tokens", "is_taken"), [(15, True), (16, False)])
def test_the_cache_must_hold_the_prompt_and_one_token(
    num_prompt_tokens: int, is_taken: bool
) -> None:
    simulation = Simulation(make_config(num_blocks=4, block_size=4))
    request = make_request("a", [1] * num_prompt_tokens, max_tokens=5)
    if is_taken:
        simulation.add(request)
        simulation.run()
        assert len(simulation.completion("a").token_ids) == 1
    else:
        with pytest.raises(RequestError, match="KV cache"):
            simulation.add(request)


def test_a_second_live_request_of_one_id_is_refused_and_the_first_unharmed() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("x", [1, 2, 3], max_tokens=5))
    simulation.step()
    with pytest.raises(RequestError, match="'x' belongs to a request that is not finished"):
        simulation.scheduler.add(make_request("x", [4, 5]))
    simulation.run()
    simulation.check_results()
    simulation.scheduler.add(make_request("x", [4, 5]))


def test_max_tokens_zero_is_over_at_once() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1, 2, 3], max_tokens=0, n=2))
    assert not simulation.scheduler.has_work
    for index in (0, 1):
        assert simulation.completion("a", index).finish_reason == "length"
    simulation.check_all_released()


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_max_tokens_zero_with_prompt_logprobs_scores_the_whole_prompt(
    num_prompt_tokens: int, n: int
) -> None:
    simulation = Simulation(make_config(max_model_len=20, max_num_batched_tokens=8))
    prompt = [1] * num_prompt_tokens
    simulation.add(make_request("a", prompt, max_tokens=0, prompt_logprobs=1, n=n))
    simulation.run()
    for index in range(n):
        assert simulation.completion("a", index) == Completion((), "length")
    assert not any(item.samples for batch in simulation.batches for item in batch.scheduled)
    positions = simulation.collected["a", 0].logprob_positions
    assert positions == list(range(1, num_prompt_tokens))
    simulation.check_all_released()


def test_a_priority_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(RequestError, match="priority must be a whole number, not 'high'"):
        make_request("a", [1], priority="high")


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=4 is below\s+max_num_seqs=8"):
        make_config(max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, not 0"):
        make_config(num_blocks=0)
