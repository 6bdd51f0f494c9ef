"""Random requests, arrivals, drops and caches through scheduler, model and text at once.

Each request must give what it gives alone; no block may be lost. LLMRT_FUZZ_EXAMPLES sets how many
runs there are.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import cloudpickle
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llmrt.errors import RequestError
from llmrt.outputs import CompletionOutput, RequestOutput
from llmrt.sampling import SamplingParams
from llmrt.scheduler.limits import SchedulerConfig
from llmrt.scheduler.request import Request
from llmrt.tokenizer import Tokenizer
from tests.support.checkpoints import Checkpoint, write_checkpoint
from tests.support.tiny_engine import Alone, ProcessorError, TinyEngine
from tests.support.tokenizers import byte_level_backend, llama_backend, tokenizer_of

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 48
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "windowed": ("mistral", {"num_hidden_layers": 2, "sliding_window": 8}),
    "dynamic": (
        "llama",
        {
            "num_hidden_layers": 1,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 2.0,
                "rope_theta": 10000.0,
            },
            "max_position_embeddings": 16,
        },
    ),
}
COMMON = [7, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47]
EOS = (2, 60)

token_ids = st.integers(3, 250)
prompts = st.one_of(
    st.lists(token_ids, min_size=1, max_size=30),
    st.builds(
        lambda cut, rest: [*COMMON[:cut], *rest],
        st.integers(1, len(COMMON)),
        st.lists(token_ids, max_size=5),
    ),
)


def fails_at(count: int) -> Any:
    """Return a logits processor that raises after so many tokens."""

    def process(output_ids: list[int], logits_V: Any) -> Any:
        if len(output_ids) >= count:
            raise ValueError("as asked")
        return logits_V + 0.5

    return process


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.one_of(st.integers(0, 24), st.none()))
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        "min_tokens": draw(st.integers(0, min(5, 5 if max_tokens is None else max_tokens))),
        "ignore_eos": draw(st.booleans()),
    }
    optional: dict[str, Any] = {
        "top_k": st.integers(1, 50),
        "top_p": st.sampled_from([0.2, 0.8]),
        "min_p": st.just(0.05),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "stop_token_ids": st.lists(token_ids, max_size=40),
        "stop": st.lists(st.sampled_from(["a", "e", "th", "é", "0"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-5.0, 5.0]), max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=5, max_size=60),
        "detokenize": st.just(False),
        "skip_special_tokens": st.just(False),
    }
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)):
        chosen[name] = draw(optional[name])
    if chosen.get("detokenize") is False:
        chosen.pop("stop", None)
    return chosen


class EngineMachine(RuleBasedStateMachine):
    models: ClassVar[dict[str, Checkpoint]] = {}
    references: ClassVar[dict[tuple[str, str], Alone]] = {}
    tokenizers: ClassVar[dict[str, Tokenizer]] = {}

    @initialize(
        model=st.sampled_from(sorted(MODELS)),
        tokenizer=st.sampled_from(["byte-level", "llama"]),
        tp=st.sampled_from([1, 1, 2, 3]),
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([2, 4, 5]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.sampled_from([0, 5, 13, 60]),
        prefix_caching=st.booleans(),
    )
    def start(self, model: str, tokenizer: str, tp: int, extra_tokens: int, **limits: Any) -> None:
        checkpoint = self.models[model]
        if checkpoint.config.rope.depends_on_prompt_length:  # as the launch plan has it
            limits["prefix_caching"] = False
        config = SchedulerConfig(
            max_num_batched_tokens=limits["max_num_seqs"] + extra_tokens,
            max_model_len=MAX_MODEL_LEN,
            **limits,
        )
        self.engine = TinyEngine(checkpoint, self.tokenizers[tokenizer], tp, config)
        key = (model, tokenizer)
        if key not in self.references:
            self.references[key] = Alone(checkpoint, self.tokenizers[tokenizer])
        self.reference = self.references[key]
        self.num_requests = 0

    @rule(
        prompt=prompts,
        options=sampling(),
        seed=st.integers(0, 9),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        fails_after=st.sampled_from([None] * 7 + [0, 3]),
        scores_from=st.sampled_from([0, 0, 5, 9]),
    )
    def add(
        self,
        prompt: list[int],
        options: dict[str, Any],
        seed: int,
        priority: int,
        fails_after: int | None,
        scores_from: int,
    ) -> None:
        self.num_requests += 1
        processors = () if fails_after is None else (fails_at(fails_after),)
        request = Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**options),
            eos_token_ids=EOS,
            seed=seed,
            priority=priority,
            scores_from=min(scores_from, len(prompt)),
            logits_processors=cloudpickle.dumps(processors) if processors else b"",
        )
        fits = len(prompt) + (options["max_tokens"] != 0) <= self.engine.config.length_limit
        try:
            self.engine.add(request)
        except RequestError:
            assert not fits
        else:
            assert fits, "a request was taken that can never be served"

    @precondition(lambda self: self.engine.num_in_flight < 2)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        """Start and finish steps in turn, with as many in flight as there are now."""
        for _ in range(count):
            if self.engine.start_step():
                self.engine.finish_step()

    @precondition(lambda self: self.engine.num_in_flight < 2)
    @rule()
    def start_step(self) -> None:
        self.engine.start_step()

    @precondition(lambda self: self.engine.num_in_flight)
    @rule()
    def finish_step(self) -> None:
        self.engine.finish_step()

    @precondition(lambda self: self.engine.generations)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.generations))))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()
        self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.engine.run_to_the_end(max_steps=5000)
            for generation in self.engine.generations.values():
                self.check(generation.request, generation)
            stats = self.engine.scheduler.stats()
            assert stats.num_free_blocks == stats.num_blocks, "blocks were lost"
            assert stats.num_running == stats.num_waiting == 0
        finally:
            self.engine.close()

    def check(self, request: Request, generation: Any) -> None:
        """Compare what a request gave with what it gives alone."""
        error = generation.future.exception(timeout=0)
        try:
            expected = self.reference.generate(request, self.engine.config.length_limit)
        except ProcessorError:
            assert isinstance(error, ProcessorError)
            return
        if isinstance(error, ProcessorError):
            return  # a completion ended it that alone comes after one that has failed
        assert error is None
        got = generation.future.result(timeout=0)
        assert [_exact(o) for o in got.outputs] == [_exact(o) for o in expected.outputs]
        assert _numbers(got) == pytest.approx(_numbers(expected), abs=1e-4)
        increments = []
        while (increment := _take(generation.buffer)) is not None:
            increments.append(increment)
        for completion in got.outputs:
            own = [i for i in increments if i.index == completion.index]
            assert "".join(i.text for i in own) == completion.text
            assert tuple(t for i in own for t in i.token_ids) == completion.token_ids


def _exact(output: CompletionOutput) -> CompletionOutput:
    return replace(output, logprobs=None, cumulative_logprob=None)


def _numbers(output: RequestOutput) -> list[float]:
    """Return every log-probability, each position led by its token."""
    positions = list(output.prompt_logprobs or ())
    for completion in output.outputs:
        positions += completion.logprobs or ()
    return [v for p in positions if p for t, e in p.items() for v in (float(t), e.logprob)]


def _take(buffer: Any) -> Any:
    try:
        return buffer.take()
    except StopIteration:
        return None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("fuzz")
    return {
        name: write_checkpoint(folder / name, model_type, **changes)
        for name, (model_type, changes) in MODELS.items()
    }


@pytest.mark.timeout(600)
def test_a_request_gives_something_else_than_alone(models: dict[str, Checkpoint]) -> None:
    EngineMachine.models = models
    EngineMachine.references = {}
    EngineMachine.tokenizers = {
        "byte-level": tokenizer_of(byte_level_backend()),
        "llama": tokenizer_of(llama_backend()),
    }
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=int(os.environ.get("LLMRT_FUZZ_EXAMPLES", "15")),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
