"""Worker: one rank of an engine. It answers commands, one at a time, and owns all that it loads."""

from __future__ import annotations

import torch

from llmrt.config import WorkerConfig, WorkerContext
from llmrt.errors import ConfigError
from llmrt.messages import (
    AllocateCache,
    Answer,
    CallFunction,
    Command,
    Done,
    Execute,
    Load,
    LoadReport,
    Stop,
    Stopped,
)
from llmrt.model_config import check_tp
from llmrt.worker import shard
from llmrt.worker.device import Placement, cache_bytes, place
from llmrt.worker.function_calls import call_function
from llmrt.worker.matrices.kernels import can_multiply_int4, can_multiply_int8
from llmrt.worker.model_runner import ModelRunner
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.sampler import Sampler
from llmrt.worker.tensor_parallel import TPGroup, join_group
from llmrt.worker.weights.open_weights import open_weights


class Worker:
    """One rank: its device, its shard of the model, its part of the KV cache.

    A function run by `collective_rpc` gets it as its first argument, and may use `rank`,
    `world_size`, `device` and `model`.
    """

    def __init__(self, config: WorkerConfig, context: WorkerContext) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self.device: torch.device | None = None
        """None until the model is loaded."""
        self.model: Decoder | None = None
        """This rank's shard, a torch.nn.Module; None until it is loaded and after `stop`."""
        self._config = config
        self._context = context
        self._group: TPGroup | None = None
        self._runner: ModelRunner | None = None
        self._num_threads_before: int | None = None

    def handle(self, command: Command) -> Answer:
        """Carry out a command.

        Raises:
            ConfigError: the model cannot be loaded as asked.
        """
        match command:
            case Load():
                return self._load()
            case AllocateCache():
                return self._allocate_cache(command)
            case Execute():
                return self._loaded_runner().execute(command.batch)
            case CallFunction():
                first = self.model if command.on_model else self
                return call_function(command, first, self.rank)
            case Stop():
                return self.stop(command)

    def stop(self, command: Stop) -> Stopped:
        """Leave the group, drop cache and weights; may be called in any state, and twice."""
        is_destroyed = self._leave_group(command.destroy_group)
        uses_cuda = self.device is not None and self.device.type == "cuda"
        self._runner = None
        self.model = None
        if uses_cuda:
            torch.cuda.empty_cache()
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)
            self._num_threads_before = None
        return Stopped(rank=self.rank, group_destroyed=is_destroyed)

    def _load(self) -> LoadReport:
        check_tp(self._config.model, self.world_size)
        self._set_num_threads()
        placement = place(self._config, self.rank, self.world_size, self._context.device_index)
        self._check_quantization(placement)
        self.device = placement.device
        self._context.report("joining group")
        self._group = join_group(self._context, placement.device)
        self.model = self._load_model(self._group, placement)
        self._runner = ModelRunner(self._config, self.model, self._group, placement, Sampler())
        return self._load_report(placement)

    def _check_quantization(self, placement: Placement) -> None:
        kind = self._config.quantization
        is_possible = {None: True, "int4": can_multiply_int4, "int8": can_multiply_int8}[kind]
        if callable(is_possible) and not is_possible(placement):
            raise ConfigError(
                f"quantization={kind!r} runs on a CPU in dtype='bfloat16', with kernels that this "
                f"torch ({torch.__version__}) may lack; here it would run on {placement.device} in "
                f"{str(placement.dtype).removeprefix('torch.')}. Pass dtype='bfloat16', or leave "
                "quantization None."
            )

    def _set_num_threads(self) -> None:
        """Use this rank's share of the cores; in the user's own process until `stop` only."""
        if self._config.num_threads is not None:
            self._num_threads_before = torch.get_num_threads()
            torch.set_num_threads(self._config.num_threads)

    def _load_model(self, group: TPGroup, placement: Placement) -> Decoder:
        self._context.report("loading weights")
        reader = open_weights(self._config, self._context.report)
        try:
            model = Decoder(self._config.model, group, placement)
            model.load(reader)
            reader.check_all_read()
        finally:
            reader.close()
        return model

    def _load_report(self, placement: Placement) -> LoadReport:
        runner = self._loaded_runner()
        assert self.model is not None, "nothing is loaded"
        config = self._config
        peak_bytes = runner.peak_bytes() if placement.device.type == "cuda" else 0
        return LoadReport(
            rank=self.rank,
            device=str(placement.device),
            free_bytes=cache_bytes(config, placement, self.rank, self.world_size, peak_bytes),
            block_bytes=shard.block_bytes(
                config.model,
                self.rank,
                self.world_size,
                config.block_size,
                placement.dtype.itemsize,
            ),
            weight_bytes=self.model.num_bytes,
            dtype=str(placement.dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads(),
        )

    def _allocate_cache(self, command: AllocateCache) -> Done:
        self._context.report("allocating cache")
        self._loaded_runner().allocate_cache(command.num_blocks)
        return Done()

    def _loaded_runner(self) -> ModelRunner:
        assert self._runner is not None, "a command came before Load, or after Stop"
        return self._runner

    def _leave_group(self, destroy: bool) -> bool:
        if self._group is None:
            return True
        if destroy:
            self._group.destroy()
        self._group = None
        return destroy
