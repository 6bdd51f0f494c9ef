"""New weights, sleep and an emptied cache in an engine that stays open."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import llmrt.new_weights
from llmrt import (
    AsyncEngine,
    Engine,
    EngineAsleepError,
    EngineClosedError,
    RequestError,
    SamplingParams,
    WorkerDiedError,
)
from tests.support.scripts import copy_model
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
PROMPTS: list[Any] = [list(range(10, 75)), "a", "Once upon a time"]
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like `tiny_model` with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("twin") / "m", seed=7, num_heads=4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    directory = tmp_path_factory.mktemp("tied") / "m"
    return write_tiny_model(directory, seed=8, num_heads=4, tie_word_embeddings=True)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send tensors in pieces that end inside rows, and numbers."""
    monkeypatch.setattr(llmrt.new_weights, "CHUNK_BYTES", 1021)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def answers(llm: Engine) -> list[tuple[int, ...]]:
    return [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]


def fresh_answers(model: Path, **options: Any) -> list[tuple[int, ...]]:
    with Engine(model, **options) as llm:
        return answers(llm)


# ---- new weights ----


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.usefixtures("small_chunks")
def test_an_updated_engine_differs_from_a_fresh_one(tiny_model: Path, twin: Path, tp: int) -> None:
    first, second = fresh_answers(tiny_model), fresh_answers(twin)
    assert first != second
    with Engine(tiny_model, tp=tp) as llm:
        assert answers(llm) == first
        llm.update_weights(twin)
        assert answers(llm) == second
        llm.update_weights(tensors_of(tiny_model).items())
        assert answers(llm) == first
        llm.update_weights(tensors_of(twin))
        assert answers(llm) == second
        llm.update_weights((name, t) for name, t in reversed(tensors_of(tiny_model).items()))
        assert answers(llm) == first


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 1},
        {"tp": 2},
        {"dtype": "bfloat16", "tp": 2},
        {"dtype": "bfloat16", "quantization": "int8"},
    ],
    ids=str,
)
def test_a_few_tensors_disturb_the_others(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    changed = tensors_of(tiny_model)
    wanted = [GATE, "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
    for name in wanted:
        changed[name] = changed[name] * 1.5
    expected_model = copy_model(tiny_model, tmp_path / "m")
    save_file(changed, expected_model / "model.safetensors", metadata={"format": "pt"})
    with Engine(tiny_model, **options) as llm:
        before = answers(llm)
        llm.update_weights([(name, changed[name]) for name in wanted])
        assert answers(llm) == fresh_answers(expected_model, **options) != before


def test_a_prefix_of_the_old_weights_is_served(tiny_model: Path, twin: Path) -> None:
    with Engine(tiny_model) as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        assert llm.generate([PROMPTS[0]], GREEDY)[0].num_cached_tokens == 64
        llm.update_weights(tensors_of(twin))
        assert llm.generate([PROMPTS[0]], GREEDY)[0].num_cached_tokens == 0
        assert llm.generate([PROMPTS[0]], GREEDY)[0].num_cached_tokens == 64
        llm.reset_prefix_cache()
        assert llm.generate([PROMPTS[0]], GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_model_refuses_its_own_state_dict(tied: Path, tmp_path: Path, dtype: Any) -> None:
    tensors = {name: t * 1.25 for name, t in tensors_of(tied).items()}
    expected_model = copy_model(tied, tmp_path / "m")
    save_file(tensors, expected_model / "model.safetensors", metadata={"format": "pt"})
    expected = fresh_answers(expected_model, dtype=dtype, tp=2)
    with Engine(tied, dtype=dtype, tp=2) as llm:
        before = answers(llm)
        assert before != expected
        llm.update_weights({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
        assert answers(llm) == expected
        llm.update_weights(tied)
        assert answers(llm) == before


def _raising() -> Iterator[tuple[str, torch.Tensor]]:
    yield GATE, torch.zeros(96, 64)
    raise LookupError("out of tensors")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([(GATE, torch.zeros(96, 64)), ("no.such", torch.zeros(3))], RequestError, "no.such"),
        ([(GATE, torch.zeros(64, 96))], RequestError, r"\(64, 96\).*\(96, 64\)"),
        ([(GATE, torch.zeros(96, 64, dtype=torch.int8))], RequestError, "int8"),
        ([(GATE, torch.zeros(96, 64)), "x"], RequestError, "pairs"),
        ([(GATE, 3)], RequestError, "pairs"),
        (3, RequestError, "not int"),
        (_raising(), LookupError, "out of tensors"),
        ("/no/such/model", ValueError, "/no/such/model"),
    ],
    ids=["name", "shape", "dtype", "pair", "tensor", "kind", "raising", "path"],
)
def test_a_refused_update_leaves_half_of_it(
    llm: Engine, source: Any, error: type[Exception], message: str
) -> None:
    before = answers(llm)
    with pytest.raises(error, match=message):
        llm.update_weights(source)
    assert answers(llm) == before
    assert llm.collective_rpc(lambda worker: len(worker._updates._begun)) == [0]


def test_a_checkpoint_that_does_not_fit_is_half_loaded(
    llm: Engine, tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    before = answers(llm)
    with pytest.raises(RequestError, match="num_heads"):
        llm.update_weights(other_tiny_model)
    tensors = tensors_of(tiny_model)
    short = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    more = {**tensors, "model.extra": torch.zeros(3)}
    narrow = {**tensors, GATE: torch.zeros(96, 32)}
    for number, (changed, message) in enumerate(
        [(short, "model.norm.weight"), (more, "model.extra"), (narrow, r"\(96, 32\)")]
    ):
        model = copy_model(tiny_model, tmp_path / str(number))
        save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RequestError, match=message):
            llm.update_weights(model)
        assert answers(llm) == before


@pytest.mark.usefixtures("small_chunks")
def test_requests_stand_still_while_weights_travel(tiny_model: Path, twin: Path) -> None:
    with Engine(tiny_model) as llm:
        stream = llm.stream("a", LONG)
        next(stream)
        llm.update_weights(tensors_of(twin))
        increments = list(stream)
        assert increments[-1].finish_reason == "length"
        assert answers(llm) == fresh_answers(twin)


def test_a_worker_that_dies_during_an_update_hangs_it(tiny_model: Path) -> None:
    llm = Engine(tiny_model, tp=2).open()

    def kill_one() -> Iterator[tuple[str, torch.Tensor]]:
        yield GATE, torch.zeros(96, 64)
        os.kill(llm.workers[1].pid, signal.SIGKILL)
        for _ in range(1000):
            yield GATE, torch.zeros(96, 64)

    with pytest.raises(WorkerDiedError):
        llm.update_weights(kill_one())
    llm.close()


def test_closing_during_an_update_hangs_it(tiny_model: Path) -> None:
    llm = Engine(tiny_model).open()

    def close() -> Iterator[tuple[str, torch.Tensor]]:
        yield GATE, torch.zeros(96, 64)
        llm.close()
        yield GATE, torch.zeros(96, 64)

    with pytest.raises(EngineClosedError):
        llm.update_weights(close())


WITHOUT_TORCH = """
import sys
from pathlib import Path
import llmrt
model, twin = sys.argv[1:]
class Floats:
    "What a user without torch may have: the shape of an array of numpy."
    shape, dtype = (64,), "numpy.float32"
    def tobytes(self): return bytes(256)
greedy = llmrt.SamplingParams(temperature=0, max_tokens=4)
with llmrt.Engine(model) as llm:
    llm.update_weights(twin)
    llm.update_weights([("model.norm.weight", Floats())])
    llm.sleep()
    llm.wake()
    assert llm.generate("a", greedy)[0].token_ids == (0,) * 4
heavy = {"torch", "numpy", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


def test_new_weights_bring_torch_into_the_users_process(tiny_model: Path, twin: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tiny_model), str(twin)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- sleep ----


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_wakes_with_other_weights(tiny_model: Path, level: int, tp: int) -> None:
    with Engine(tiny_model, tp=tp) as llm:
        before, blocks = answers(llm), llm.stats().num_blocks
        for _ in range(2):
            llm.sleep(level)
            llm.sleep(level)
            assert llm.is_asleep
            llm.wake()
            llm.wake()
            assert not llm.is_asleep
            assert llm.generate([PROMPTS[0]], GREEDY)[0].num_cached_tokens == 0
            assert answers(llm) == before
            assert llm.stats().num_free_blocks == blocks


def test_a_verb_reaches_a_sleeping_engine(tiny_model: Path) -> None:
    with Engine(tiny_model) as llm:
        llm.sleep(2)
        verbs: list[Any] = [
            lambda: llm.generate("a"),
            lambda: llm.submit("a").result(30),
            lambda: list(llm.stream("a")),
            lambda: llm.chat([{"role": "user", "content": "a"}]),
            lambda: llm.score("a", "b"),
            lambda: llm.collective_rpc(lambda worker: 1),
            lambda: llm.apply_model(lambda model: 1),
            lambda: llm.update_weights([(GATE, torch.zeros(96, 64))]),
            llm.reset_prefix_cache,
        ]
        for verb in verbs:
            with pytest.raises(EngineAsleepError, match=r"wake\(\)"):
                verb()
        assert llm.is_healthy()
        assert llm.stats().num_running == 0
        llm.wake()
        assert llm.generate("a", GREEDY)[0].token_ids
        llm.sleep()  # and closes so


def test_an_engine_falls_asleep_over_its_work(tiny_model: Path) -> None:
    with Engine(tiny_model) as llm:
        stream = llm.stream("a", LONG)
        next(stream)
        with pytest.raises(RequestError, match="1 sequences are unfinished"):
            llm.sleep()
        stream.close()
        llm.sleep()
        with pytest.raises(RequestError, match="level must be 1 or 2"):
            llm.sleep(3)


def test_sleep_undoes_an_update(tiny_model: Path, twin: Path) -> None:
    with Engine(tiny_model) as llm:
        before = answers(llm)
        llm.update_weights(tensors_of(twin))
        updated = answers(llm)
        with pytest.raises(RequestError, match="level=1"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake()
        assert answers(llm) == updated != before
        llm.update_weights(twin)
        llm.sleep(2)
        llm.wake()
        assert answers(llm) == updated


def test_an_engine_whose_checkpoint_is_gone_wakes_with_garbage(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path / "m")
    with Engine(model) as llm:
        before = answers(llm)
        llm.sleep(2)
        shutil.move(model / "model.safetensors", tmp_path / "away")
        with pytest.raises(RequestError, match=r"sleeps on.*no weights"):
            llm.wake()
        assert llm.is_asleep
        shutil.move(tmp_path / "away", model / "model.safetensors")
        llm.wake()
        assert answers(llm) == before


# ---- awaited ----


def test_the_awaited_verbs_do_something_else(tiny_model: Path, twin: Path) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with AsyncEngine(tiny_model) as llm:
            await llm.update_weights(tensors_of(twin))
            await llm.sleep()
            assert llm.is_asleep
            with pytest.raises(EngineAsleepError):
                await llm.generate("a")
            await llm.wake()
            await llm.reset_prefix_cache()
            return [o.token_ids for o in await llm.generate(PROMPTS, GREEDY)]

    assert asyncio.run(ask()) == fresh_answers(twin)


def test_a_cancelled_update_is_applied(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncEngine(tiny_model) as llm:
            before = (await llm.generate("a", GREEDY))[0].token_ids
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()

            def endless() -> Iterator[tuple[str, torch.Tensor]]:
                while True:
                    yield GATE, torch.zeros(96, 64)
                    loop.call_soon_threadsafe(begun.set)

            task = asyncio.create_task(llm.update_weights(endless()))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await llm.generate("a", GREEDY))[0].token_ids == before

    asyncio.run(ask())
