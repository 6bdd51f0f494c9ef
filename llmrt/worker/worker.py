"""Worker: one rank of an engine. It answers commands, one at a time, and owns all that it loads."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from llmrt.config import WorkerConfig, WorkerContext
from llmrt.errors import ConfigError
from llmrt.messages import (
    AllocateCache,
    Answer,
    ApplyWeights,
    CallFunction,
    Command,
    Done,
    DropWeights,
    Execute,
    Load,
    LoadReport,
    OpenWeights,
    Sleep,
    Stop,
    Stopped,
    Wake,
    WeightsChunk,
    WeightsRefused,
)
from llmrt.model_config import check_tp
from llmrt.worker import shard
from llmrt.worker.device import Placement, cache_bytes, place
from llmrt.worker.function_calls import call_function
from llmrt.worker.matrices.kernels import can_multiply_int4, can_multiply_int8
from llmrt.worker.model_runner import ModelRunner
from llmrt.worker.models.decoder import Decoder
from llmrt.worker.native.library import NoKernelsError
from llmrt.worker.native.trial import load_kernels
from llmrt.worker.sampler import Sampler
from llmrt.worker.sampling.grammars import Grammars
from llmrt.worker.tensor_parallel import TPGroup, join_group
from llmrt.worker.weight_updates import WeightUpdates
from llmrt.worker.weights.catalogue import RecordingReader
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
        self._placement: Placement | None = None
        self._runner: ModelRunner | None = None
        self._updates: WeightUpdates | None = None
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
            case OpenWeights() | WeightsChunk() | ApplyWeights() | DropWeights():
                assert self._updates is not None, "new weights came while there are none"
                return self._updates.handle(command)
            case Sleep():
                return self._sleep(command)
            case Wake():
                return self._wake(command)
            case Stop():
                return self.stop(command)

    def stop(self, command: Stop) -> Stopped:
        """Leave the group, drop cache and weights; may be called in any state, and twice."""
        is_destroyed = self._leave_group(command.destroy_group)
        uses_cuda = self.device is not None and self.device.type == "cuda"
        self._drop_model()
        if uses_cuda:
            torch.cuda.empty_cache()
        if self._num_threads_before is not None:
            _use_threads(self._num_threads_before)
            self._num_threads_before = None
        return Stopped(rank=self.rank, group_destroyed=is_destroyed)

    def _load(self) -> LoadReport:
        check_tp(self._config.model, self.world_size)
        self._set_num_threads()
        placement = self._place()
        self._check_quantization(placement)
        self.device, self._placement = placement.device, placement
        self._context.report("joining group")
        self._group = join_group(self._context, placement.device)
        self._load_model(self._group, placement)
        return self._load_report(placement)

    def _place(self) -> Placement:
        placement = place(self._config, self.rank, self.world_size, self._context.device_index)
        is_for_kernels = placement.device.type == "cpu" and placement.dtype == torch.bfloat16
        if not (self._config.compiled_kernels and is_for_kernels):
            return placement
        try:
            return replace(placement, kernels=load_kernels(self._context.report))
        except NoKernelsError as reason:
            logging.getLogger("llmrt").info("no compiled kernels: %s", reason)
            return placement

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
            _use_threads(self._config.num_threads)

    def _load_model(self, group: TPGroup, placement: Placement) -> None:
        """Read this rank's weights, and make what runs and changes them."""
        config, report = self._config, self._context.report
        report("loading weights")
        reader = RecordingReader(open_weights(config, report))
        try:
            model = Decoder(config.model, group, placement)
            model.load(reader)
            reader.check_all_read()
        finally:
            reader.close()
        self.model = model
        sampler = Sampler(Grammars(config.tokenizer, config.model.vocab_size))
        self._runner = ModelRunner(config, model, group, placement, sampler)
        self._updates = WeightUpdates(config, placement, model, reader.catalogue, report)

    def _drop_model(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._updates = None
        self.model = None

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

    def _sleep(self, command: Sleep) -> Done:
        self._loaded_runner().free_cache()
        if command.drops_weights:
            assert self._updates is not None, "nothing is loaded"
            self._config = self._updates.config
            self._drop_model()
        else:
            self._move_weights(torch.device("cpu"))
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Done()

    def _wake(self, command: Wake) -> Done | WeightsRefused:
        assert self._group is not None, "nothing was loaded"
        assert self._placement is not None, "nothing was loaded"
        if self.model is None:
            try:
                self._load_model(self._group, self._placement)
            except ConfigError as error:
                return WeightsRefused(reason=str(error))
        else:
            self._move_weights(self._placement.device)
        return self._allocate_cache(AllocateCache(num_blocks=command.num_blocks))

    def _move_weights(self, device: torch.device) -> None:
        assert self.model is not None, "nothing is loaded"
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(device)

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


def _use_threads(num_threads: int) -> None:
    # Setting the number also starts a pool that nothing here uses and that torch never ends, so
    # the user's own process keeps what it has where that is right already.
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
