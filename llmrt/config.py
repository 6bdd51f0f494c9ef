"""What an engine and each of its workers are told: frozen values, checked where they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DEFAULT_BLOCK_SIZE = 16
"""Tokens in one block of the KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Every limit on waiting that an engine has, in seconds."""

    start_progress: float = 60.0
    """While starting, the longest time in which no rank reports progress."""
    step: float = 300.0
    """The longest a step may take before the workers count as hung."""
    stacks: float = 0.5
    """How long a hung worker is given to say where it is."""
    close: float = 10.0
    """Deadline of `close()`: ask, SIGTERM, SIGKILL and reap together."""
    close_ask: float = 3.0
    """How much of that a worker is given to end by itself."""
    close_terminate: float = 1.0
    """How much of that a worker is given after SIGTERM."""
    fork_probe: float = 5.0
    """How long a fork-born engine has to prove that its thread pools work."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(
                    f"Timeouts.{f.name} must be a number of seconds above 0, not {value!r}."
                )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine, as its user gave them. `Engine` documents them."""

    model: str | None = None
    tp: int = 1
    backend: Any = "auto"
    """`auto`, `mp`, `inprocess`, `ray` or a Launcher."""
    device: str = "auto"
    dtype: DTypeName = "auto"
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_bytes: int | None = None
    gpu_memory_fraction: float = 0.9
    block_size: int = DEFAULT_BLOCK_SIZE
    prefix_caching: bool = True
    quantization: str | None = None
    """`int8`, `int4`, or None: as the checkpoint stores them."""
    compiled_kernels: bool = True
    num_threads: int | None = None
    """Threads per rank on a CPU; None is the rank's share of the cores this process may use."""
    seed: int = 0
    placement_group: Any = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    progress: Literal["auto"] | bool = "auto"
    env: Mapping[str, str] | None = None
    """Environment variables for the workers, beside those they inherit."""

    def __post_init__(self) -> None:
        _require_count("tp", self.tp)
        _require_count("max_num_seqs", self.max_num_seqs)
        _require_count("max_num_batched_tokens", self.max_num_batched_tokens)
        _require_count("block_size", self.block_size)
        for name in ("max_model_len", "kv_cache_bytes", "num_threads"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        _require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _require_choice("start_method", self.start_method, ("auto", "fork", "spawn"))
        if self.quantization is not None:
            _require_choice("quantization", self.quantization, ("int8", "int4"))
        if isinstance(self.backend, str):
            _require_choice("backend", self.backend, ("auto", "mp", "ray", "inprocess"))
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(
                f"gpu_memory_fraction must be in (0, 1], not {self.gpu_memory_fraction}."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: one step must hold a token of every sequence."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What one rank is told about its model and its share of the machine."""

    model: ModelConfig
    weights: str
    """A directory of safetensors files, or a GGUF file."""
    gguf_index: str | None = None
    """The tensor index (JSON) of that GGUF file; None for safetensors."""
    tokenizer: str | None = None
    """The model's tokenizer.json, which grammars need."""
    device: str = "auto"
    dtype: DTypeName = "auto"
    num_threads: int | None = None
    """Native threads of this rank on a CPU; None keeps what its environment says."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_bytes: int | None = None
    """KV cache of all ranks together; None takes the device's default share."""
    compiled_kernels: bool = True
    """Whether to compile llmrt's own kernels, for bfloat16 on a CPU; False leaves all to torch."""
    gpu_memory_fraction: float = 0.9
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of one engine meet to form a process group: a socket already bound."""

    host: str
    port: int
    listen_fd: int | None
    """The listening socket itself, on rank 0 only."""
    own_host: str | None = None
    """This rank's address on the network of the group; None where the route to `host` tells."""


class ReportProgress(Protocol):
    """Tells the engine how far a rank is; its start-up limit counts from the last report."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report a phase, and how much of how much of it is done."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """What a worker is handed by the process it runs in, beside its own configuration."""

    rank: int
    world_size: int
    report: ReportProgress
    shared_memory_fd: int | None = None
    """A memory file that all ranks of this host map; its first 4096 bytes belong to the runtime."""
    device_index: int | None = None
    """Which of the devices that this process may use is this rank's; None: its rank says."""
    rendezvous: Rendezvous | None = None
    is_aborted: Callable[[], bool] = lambda: False
    """Whether a rank has died: polled by whoever waits for a peer."""


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        offered = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"{name}={value!r} is not one of {offered}.")
