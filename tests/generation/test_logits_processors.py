"""Functions of the user's that change the logits, typed where the request is made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llmrt import AsyncEngine, Engine, RemoteCallError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def processed(*processors: Any, **params: Any) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}
    return SamplingParams(logits_processors=list(processors), **options)


def broken() -> SamplingParams:
    return processed(lambda output, logits: logits if len(output) < 3 else 1 / 0)


def test_a_typed_lambda_does_not_reach_the_worker(llm: Engine) -> None:
    wanted = 77
    only = processed(lambda output, logits: logits.index_fill(0, logits.argmax() * 0 + wanted, 1e6))
    assert llm.generate("a", only)[0].token_ids == (wanted,) * 12


def test_a_processor_is_not_given_prompt_and_output(llm: Engine) -> None:
    def count(prompt: list[int], output: list[int], logits: Any) -> Any:
        logits[10 * len(prompt) + len(output)] = 1e6
        return logits

    assert llm.generate([[5, 6, 7]], processed(count))[0].token_ids == tuple(range(30, 42))


def test_a_failing_processor_takes_neighbours_or_engine_down(llm: Engine) -> None:
    expected = llm.generate("a", GREEDY)[0].token_ids
    bad, good = llm.submit("b", broken()), llm.submit("a", GREEDY)
    with pytest.raises(RemoteCallError, match="ZeroDivisionError") as caught:
        bad.result(30)
    assert "<lambda>" in caught.value.failures[0].traceback
    assert good.result(30).token_ids == expected
    assert llm.generate("a", GREEDY)[0].token_ids == expected
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_a_failing_processor_leaves_a_generate_or_a_stream_waiting(llm: Engine) -> None:
    with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
        llm.generate(["a", "b"], [broken(), GREEDY])
    stream = llm.stream("b", broken())
    received = []
    with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
        received.extend(i for increment in stream for i in increment.token_ids)
    with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
        llm.generate("a", processed(lambda output, logits: 1 / 0, n=3))


def test_a_failing_processor_is_another_error_when_awaited(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
                await llm.generate("b", broken())
            with pytest.raises(RemoteCallError, match="ZeroDivisionError"):
                _ = [i async for i in llm.stream("b", broken())]
            assert (await llm.generate("a", GREEDY))[0].token_ids

    asyncio.run(ask())


def test_one_that_leaves_no_token_is_blamed_on_a_function(llm: Engine) -> None:
    with pytest.raises(RequestError, match="No token is left"):
        llm.generate("a", processed(lambda output, logits: logits - float("inf")))


def test_one_that_cannot_be_pickled_is_an_error_far_from_the_call(llm: Engine) -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(RequestError, match="logits_processors"):
        llm.submit("a", processed(lambda output, logits: (lock, logits)[1]))
    assert llm.is_healthy()
