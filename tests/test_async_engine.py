"""The awaited verbs: the same answers, cancellation, several loops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmrt import AsyncEngine, Engine, EngineState, RemoteCallError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def expected(tiny_model: Path) -> tuple[int, ...]:
    with Engine(tiny_model) as llm:
        return llm.generate("a", GREEDY)[0].token_ids


def test_every_verb_gives_what_the_blocking_engine_gives(
    tiny_model: Path, expected: tuple[int, ...]
) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            assert (await llm.generate("a", GREEDY))[0].token_ids == expected
            assert (await llm.submit("a", GREEDY)).token_ids == expected
            streamed = [i async for i in llm.stream("a", GREEDY)]
            assert tuple(t for i in streamed for t in i.token_ids) == expected
            assert await llm.collective_rpc(lambda worker: worker.rank) == [0]
            with pytest.raises(RemoteCallError):
                await llm.apply_model(lambda model: 1 / 0)
            assert llm.is_healthy()
        assert llm.state is EngineState.CLOSED

    asyncio.run(ask())


def test_one_engine_serves_several_loops_one_after_another(
    tiny_model: Path, expected: tuple[int, ...]
) -> None:
    llm = AsyncEngine(tiny_model)
    asyncio.run(llm.open())
    for _ in range(3):
        assert asyncio.run(_first(llm)) == expected
    asyncio.run(llm.close())


async def _first(llm: AsyncEngine) -> tuple[int, ...]:
    return (await llm.generate("a", GREEDY))[0].token_ids


def test_a_cancelled_task_aborts_its_requests(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            stream = llm.stream("a", LONG)
            await anext(stream)
            task = asyncio.create_task(_drain(stream))
            waiting = asyncio.create_task(llm.generate("b", LONG))
            del stream
            await asyncio.sleep(0)
            for cancelled in (task, waiting):
                cancelled.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)
            await llm.generate("c", GREEDY)
            assert llm.stats().num_running == llm.stats().num_waiting == 0

    asyncio.run(ask())


async def _drain(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


def test_leaving_the_loop_early_aborts_the_request(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            async for _ in llm.stream("a", LONG):
                break
            await llm.generate("c", GREEDY)
            assert llm.stats().num_running == 0

    asyncio.run(ask())


def test_cancelling_an_open_leaves_nothing(tiny_model: Path) -> None:
    async def ask() -> None:
        llm = AsyncEngine(tiny_model, tp=2)
        opening = asyncio.create_task(llm.open())
        while llm.state is EngineState.NEW:
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert llm.state in (EngineState.CLOSED, EngineState.DEAD)

    asyncio.run(ask())


def test_a_slow_consumer_gets_everything_joined(
    tiny_model: Path, expected: tuple[int, ...]
) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with AsyncEngine(tiny_model) as llm:
            stream = llm.stream("a", GREEDY)
            await llm.generate("a", LONG)  # by now the stream is over
            return [i.token_ids async for i in stream]

    assert asyncio.run(ask()) == [expected]


def test_many_streams_run_at_once(tiny_model: Path, expected: tuple[int, ...]) -> None:
    async def one(llm: AsyncEngine) -> tuple[int, ...]:
        return tuple([t async for i in llm.stream("a", GREEDY) for t in i.token_ids])

    async def ask() -> list[tuple[int, ...]]:
        async with AsyncEngine(tiny_model) as llm:
            return await asyncio.gather(*(one(llm) for _ in range(200)))

    assert set(asyncio.run(ask())) == {expected}
