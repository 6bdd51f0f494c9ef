"""Simulation: the real scheduler and a fake worker, driven call by call, with every promise checked
after every call."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from llmrt.messages import Batch, BatchResult
from llmrt.sampling import SamplingParams
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.scheduler.request import Request
from llmrt.scheduler.scheduler import Scheduler
from llmrt.scheduler.updates import (
    PromptLogprobsUpdate,
    SequenceFailed,
    SequenceFinished,
    TokenUpdate,
    Update,
)
from tests.scheduler.fake_worker import Completion, FakeWorker, generate_alone

EOS = 0


def make_config(**changes: object) -> SchedulerConfig:
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200
    )
    return replace(config, **changes)


def make_request(
    request_id: str,
    prompt: tuple[int, ...] | list[int],
    *,
    priority: int = 0,
    seed: int = 7,
    fails_after: int | None = None,
    **params: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=(EOS,),
        priority=priority,
        logits_processors=b"" if fails_after is None else str(fails_after).encode(),
    )


@dataclass
class Collected:
    """What has been reported of one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprob_positions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def completion(self) -> Completion:
        return Completion(tuple(self.token_ids), self.finish_reason, self.stop_reason)


class Simulation:
    """A scheduler with its worker. A step is executed when it is scheduled, and its result waits
    for `update`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.worker = FakeWorker(config.num_blocks, config.block_size)
        self.requests: dict[str, Request] = {}
        self.collected: dict[tuple[str, int], Collected] = defaultdict(Collected)
        self.batches: list[Batch] = []
        self._alone: dict[tuple[str, int], Completion] = {}
        self._results: deque[tuple[BatchResult, dict[int, set[int]]]] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def add(self, request: Request) -> Request:
        updates = self.scheduler.add(request)
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            alone = generate_alone(request, index, self.config.length_limit)
            self._alone[request.request_id, index] = alone
        self._collect(updates)
        self.scheduler.check_invariants()
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        for sequence in self.requests[request_id].sequences:
            collected = self.collected[request_id, sequence.index]
            collected.finish_reason = collected.finish_reason or "abort"
        self.scheduler.check_invariants()

    def finish(self, request_id: str, index: int, stop_reason: str) -> None:
        sequence = self.requests[request_id].sequences[index]
        if self.scheduler.finish(sequence.seq_id, stop_reason):
            self.collected[request_id, index].finish_reason = "stop"
            self.collected[request_id, index].stop_reason = stop_reason
        self.scheduler.check_invariants()

    def schedule(self) -> Batch | None:
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if batch is None:
            assert self._results or not self.scheduler.has_unfinished, "stuck"
            return None
        result = self.worker.execute(batch)
        used = self.worker.used_blocks(batch)
        self._check_apart(batch, used)
        self.batches.append(batch)
        self._results.append((result, used))
        return batch

    def update(self) -> list[Update]:
        result, _ = self._results.popleft()
        updates = self.scheduler.update(result)
        self.scheduler.check_invariants()
        self._collect(updates)
        return updates

    def step(self) -> list[Update]:
        """Schedule one step, if there is one, and take in the oldest result."""
        self.schedule()
        return self.update() if self._results else []

    def run(self, *, overlap: bool = False, max_steps: int = 5000) -> None:
        """Run until everything is finished; with *overlap*, always with one step in flight."""
        depth = 2 if overlap else 1
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            batch = self.schedule() if self.num_in_flight < depth else None
            if self.num_in_flight == depth or (batch is None and self._results):
                self.update()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_results(self) -> None:
        """Assert that every completion is the one that its request has alone, or its beginning
        where it was cut."""
        for request in self.requests.values():
            for index in range(request.params.n):
                self._check_completion(request, index)

    def check_all_released(self) -> None:
        """Assert that nothing is left: every block can be allocated, and only a new step tells
        workers to forget."""
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == self.config.num_blocks

    def completion(self, request_id: str, index: int = 0) -> Completion:
        return self.collected[request_id, index].completion

    def _check_completion(self, request: Request, index: int) -> None:
        expected = self._alone[request.request_id, index]
        collected = self.collected[request.request_id, index]
        got = collected.completion
        was_cut = got.finish_reason == "abort" or isinstance(got.stop_reason, str)
        if was_cut or got.finish_reason is None:
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        else:
            assert got == expected
        self._check_logprobs(request, index, collected)

    def _check_logprobs(self, request: Request, index: int, collected: Collected) -> None:
        wanted = list(range(1, request.num_prompt_tokens))
        if index or request.params.prompt_logprobs is None:
            wanted = []
        positions = collected.logprob_positions
        assert positions == wanted[: len(positions)]
        if collected.token_ids or collected.finish_reason == "length":
            assert positions == wanted

    def _check_apart(self, batch: Batch, used: dict[int, set[int]]) -> None:
        """Assert that no sequence writes a block which another one uses in a step that is still in
        flight."""
        block_size = self.config.block_size
        sequences = {s.seq_id: s for r in self.requests.values() for s in r.sequences}
        for _, earlier in self._results:
            for item in batch.scheduled:
                table = sequences[item.seq_id].block_ids
                written = set(table[item.start // block_size :])
                for seq_id, used in earlier.items():
                    assert seq_id == item.seq_id or written.isdisjoint(used)

    def _collect(self, updates: list[Update]) -> None:
        for update in updates:
            collected = self.collected[update.request_id, update.index]
            assert collected.finish_reason is None, "reported after its end"
            match update:
                case TokenUpdate():
                    assert update.logprob == -float(update.token_id)
                    collected.token_ids.append(update.token_id)
                    collected.finish_reason = update.finish_reason
                    collected.stop_reason = update.stop_reason
                case SequenceFinished():
                    collected.finish_reason = update.finish_reason
                case SequenceFailed():
                    collected.finish_reason = "failed"
                case PromptLogprobsUpdate():
                    self._collect_logprobs(update, collected)

    def _collect_logprobs(self, update: PromptLogprobsUpdate, collected: Collected) -> None:
        prompt = self.requests[update.request_id].prompt_token_ids
        scored = [p.token_ids[0] for p in update.positions]
        end = update.start + len(scored)
        assert tuple(scored) == prompt[update.start : end]
        collected.logprob_positions.extend(range(update.start, end))
