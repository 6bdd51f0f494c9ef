"""LaunchPlan: what is decided before a process is started, from the options and the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from llmrt.backend_choice import Backend, choose_backend
from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.config import EngineConfig, Timeouts, WorkerConfig
from llmrt.errors import ConfigError
from llmrt.model_config import ModelConfig, check_tp
from llmrt.runtime.environment import Environment, deciding_row, explain_start_method
from llmrt.runtime.fork_history import FORK_HISTORY
from llmrt.runtime.interpreter import python_command
from llmrt.runtime.launchers.base import GroupSpec, Launcher
from llmrt.runtime.observe import observe
from llmrt.runtime.start_method import StartMethod
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.shared_memory_layout import shared_memory_bytes
from llmrt.worker_share import worker_share

WORKER_ENTRY = "llmrt.worker.worker:Worker"
PRELOAD = ("torch", "llmrt.worker.worker")
"""What the guard imports once, before it forks the ranks."""


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
    environment = observe()
    backend = choose_backend(options, environment)
    share = worker_share(options, environment, on_cluster=backend.name == "ray")
    worker = _worker_config(options, checkpoint, model, max_model_len, share.num_threads)
    spec = GroupSpec(
        entry=WORKER_ENTRY,
        configs=(worker,) * options.tp,
        preload=PRELOAD,
        env=share.env,
        start_method=_start_method(options, environment),
        shared_memory_bytes=shared_memory_bytes(options.tp) if options.tp > 1 else 0,
        rendezvous=options.tp > 1,
        python=python_command(),
    )
    return LaunchPlan(
        backend=backend, spec=spec, model=model, options=options, max_model_len=max_model_len
    )


def _start_method(options: EngineConfig, environment: Environment) -> StartMethod:
    row = deciding_row(
        explain_start_method(
            environment,
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
    options: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    max_model_len: int,
    num_threads: int | None,
) -> WorkerConfig:
    return WorkerConfig(
        model=model,
        weights=checkpoint.weights,
        gguf_index=checkpoint.gguf_index,
        tokenizer=str(checkpoint.directory / "tokenizer.json"),
        device=options.device,
        dtype=options.dtype,
        num_threads=num_threads,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_bytes=options.kv_cache_bytes,
        gpu_memory_fraction=options.gpu_memory_fraction,
        quantization=options.quantization,
        compiled_kernels=options.compiled_kernels,
    )
