"""What nobody waits for any more is not computed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrt import AsyncEngine, Engine, EngineClosedError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=1, max_tokens=400, ignore_eos=True)
THREE = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def narrow(tiny_model: Path) -> Iterator[Engine]:
    """An engine with four seats."""
    with Engine(tiny_model, max_num_seqs=4) as engine:
        yield engine


def settled(llm: Engine) -> bool:
    """Let a short request pass, and return whether it found and left nothing else."""
    llm.generate("zzz", GREEDY)
    stats = llm.stats()
    return stats.num_running == stats.num_waiting == 0 and (
        stats.num_free_blocks == stats.num_blocks
    )


@pytest.mark.parametrize("how", ["break", "del", "close", "with"])
def test_a_dropped_stream_of_three_completions_runs_on(narrow: Engine, how: str) -> None:
    stream = narrow.stream("a", THREE)
    for number, _ in enumerate(stream):
        if number == 2:
            break
    match how:
        case "close":
            stream.close()
            assert not any(i.finish_reason for i in stream), "it went on to its end"
        case "with":
            with stream:
                pass
        case _:
            del stream
            gc.collect()
    assert settled(narrow)


def test_a_request_dropped_in_the_queue_is_prefilled(narrow: Engine) -> None:
    running = [narrow.stream("a", LONG) for _ in range(4)]
    for stream in running:
        next(stream)
    before = narrow.stats().num_prompt_tokens
    queued = [narrow.stream("q" * 50, LONG) for _ in range(3)]
    futures = [narrow.submit("q" * 50, LONG) for _ in range(3)]
    del queued
    for future in futures:
        assert future.cancel()
    del running, stream
    assert settled(narrow)
    assert narrow.stats().num_prompt_tokens - before == 3, "only the last short request ran"


def test_an_interrupted_generate_leaves_its_prompts_running(narrow: Engine) -> None:
    import _thread
    import threading

    stream = narrow.stream("a", LONG)
    next(stream)
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        narrow.generate(["a", "b"] * 200, LONG)
    timer.join()
    del stream
    assert settled(narrow)


def test_closing_leaves_readers_waiting_or_raises_elsewhere(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def ask() -> list[BaseException | None]:
        llm = await AsyncEngine(tiny_model).open()
        streams = [llm.stream("a", LONG) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        reading = [asyncio.create_task(_read(stream)) for stream in streams]
        waiting = asyncio.ensure_future(llm.submit("b", LONG))
        await asyncio.sleep(0)
        await llm.close()
        return [
            *await asyncio.gather(*reading),
            (await asyncio.gather(waiting, return_exceptions=True))[0],
        ]

    errors = asyncio.run(ask())
    assert [type(error) for error in errors] == [EngineClosedError] * 5
    assert "Traceback" not in capfd.readouterr().err


async def _read(stream: object) -> BaseException | None:
    try:
        async for _ in stream:  # type: ignore[attr-defined]
            pass
    except EngineClosedError as error:
        with pytest.raises(EngineClosedError):  # and again, whoever asks again
            await anext(stream)  # type: ignore[call-overload]
        return error
    return None


def test_a_stream_dropped_in_a_callback_of_its_engine_deadlocks(narrow: Engine) -> None:
    streams = [narrow.stream("a", LONG)]
    next(streams[0])
    done = narrow.submit("b", GREEDY)
    done.add_done_callback(lambda _: streams.clear())
    done.result(30)
    assert settled(narrow)
