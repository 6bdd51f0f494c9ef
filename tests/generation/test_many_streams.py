"""A thousand readers of one engine, slow ones, and ones that go away."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path

import pytest

from llmrt import AsyncEngine, Increment, SamplingParams
from llmrt.async_stream import AsyncStream

pytestmark = pytest.mark.slow

NUM_STREAMS = 1000
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=3 + number % 5, ignore_eos=True)


def prompt(number: int) -> str:
    return f"{number % 10} is a number"


def token_ids(increments: list[Increment]) -> tuple[int, ...]:
    return tuple(t for i in increments for t in i.token_ids)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_a_thousand_streams_gets_anothers_tokens(tiny_model: Path) -> None:
    async def read(llm: AsyncEngine, number: int) -> tuple[int, ...]:
        return token_ids([i async for i in llm.stream(prompt(number), params(number))])

    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            expected = [await read(llm, number) for number in range(10)]
            read_by = await asyncio.gather(*(read(llm, n) for n in range(NUM_STREAMS)))
            for number, got in enumerate(read_by):
                whole = expected[number % 10]
                assert len(got) == 3 + number % 5
                assert got[: len(whole)] == whole[: len(got)]
            stats = llm.stats()
            assert stats.num_running == stats.num_waiting == 0
            assert stats.num_free_blocks == stats.num_blocks

    asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_that_are_dropped_leave_blocks_behind(tiny_model: Path) -> None:
    async def leave(llm: AsyncEngine, number: int) -> None:
        stream = llm.stream(prompt(number), LONG)
        if number % 4:
            await anext(stream)
        match number % 3:
            case 0:
                await stream.aclose()
            case 1:
                task = asyncio.create_task(_drain(stream))
                await asyncio.sleep(0)
                task.cancel()
            case _:
                del stream

    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            await asyncio.gather(*(leave(llm, number) for number in range(200)))
            gc.collect()
            await llm.generate("z", params(0))
            stats = llm.stats()
            assert stats.num_running == stats.num_waiting == 0
            assert stats.num_free_blocks == stats.num_blocks

    asyncio.run(ask())


async def _read(stream: AsyncStream) -> tuple[int, ...]:
    return token_ids([i async for i in stream])


async def _drain(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass


def test_a_reader_that_sleeps_holds_a_queue_of_increments(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            stream = llm.stream("a", SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=300))
            other = (await llm.generate("b", LONG))[0]
            assert len(other.token_ids) == 400, "a reader that sleeps holds the engine up"
            counts = Counter([i.index async for i in stream])
            assert set(counts) == {0, 1, 2}
            assert max(counts.values()) <= 2, "what nobody took was not joined"

    asyncio.run(ask())


def test_a_reader_in_a_thread_blocks_readers_elsewhere(tiny_model: Path) -> None:
    llm = AsyncEngine(tiny_model)
    asyncio.run(llm.open())
    found: list[tuple[int, ...]] = []

    async def ask() -> None:
        streams = [llm.stream("a", params(n)) for n in range(20)]
        found.append(max(await asyncio.gather(*map(_read, streams)), key=len))

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(llm.close())
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_loop_that_ended_with_its_streams_stops_the_engine(tiny_model: Path) -> None:
    llm = AsyncEngine(tiny_model)
    asyncio.run(llm.open())

    async def begin() -> None:
        streams = [llm.stream("a", LONG) for _ in range(3)]
        for stream in streams:
            await anext(stream)

    async def ask() -> tuple[int, int]:
        await llm.generate("b", params(0))
        return llm.stats().num_running, llm.stats().num_waiting

    asyncio.run(begin())
    gc.collect()
    assert asyncio.run(ask()) == (0, 0)
    asyncio.run(llm.close())


def test_functions_on_workers_disturb_streams(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model, tp=2) as llm:
            expected = (await llm.generate("a", LONG))[0].token_ids
            stream = llm.stream("a", LONG)
            received = list((await anext(stream)).token_ids)
            for _ in range(20):
                assert await llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
            async for increment in stream:
                received += increment.token_ids
            assert tuple(received) == expected

    asyncio.run(ask())
