"""Where a rank computes, in which format, and how much memory its cache may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmrt.config import WorkerConfig
from llmrt.errors import ConfigError
from llmrt.worker import device
from llmrt.worker.device import Placement, available_memory, cache_bytes, place
from llmrt.worker.shard import block_bytes
from tests.support.checkpoints import tiny_config
from tests.support.tiny_driver import FLOAT32_CPU, worker_config


def config_of(family: str = "smollm2", dtype: str = "float32", **options: Any) -> WorkerConfig:
    return worker_config(tiny_config(family, dtype=dtype), **options)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_rank_takes_another_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    places = [place(config_of(device="auto"), rank, 2).device for rank in range(2)]
    assert places == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert place(config_of(device="cpu"), 0, 1).device.type == "cpu"


@pytest.mark.parametrize(("count", "found"), [(1, "found 1 GPU "), (3, "found 3 GPUs ")])
def test_more_ranks_than_gpus_are_started(
    monkeypatch: pytest.MonkeyPatch, count: int, found: str
) -> None:
    pretend_gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=f"asked for tp=4, {found}"):
        place(config_of(device="auto"), 0, 4)


def test_a_machine_without_gpu_needs_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    assert place(config_of(device="auto"), 3, 4).device.type == "cpu"
    with pytest.raises(ConfigError, match="asked for tp=1, found 0 GPUs"):
        place(config_of(device="cuda"), 0, 1)


def test_an_unknown_device_is_tried() -> None:
    with pytest.raises(ConfigError, match="device='tpu'"):
        place(config_of(device="tpu"), 0, 1)


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float32),
        ("float16", "float16", torch.float16),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_a_checkpoint_is_narrowed_unasked(stored: str, asked: str, used: torch.dtype) -> None:
    model = tiny_config("llama", dtype=stored)
    assert model.dtype == stored
    assert place(worker_config(model, dtype=asked), 0, 1).dtype == used


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_take_more_than_was_given(tp: int) -> None:
    config = config_of(kv_cache_bytes=1_000_000)
    shares = [cache_bytes(config, FLOAT32_CPU, rank, tp) for rank in range(tp)]
    assert 1_000_000 - tp <= sum(shares) <= 1_000_000


def test_the_default_cache_is_larger_than_anyone_can_use() -> None:
    config = config_of(max_num_seqs=2, max_model_len=40)
    block = block_bytes(config.model, 0, 1, 4, 4)
    assert cache_bytes(config, FLOAT32_CPU, 0, 1) == 2 * 10 * block


def test_the_default_cache_takes_more_than_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(max_num_seqs=512, max_model_len=256)
    monkeypatch.setattr(device, "available_memory", lambda: 8_000_000)
    assert cache_bytes(config, FLOAT32_CPU, 0, 1) == 2_000_000
    monkeypatch.setattr(device, "available_memory", lambda: 1 << 50)
    huge = config_of(max_num_seqs=512, max_model_len=1 << 20)
    assert cache_bytes(huge, FLOAT32_CPU, 0, 1) == 4 << 30


def test_a_cache_too_small_for_one_sequence_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_memory", lambda: 400_000)
    with pytest.raises(ConfigError, match=r"max_model_len=256 needs .* available are 100,000"):
        cache_bytes(config_of(), FLOAT32_CPU, 0, 1)
    with pytest.raises(ConfigError, match=r"one block needs .* available are 1,000; raise"):
        cache_bytes(config_of(kv_cache_bytes=1000), FLOAT32_CPU, 0, 1)


def test_a_gpu_gives_away_what_weights_and_batches_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 100_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    placement = Placement(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    config = config_of(gpu_memory_fraction=0.9)
    assert cache_bytes(config, placement, 0, 1, peak_bytes=60_000_000) == 30_000_000
    with pytest.raises(ConfigError, match="available are 0"):
        cache_bytes(config, placement, 0, 1, peak_bytes=95_000_000)


def test_a_cgroup_limit_is_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "/sys/fs/cgroup/memory.max": 5_000_000,
        "/sys/fs/cgroup/memory.current": 3_000_000,
    }
    monkeypatch.setattr(device, "_number_in", lambda path: found.get(str(path)))
    assert available_memory() == 2_000_000


def test_a_cgroup_file_without_a_number_fails(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert device._number_in(tmp_path / "memory.max") is None
    assert device._number_in(tmp_path / "missing") is None
