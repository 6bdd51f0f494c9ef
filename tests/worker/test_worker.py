"""The worker as the runtime sees it: commands in, answers out, nothing left after stop."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest
import torch

from llmrt.config import WorkerConfig, WorkerContext
from llmrt.errors import ConfigError
from llmrt.messages import (
    AllocateCache,
    Answer,
    Batch,
    BatchResult,
    CallFunction,
    Command,
    Done,
    Execute,
    FunctionRaised,
    FunctionReturned,
    Load,
    LoadReport,
    ScheduledSequence,
    Sleep,
    Stop,
    Stopped,
    Wake,
)
from llmrt.shared_memory_layout import shared_memory_bytes
from llmrt.worker.worker import Worker
from tests.support.checkpoints import Checkpoint, random_prompt
from tests.support.tiny_driver import new_sequence, worker_config


class Ranks:
    """The workers of one engine, each command run by all of them at once in threads."""

    def __init__(self, config: WorkerConfig, tp: int, fd: int) -> None:
        self.phases: list[list[str]] = [[] for _ in range(tp)]
        self.workers = [
            Worker(
                config,
                WorkerContext(
                    rank=rank,
                    world_size=tp,
                    report=lambda phase, done=0, total=0, rank=rank: self.phases[rank].append(
                        phase
                    ),
                    shared_memory_fd=fd,
                ),
            )
            for rank in range(tp)
        ]

    def handle(self, command: Command) -> list[Answer]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return [f.result() for f in [pool.submit(w.handle, command) for w in self.workers]]


@contextmanager
def ranks_of(checkpoint: Checkpoint, tp: int = 1, **options: Any) -> Iterator[Ranks]:
    config = worker_config(checkpoint.config, weights=str(checkpoint.directory), **options)
    fd = os.memfd_create("llmrt-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, shared_memory_bytes(tp))
    ranks = Ranks(config, tp, fd)
    try:
        yield ranks
    finally:
        for worker in ranks.workers:
            worker.stop(Stop())
        os.close(fd)


def call(function: object, *args: object, on_model: bool = False, **kwargs: object) -> CallFunction:
    return CallFunction(payload=cloudpickle.dumps((function, args, kwargs)), on_model=on_model)


def generate(ranks: Ranks, prompt: list[int], num_tokens: int) -> list[int]:
    """Generate greedily with one block table that is long enough."""
    tokens: list[int] = []
    for step in range(num_tokens):
        scheduled = ScheduledSequence(
            seq_id=0,
            start=len(prompt) + step - 1 if step else 0,
            num_tokens=1 if step else len(prompt),
            new_block_ids=() if step else tuple(range(20)),
            samples=True,
        )
        new = () if step else (new_sequence(0, prompt),)
        results = ranks.handle(Execute(batch=Batch(step=step, new=new, scheduled=(scheduled,))))
        assert results[1:] == [BatchResult(step=step)] * (len(results) - 1)
        assert isinstance(results[0], BatchResult)
        tokens += [token.token_id for token in results[0].tokens]
    return tokens


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_an_engine_says_something_else_than_transformers(
    checkpoints: dict[str, Checkpoint], tp: int
) -> None:
    checkpoint = checkpoints["smollm2"]
    prompt = random_prompt(9, 320)
    with ranks_of(checkpoint, tp) as ranks:
        reports = [r for r in ranks.handle(Load()) if isinstance(r, LoadReport)]
        assert [r.rank for r in reports] == list(range(tp))
        assert {r.num_blocks for r in reports} == {8 * 64}, "what 8 sequences of 256 tokens need"
        assert {(r.device, r.dtype) for r in reports} == {("cpu", "float32")}
        assert ranks.handle(AllocateCache(num_blocks=32)) == [Done()] * tp
        assert generate(ranks, prompt, 12) == checkpoint.greedy(prompt, 12)
        for phases in ranks.phases:
            assert list(dict.fromkeys(phases)) == [
                "joining group",
                "loading weights",
                "allocating cache",
            ]


def test_an_engine_in_this_process_leaves_its_model_behind(
    checkpoints: dict[str, Checkpoint],
) -> None:
    for _ in range(5):
        with ranks_of(checkpoints["llama"]) as ranks:
            ranks.handle(Load())
            ranks.handle(AllocateCache(num_blocks=32))
            generate(ranks, random_prompt(5, 320), 3)
            ranks.handle(call(lambda worker: 1 / 0))
            model = weakref.ref(ranks.workers[0].model)
            runner = weakref.ref(ranks.workers[0]._runner)
            gc.disable()
            try:
                assert ranks.workers[0].stop(Stop()) == Stopped(rank=0, group_destroyed=True)
                assert model() is None
                assert runner() is None
            finally:
                gc.enable()


@pytest.mark.parametrize("drops_weights", [False, True])
def test_a_sleeping_worker_keeps_what_it_gave_away(
    checkpoints: dict[str, Checkpoint], drops_weights: bool
) -> None:
    prompt = random_prompt(9, 320)
    with ranks_of(checkpoints["llama"]) as ranks:
        (worker,) = ranks.workers
        ranks.handle(Load())
        ranks.handle(AllocateCache(num_blocks=32))
        expected = generate(ranks, prompt, 6)
        assert worker._runner is not None
        cache = weakref.ref(worker._runner._inputs)
        weight = weakref.ref(next(iter(worker.model.parameters())))  # type: ignore[union-attr]
        gc.disable()
        try:
            assert ranks.handle(Sleep(drops_weights=drops_weights)) == [Done()]
            assert cache() is None
            assert (weight() is None) == drops_weights
        finally:
            gc.enable()
        assert ranks.handle(Wake(num_blocks=32)) == [Done()]
        assert generate(ranks, prompt, 6) == expected


def test_a_group_with_a_dead_peer_counts_as_destroyed(checkpoints: dict[str, Checkpoint]) -> None:
    with ranks_of(checkpoints["llama"], 2) as ranks:
        ranks.handle(Load())
        stopped = [w.stop(Stop(destroy_group=False)) for w in ranks.workers]
        assert stopped == [Stopped(rank=r, group_destroyed=False) for r in range(2)]


def test_a_worker_that_loaded_nothing_cannot_stop(checkpoints: dict[str, Checkpoint]) -> None:
    with ranks_of(checkpoints["llama"]) as ranks:
        assert ranks.handle(Stop()) == [Stopped(rank=0, group_destroyed=True)]


def test_the_number_of_threads_stays_changed(checkpoints: dict[str, Checkpoint]) -> None:
    before = torch.get_num_threads()
    with ranks_of(checkpoints["llama"], num_threads=before + 1) as ranks:
        report = ranks.workers[0].handle(Load())
        assert isinstance(report, LoadReport)
        assert report.num_threads == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_function_does_not_get_worker_or_model(checkpoints: dict[str, Checkpoint]) -> None:
    def describe(worker: Any, sign: str, *, suffix: str) -> str:
        return f"{worker.rank}/{worker.world_size} {worker.device}{sign}{suffix}"

    def count(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    with ranks_of(checkpoints["llama"], 2) as ranks:
        reports = ranks.handle(Load())
        returned = [_value(a) for a in ranks.handle(call(describe, "!", suffix="?"))]
        assert returned == ["0/2 cpu!?", "1/2 cpu!?"]
        counts = [_value(a) for a in ranks.handle(call(count, on_model=True))]
        assert counts == [r.weight_bytes // 4 for r in reports if isinstance(r, LoadReport)]


def leave(worker: Worker) -> None:
    raise SystemExit(3)


def interrupt(worker: Worker) -> None:
    raise KeyboardInterrupt


def divide(worker: Worker) -> float:
    return 1 / 0


def return_generator(worker: Worker) -> object:
    return (i for i in range(3))


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raise_unprintable(worker: Worker) -> None:
    raise UnprintableError


@pytest.mark.parametrize(
    ("function", "type_name", "message"),
    [
        (divide, "ZeroDivisionError", "division by zero"),
        (leave, "SystemExit", "3"),
        (interrupt, "KeyboardInterrupt", ""),
        (return_generator, "TypeError", "builtins.generator, which cannot be sent back"),
        (raise_unprintable, f"{__name__}.UnprintableError", "cannot be printed"),
    ],
)
def test_a_function_that_fails_takes_the_worker_with_it(
    checkpoints: dict[str, Checkpoint], function: object, type_name: str, message: str
) -> None:
    with ranks_of(checkpoints["llama"]) as ranks:
        answer = ranks.workers[0].handle(call(function))
        assert isinstance(answer, FunctionRaised)
        assert answer.failure.rank == 0
        assert answer.failure.type_name == type_name
        assert message in answer.failure.message
        assert answer.failure.traceback
        assert isinstance(ranks.workers[0].handle(call(lambda worker: 1)), FunctionReturned)


def test_a_call_that_cannot_be_read_takes_the_worker_with_it(
    checkpoints: dict[str, Checkpoint],
) -> None:
    with ranks_of(checkpoints["llama"]) as ranks:
        answer = ranks.workers[0].handle(CallFunction(payload=b"not a pickle"))
        assert isinstance(answer, FunctionRaised)


def test_more_ranks_than_heads_are_loaded(checkpoints: dict[str, Checkpoint]) -> None:
    with (
        ranks_of(checkpoints["llama"], 5) as ranks,
        pytest.raises(ConfigError, match=r"tp=5.*1 to 4"),
    ):
        ranks.handle(Load())


def test_float32_is_quantised_with_kernels_for_bfloat16(
    checkpoints: dict[str, Checkpoint],
) -> None:
    with (
        ranks_of(checkpoints["llama"], quantization="int4") as ranks,
        pytest.raises(ConfigError, match=r"quantization='int4'.*dtype='bfloat16'.*float32"),
    ):
        ranks.handle(Load())


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_quantised_model_loses_its_mind(
    checkpoints: dict[str, Checkpoint], quantization: str, tp: int
) -> None:
    checkpoint = checkpoints["llama"]
    prompt = random_prompt(12, checkpoint.config.vocab_size)
    expected = checkpoint.logits(prompt)[-1]
    with ranks_of(checkpoint, tp, dtype="bfloat16", quantization=quantization) as ranks:
        ranks.handle(Load())
        ranks.handle(AllocateCache(num_blocks=20))
        (chosen,) = generate(ranks, prompt, 1)
    # Noise of some per cent may swap neighbours, but not bring up a token from the crowd.
    assert expected[chosen] > expected.topk(10).values[-1]


def test_a_tensor_nobody_asks_for_is_left_over(checkpoints: dict[str, Checkpoint]) -> None:
    """A config.json that lost its layers' biases must not be served."""
    checkpoint = checkpoints["qwen2"]
    config = dataclasses.replace(checkpoint.config, qkv_bias=False)
    with ranks_of(checkpoint) as ranks:
        worker = Worker(
            worker_config(config, weights=str(checkpoint.directory)), ranks.workers[0]._context
        )
        with pytest.raises(ConfigError, match=r"q_proj\.bias"):
            worker.handle(Load())
        worker.stop(Stop())


def test_a_cache_that_is_allocated_again_keeps_old_sequences(
    checkpoints: dict[str, Checkpoint],
) -> None:
    checkpoint = checkpoints["mistral"]
    prompt = random_prompt(7, 320)
    with ranks_of(checkpoint) as ranks:
        ranks.handle(Load())
        for _ in range(2):
            ranks.handle(AllocateCache(num_blocks=32))
            assert generate(ranks, prompt, 6) == checkpoint.greedy(prompt, 6)


def _value(answer: Answer) -> object:
    assert isinstance(answer, FunctionReturned), answer
    return cloudpickle.loads(answer.payload)
