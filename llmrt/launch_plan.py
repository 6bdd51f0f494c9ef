"""LaunchPlan: what is decided before a process is started, from the options and the model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.config import EngineConfig, Timeouts, WorkerConfig
from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig, check_tp
from llmrt.runtime.cores import threads_per_rank
from llmrt.runtime.environment import deciding_row, explain_start_method
from llmrt.runtime.interpreter import python_command
from llmrt.runtime.launchers.base import GroupSpec, Launcher
from llmrt.runtime.launchers.inprocess import InProcessLauncher
from llmrt.runtime.launchers.mp import FORK_HISTORY, MpLauncher
from llmrt.runtime.observe import observe
from llmrt.runtime.start_method import StartMethod
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.shared_memory_layout import shared_memory_bytes

WORKER_ENTRY = "llmrt.worker.worker:Worker"
PRELOAD = ("torch", "llmrt.worker.worker")
"""What the guard imports once, before it forks the ranks."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which launcher starts the workers, and why."""

    name: str
    reason: str
    launcher: Launcher


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a session needs to bring an engine up."""

    backend: Backend
    spec: GroupSpec
    model: ModelConfig
    options: EngineConfig
    max_model_len: int

    @property
    def launcher(self) -> Launcher:
        """What starts the workers."""
        return self.backend.launcher

    @property
    def timeouts(self) -> Timeouts:
        """Every limit on waiting."""
        return self.options.timeouts

    def scheduler_config(self, num_blocks: int) -> SchedulerConfig:
        """Return the scheduler's limits, now that the workers have measured their memory."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.options.block_size,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefix_caching=self.options.prefix_caching
            and not self.model.rope.depends_on_prompt_length,
        )


def make_launch_plan(options: EngineConfig, checkpoint: Checkpoint) -> LaunchPlan:
    """Decide how to start the workers of an engine.

    Raises:
        ConfigError: the options, the model and this machine do not go together.
    """
    model = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
    check_tp(model, options.tp)
    max_model_len = _max_model_len(options, model)
    backend = choose_backend(options.backend, options.tp)
    worker = _worker_config(options, checkpoint, model, max_model_len)
    spec = GroupSpec(
        entry=WORKER_ENTRY,
        configs=(worker,) * options.tp,
        preload=PRELOAD,
        env=dict(options.env or {}),
        start_method=_start_method(options),
        shared_memory_bytes=shared_memory_bytes(options.tp) if options.tp > 1 else 0,
        rendezvous=options.tp > 1,
        python=python_command(),
    )
    return LaunchPlan(
        backend=backend, spec=spec, model=model, options=options, max_model_len=max_model_len
    )


def choose_backend(backend: Any, tp: int) -> Backend:
    """Return the launcher for a `backend=` option, with the reason.

    Raises:
        ConfigError: this machine or this version cannot run it.
    """
    if not isinstance(backend, str):
        return Backend(name=type(backend).__name__, reason="backend= given", launcher=backend)
    given = "backend= given" if backend != "auto" else ""
    if backend == "ray":
        raise ConfigError('backend="ray" is not part of this version; use backend="mp".')
    if backend == "inprocess":
        if tp != 1:
            raise ConfigError(f'backend="inprocess" runs one rank: tp must be 1, not {tp}.')
        return Backend(name="inprocess", reason=given, launcher=InProcessLauncher())
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f'backend="mp" runs on Linux only, this is {sys.platform}; use backend="inprocess".'
        )
    reason = given or "the workers fit on this machine"
    return Backend(name="mp", reason=reason, launcher=MpLauncher())


def _start_method(options: EngineConfig) -> StartMethod:
    row = deciding_row(
        explain_start_method(
            observe(),
            options.start_method,
            worker_env=options.env,
            thread_option_given=options.num_threads is not None,
            fork_failed_reason=FORK_HISTORY.why_not(),
        )
    )
    if row.warning is not None:
        logging.getLogger("llmrt").warning(row.warning)
    if row.start_method is None:
        raise ConfigError(row.error)
    return row.start_method


def _max_model_len(options: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if options.max_model_len is None:
        return limit
    if options.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is above the {limit} positions of this model."
        )
    return options.max_model_len


def _worker_config(
    options: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, max_model_len: int
) -> WorkerConfig:
    environ: Mapping[str, str] = {**os.environ, **(options.env or {})}
    return WorkerConfig(
        model=model,
        weights=checkpoint.weights,
        gguf_index=checkpoint.gguf_index,
        tokenizer=str(checkpoint.directory / "tokenizer.json"),
        device=options.device,
        dtype=options.dtype,
        num_threads=options.num_threads or threads_per_rank(options.tp, environ),
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_fraction=options.gpu_memory_fraction,
        quantization=options.quantization,
    )
