"""The engine as its user holds it, on a tiny random model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401 - the in-process backend imports it, and its threads stay

from llmrt import (
    Engine,
    EngineClosedError,
    EngineNotOpenError,
    EngineState,
    RemoteCallError,
    RequestError,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The capital", "a", "Once upon a time there was", "0123456789" * 6]


@pytest.fixture(params=["mp", pytest.param("inprocess", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, backend=request.param) as engine:
        yield engine


@pytest.fixture
def llm_of_two(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, tp=2) as engine:
        yield engine


# ---- options ----


@pytest.mark.parametrize(
    ("option", "suggestion"),
    [
        ("tensor_parallel_size", "'tp'"),
        ("gpu_memory_utilization", "'gpu_memory_fraction'"),
        ("distributed_executor_backend", "'backend'"),
        ("max_num_seq", "'max_num_seqs'"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(option: str, suggestion: str) -> None:
    with pytest.raises(TypeError, match=suggestion):
        Engine("m", **{option: 2})


def test_an_option_without_any_likeness_lists_all() -> None:
    with pytest.raises(TypeError, match="It has: model, tp, "):
        Engine("m", zzzzzz=2)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 0},
        {"tp": True},
        {"tp": 1.5},
        {"dtype": "int8"},
        {"backend": "threads"},
        {"start_method": "forkserver"},
        {"gpu_memory_fraction": 0},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        {"backend": "inprocess", "tp": 2},
    ],
)
def test_an_impossible_option_is_a_value_error(
    options: dict[str, object], tiny_model: Path
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Engine(tiny_model, **options).open()  # type: ignore[arg-type]


def test_a_split_over_more_ranks_than_heads_names_the_limit(tiny_model: Path) -> None:
    engine = Engine(tiny_model, tp=5)
    with pytest.raises(ValueError, match="4"):
        engine.open()
    assert engine.workers == ()


@pytest.mark.parametrize("name", ["/no/such/model", "./nowhere", "x/../y.gguf"])
def test_a_missing_model_is_one_error_that_names_it(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Engine(name).open()


# ---- life ----


def test_a_verb_before_open_says_how_to_open(tiny_model: Path) -> None:
    with pytest.raises(EngineNotOpenError, match=r"with Engine\(\.\.\.\)"):
        Engine(tiny_model).generate("a")


def test_a_verb_after_close_says_that_it_is_closed(tiny_model: Path) -> None:
    engine = Engine(tiny_model).open()
    engine.close()
    with pytest.raises(EngineClosedError, match="open it again"):
        engine.generate("a")


def test_close_reports_every_rank_and_may_be_called_twice(tiny_model: Path) -> None:
    engine = Engine(tiny_model, tp=2).open()
    pids = [worker.pid for worker in engine.workers]
    report = engine.close()
    assert [worker.pid for worker in report.workers] == pids
    assert [worker.ended_by for worker in report.workers] == ["asked", "asked"]
    assert all(worker.group_destroyed for worker in report.workers)
    assert engine.close() == report


def test_states_follow_the_life_of_an_engine(tiny_model: Path) -> None:
    engine = Engine(tiny_model)
    assert engine.state is EngineState.NEW
    with engine:
        assert engine.state is EngineState.RUNNING
        assert engine.is_healthy()
    assert engine.state is EngineState.CLOSED
    assert not engine.is_healthy()


def test_a_closed_engine_opens_again(tiny_model: Path) -> None:
    engine = Engine(tiny_model)
    with engine:
        first = engine.generate("a", GREEDY)[0].token_ids
    with engine:
        assert engine.generate("a", GREEDY)[0].token_ids == first
        assert engine.restart() is engine
        assert engine.generate("a", GREEDY)[0].token_ids == first


def test_engines_of_any_kind_follow_each_other(tiny_model: Path, other_tiny_model: Path) -> None:
    answers = set()
    for model, tp in [(tiny_model, 2), (other_tiny_model, 2), (tiny_model, 1), (tiny_model, 4)]:
        with Engine(model, tp=tp) as engine:
            answers.add((model, engine.generate("a", GREEDY)[0].token_ids))
    assert len(answers) == 2


def test_two_engines_live_side_by_side(tiny_model: Path, other_tiny_model: Path) -> None:
    with Engine(tiny_model, tp=2) as one, Engine(other_tiny_model) as two:
        first = one.generate(PROMPTS, GREEDY)
        two.generate(PROMPTS, GREEDY)
        two.close()
        assert [o.token_ids for o in one.generate(PROMPTS, GREEDY)] == [o.token_ids for o in first]


# ---- generation ----


def test_a_batch_equals_its_prompts_alone(llm: Engine) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.prompt for o in together] == PROMPTS
    assert all(o.finished for o in together)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_split_gives_the_same_tokens(tiny_model: Path, tp: int) -> None:
    with Engine(tiny_model) as whole:
        expected = [o.token_ids for o in whole.generate(PROMPTS, GREEDY)]
    with Engine(tiny_model, tp=tp) as split:
        assert [o.token_ids for o in split.generate(PROMPTS, GREEDY)] == expected


def test_no_prompts_give_no_outputs(llm: Engine) -> None:
    assert llm.generate([]) == []


def test_an_empty_prompt_is_refused_and_the_engine_goes_on(llm: Engine) -> None:
    for prompts in (["", "hi"], [[]], ""):
        with pytest.raises(RequestError, match="empty"):
            llm.generate(prompts, GREEDY)
    assert llm.generate("hi", GREEDY)[0].text


def test_a_prompt_that_is_too_long_names_both_numbers(llm: Engine) -> None:
    with pytest.raises(RequestError, match=r"513 tokens.*512"):
        llm.generate([[5] * 513], GREEDY)
    assert len(llm.generate([[5] * 511], GREEDY)[0].token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([10**9], GREEDY),
        ([-1], GREEDY),
        ("a", SamplingParams(stop_token_ids=[10**9], min_tokens=1)),
        ("a", SamplingParams(allowed_token_ids=[10**9])),
        ("a", SamplingParams(logit_bias={10**9: 1.0})),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused(
    llm: Engine, prompt: object, params: SamplingParams
) -> None:
    with pytest.raises(RequestError, match=r"10{9}|-1"):
        llm.generate([prompt], params)  # type: ignore[list-item]
    assert llm.is_healthy()


def test_a_wrong_number_of_parameters_is_refused(llm: Engine) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_the_joined_stream_equals_the_whole(llm: Engine) -> None:
    whole = llm.generate(PROMPTS[2], GREEDY)[0]
    parts = list(llm.stream(PROMPTS[2], GREEDY))
    assert "".join(part.text for part in parts) == whole.text
    assert tuple(i for part in parts for i in part.token_ids) == whole.token_ids
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_a_dropped_stream_gives_its_blocks_back(llm: Engine) -> None:
    free = llm.stats().num_free_blocks
    stream = llm.stream("a", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    del stream
    llm.generate("b", GREEDY)  # a later request: by then the first one is gone
    assert llm.stats().num_running == 0
    assert llm.stats().num_free_blocks == free


def test_a_stop_string_ends_the_text_before_it(llm: Engine) -> None:
    whole = llm.generate("a", GREEDY)[0].text
    stop = whole[3:6]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    output = llm.generate("a", params)[0].outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_cancelled_future_frees_its_request(llm: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    future = llm.submit("a", long)
    assert future.cancel()
    llm.generate("b", GREEDY)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_a_second_live_request_id_is_refused(llm: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first = llm.submit("a", long, request_id="x")
    second = llm.submit("a", long, request_id="x")
    with pytest.raises(RequestError, match="'x'"):
        second.result(30)
    assert len(first.result(30).token_ids) == 100


def test_a_seed_repeats_and_other_seeds_differ(llm: Engine) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        return llm.generate("a", params)[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_n_completions_come_in_order_and_differ(llm: Engine) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    outputs = llm.generate("a", params)[0].outputs
    assert [o.index for o in outputs] == [0, 1, 2]
    assert len({o.token_ids for o in outputs}) == 3


def test_chat_uses_the_template_of_the_model(llm: Engine) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert output.prompt == "<|user|>hi<|end|><|assistant|>"
    streamed = "".join(i.text for i in llm.stream([{"role": "user", "content": "hi"}], GREEDY))
    assert streamed == output.text


def test_every_thread_gets_its_own_answer(llm: Engine) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS}
    wrong: list[str] = []

    def ask(prompt: str) -> None:
        for _ in range(5):
            if llm.generate(prompt, GREEDY)[0].token_ids != expected[prompt]:
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_blocking_verb_works_inside_a_running_loop(llm: Engine) -> None:
    async def ask() -> int:
        return len(llm.generate("a", GREEDY)[0].token_ids)

    assert asyncio.run(ask()) == 12


# ---- workers ----


def test_a_function_runs_on_every_rank_and_answers_by_rank(llm_of_two: Engine) -> None:
    factor = 10
    assert llm_of_two.collective_rpc(lambda worker, x: worker.rank * factor + x, 3) == [3, 13]
    assert llm_of_two.apply_model(lambda model: type(model).__name__)[0]


def test_a_function_that_raises_leaves_the_engine_alive(llm_of_two: Engine) -> None:
    def fail(worker: object) -> None:
        if worker.rank == 1:  # type: ignore[attr-defined]
            raise LookupError("no such thing")

    with pytest.raises(RemoteCallError, match="rank 1: LookupError: no such thing") as caught:
        llm_of_two.collective_rpc(fail)
    assert [f.rank for f in caught.value.failures] == [1]
    assert "in fail" in caught.value.failures[0].traceback
    assert llm_of_two.generate("a", GREEDY)[0].token_ids


def test_a_call_that_takes_too_long_times_out_and_the_next_answer_is_its_own(
    llm_of_two: Engine, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def wait_for(worker: object, path: str) -> str:
        import os
        import time

        while not os.path.exists(path):
            time.sleep(0.01)
        return "late"

    with pytest.raises(TimeoutError):
        llm_of_two.collective_rpc(wait_for, str(gate), timeout=0.2)
    gate.touch()
    assert llm_of_two.collective_rpc(lambda worker: "mine") == ["mine", "mine"]


def test_workers_tell_who_and_where_they_are(llm_of_two: Engine) -> None:
    assert [worker.rank for worker in llm_of_two.workers] == [0, 1]
    assert {worker.state for worker in llm_of_two.workers} == {"running"}
    assert {worker.device for worker in llm_of_two.workers} == {"cpu"}
    pids = llm_of_two.collective_rpc(lambda worker: __import__("os").getpid())
    assert pids == [worker.pid for worker in llm_of_two.workers]
