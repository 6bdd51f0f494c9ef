"""Where a rank computes and in which number format; how much memory it may give to its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from llmrt.config import WorkerConfig
from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig
from llmrt.worker import shard
from llmrt.worker.native.kernels import NativeKernels

GIB = 1 << 30
DEFAULT_CPU_CACHE_LIMIT = 4 * GIB
"""Most that the KV cache of a CPU engine takes where nobody said how much it may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the tensors of a rank live, and their types."""

    device: torch.device
    dtype: torch.dtype
    """Of activations, and of weights that are not quantised."""
    quantization: str | None = None
    """`int8` or `int4`: how the layers' matrices are kept; None as the checkpoint has them."""
    kernels: NativeKernels | None = None
    """Compiled kernels for what torch has none; None leaves all to torch."""


def place(
    config: WorkerConfig, rank: int, world_size: int, device_index: int | None = None
) -> Placement:
    """Return where *rank* computes: on the GPU of its number, or of `device_index`.

    Raises:
        ConfigError: the device is unknown, or there are fewer GPUs than ranks.
    """
    if device_index is None:
        device = _device(config.device, rank, world_size)
    else:  # whoever placed this rank gave it devices of its own
        device = _device(config.device, device_index, device_index + 1)
    return Placement(device=device, dtype=_dtype(config, device), quantization=config.quantization)


def _device(asked: str, index: int, num_needed: int) -> torch.device:
    kind = asked
    if asked == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ConfigError(f"device={asked!r} is not one of 'auto', 'cpu', 'cuda'.")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < num_needed:
        raise ConfigError(
            f"asked for tp={num_needed}, found {num_gpus} GPU{'' if num_gpus == 1 else 's'} that "
            "this process may use; lower tp, or pass device='cpu'."
        )
    return torch.device("cuda", index)


def _dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    """Return the type asked for; `auto` is the checkpoint's.

    A float16 checkpoint runs in float32 on a CPU: that is exact, where bfloat16 would round, and
    CPUs have no fast float16. A float32 checkpoint is never narrowed unasked.
    """
    name = config.model.dtype if config.dtype == "auto" else config.dtype
    if config.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "float32"
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def cache_bytes(
    config: WorkerConfig, placement: Placement, rank: int, world_size: int, peak_bytes: int = 0
) -> int:
    """Return how much memory *rank* may spend on KV blocks.

    Args:
        config: the worker's configuration.
        placement: where the rank computes.
        rank: the rank.
        world_size: number of ranks.
        peak_bytes: on a GPU, what the rank needs besides its cache, at the largest batch.

    Raises:
        ConfigError: not one block fits; or, where the size was left to llmrt, not one sequence
            of max_model_len.
    """
    if config.kv_cache_bytes is not None:
        free = _share(config.kv_cache_bytes, config, rank, world_size)
    elif placement.device.type == "cuda":
        total = torch.cuda.get_device_properties(placement.device).total_memory
        free = int(total * config.gpu_memory_fraction) - peak_bytes
    else:
        free = _share(_default_cpu_bytes(config, placement, world_size), config, rank, world_size)
    _check_enough(free, config, placement, rank, world_size)
    return free


def _share(total: int, config: WorkerConfig, rank: int, world_size: int) -> int:
    return shard.share_of_cache(total, config.model, rank, world_size, config.block_size)


def _default_cpu_bytes(config: WorkerConfig, placement: Placement, world_size: int) -> int:
    blocks_needed = config.max_num_seqs * _blocks_per_sequence(config)
    needed = blocks_needed * sum(
        _block_bytes(config, placement, r, world_size) for r in range(world_size)
    )
    return min(needed, available_memory() // 4, DEFAULT_CPU_CACHE_LIMIT)


def _check_enough(
    free: int, config: WorkerConfig, placement: Placement, rank: int, world_size: int
) -> None:
    size_was_given = config.kv_cache_bytes is not None
    num_blocks = 1 if size_was_given else _blocks_per_sequence(config)
    asked = num_blocks * _block_bytes(config, placement, rank, world_size)
    if free >= asked:
        return
    what = (
        "one block" if size_was_given else f"one sequence of max_model_len={config.max_model_len}"
    )
    remedy = (
        "raise kv_cache_bytes" if size_was_given else "lower max_model_len, or pass kv_cache_bytes"
    )
    raise ConfigError(
        f"Too little memory for the KV cache on rank {rank}: {what} needs {asked:,} bytes, "
        f"available are {max(free, 0):,}; {remedy}."
    )


def _blocks_per_sequence(config: WorkerConfig) -> int:
    return -(-config.max_model_len // config.block_size)


def _block_bytes(config: WorkerConfig, placement: Placement, rank: int, world_size: int) -> int:
    model: ModelConfig = config.model
    item_bytes = placement.dtype.itemsize
    return shard.block_bytes(model, rank, world_size, config.block_size, item_bytes)


def available_memory() -> int:
    """Return the bytes this process may still allocate: the machine's or its cgroup's, if less."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _number_in(Path(limit_file)), _number_in(Path(usage_file))
        if limit is not None and usage is not None:
            available = min(available, max(limit - usage, 0))
    return available


def _number_in(path: Path) -> int | None:
    """Return the number a cgroup file holds; None where there is no file, or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
