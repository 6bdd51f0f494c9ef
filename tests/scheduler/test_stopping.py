"""Which token ends a completion, and with which reasons."""

from __future__ import annotations

import pytest

from llmrt.messages import BatchResult, SampledToken
from llmrt.scheduler.request import Request
from llmrt.scheduler.scheduler import Scheduler
from llmrt.scheduler.updates import SequenceFailed, TokenUpdate
from tests.scheduler.simulation import EOS, Simulation, make_config, make_request


def feed(request: Request, tokens: list[int]) -> list[TokenUpdate]:
    """Let a worker that wants exactly *tokens* generate until the request ends."""
    scheduler = Scheduler(make_config())
    scheduler.add(request)
    reported: list[TokenUpdate] = []
    for token_id in tokens:
        batch = scheduler.schedule()
        if batch is None:
            break
        (item,) = batch.scheduled
        sampled = SampledToken(seq_id=item.seq_id, token_id=token_id)
        reported.extend(scheduler.update(BatchResult(step=batch.step, tokens=(sampled,))))
    scheduler.check_invariants()
    return reported


def test_eos_ends_it_and_is_reported() -> None:
    last = feed(make_request("a", [1, 2]), [5, EOS, 5])[-1]
    assert (last.token_id, last.finish_reason, last.stop_reason) == (EOS, "stop", None)


def test_any_of_several_eos_ids_ends_it() -> None:
    for eos in (2, 7):
        request = make_request("a", [1])
        request = Request(
            request_id="a",
            prompt_token_ids=(1,),
            params=request.params,
            seed=0,
            eos_token_ids=(2, 7),
        )
        assert feed(request, [5, eos])[-1].finish_reason == "stop"


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    updates = feed(make_request("a", [1], ignore_eos=True, max_tokens=3), [EOS, EOS, EOS])
    assert [u.finish_reason for u in updates] == [None, None, "length"]


def test_a_stop_id_ends_it_and_is_the_stop_reason() -> None:
    last = feed(make_request("a", [1], stop_token_ids=[9]), [5, 9])[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", 9)


def test_an_ignored_eos_can_still_be_a_stop_id() -> None:
    last = feed(make_request("a", [1], ignore_eos=True, stop_token_ids=[EOS]), [5, EOS])[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", EOS)


def test_eos_comes_before_a_stop_id_of_the_same_number() -> None:
    last = feed(make_request("a", [1], stop_token_ids=[EOS]), [5, EOS])[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)


@pytest.mark.parametrize("ends", [{"stop_token_ids": [9]}, {}])
def test_neither_eos_nor_a_stop_id_counts_before_min_tokens(ends: dict[str, object]) -> None:
    token_id = 9 if ends else EOS
    updates = feed(make_request("a", [1], min_tokens=3, **ends), [token_id] * 6)
    assert [u.finish_reason for u in updates] == [None, None, None, "stop"]


def test_an_end_on_the_last_token_allowed_is_a_stop_not_a_length() -> None:
    assert feed(make_request("a", [1], max_tokens=2), [5, EOS])[-1].finish_reason == "stop"
    assert feed(make_request("a", [1], max_tokens=2), [5, 5])[-1].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_one_sequence_and_nothing_more_is_reported_of_it(overlap: bool) -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("a", [1, 2, 3], max_tokens=30, ignore_eos=True, n=2))
    for _ in range(3):
        simulation.step()
    if overlap:
        simulation.schedule()
    before = simulation.completion("a", 0).token_ids
    simulation.finish("a", 0, "END")
    simulation.run(overlap=overlap)
    completion = simulation.completion("a", 0)
    assert completion.token_ids == before
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert len(simulation.completion("a", 1).token_ids) == 30
    assert not simulation.scheduler.finish(0, "again")
    simulation.check_all_released()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_sampled_after_a_late_eos_is_dropped(overlap: bool) -> None:
    simulation = Simulation(make_config())
    for i in range(6):
        simulation.add(make_request(str(i), [i, 2, 3], max_tokens=60))
    simulation.run(overlap=overlap)
    assert any(simulation.completion(str(i)).finish_reason == "stop" for i in range(6))
    simulation.check_results()
    simulation.check_all_released()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_logits_processor_ends_its_sequence_alone(overlap: bool) -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("bad", [1, 2], fails_after=2, max_tokens=9, ignore_eos=True))
    simulation.add(make_request("good", [2, 1], max_tokens=9, ignore_eos=True))
    failures: list[SequenceFailed] = []
    while simulation.scheduler.has_work:
        if overlap and simulation.num_in_flight == 0:
            simulation.schedule()
        failures.extend(u for u in simulation.step() if isinstance(u, SequenceFailed))
    assert [f.failure.type_name for f in failures] == ["ValueError"]
    assert len(simulation.completion("bad").token_ids) == 2
    assert len(simulation.completion("good").token_ids) == 9
    simulation.check_all_released()
