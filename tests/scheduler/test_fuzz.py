"""Random requests, arrivals, cancellations and cache sizes: every completion equals the one
generated alone."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llmrt.errors import RequestError
from llmrt.scheduler.limits import SchedulerConfig
from tests.scheduler.fake_worker import VOCABULARY
from tests.scheduler.simulation import Simulation, make_request

tokens = st.integers(0, VOCABULARY - 1)
common_prefix = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3]
prompts = st.one_of(
    st.lists(tokens, max_size=30),
    st.builds(
        lambda cut, rest: common_prefix[:cut] + rest,
        st.integers(0, len(common_prefix)),
        st.lists(tokens, max_size=6),
    ),
)


@st.composite
def params(draw: st.DrawFn) -> dict[str, object]:
    max_tokens = draw(st.one_of(st.none(), st.integers(0, 30)))
    chosen: dict[str, object] = {
        "max_tokens": max_tokens,
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "min_tokens": draw(st.integers(0, min(6, 6 if max_tokens is None else max_tokens))),
        "ignore_eos": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        chosen["stop_token_ids"] = draw(st.lists(tokens, max_size=2))
    if draw(st.integers(0, 4)) == 0:
        chosen["prompt_logprobs"] = 0
    return chosen


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 30),
        block_size=st.sampled_from([1, 2, 4, 5]),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.sampled_from([0, 3, 12, 40, 100]),
        max_model_len=st.integers(4, 60),
        prefix_caching=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        max_model_len: int,
        prefix_caching: bool,
    ) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=max_model_len,
            prefix_caching=prefix_caching,
        )
        self.simulation = Simulation(config)

    @rule(
        prompt=prompts,
        params=params(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        seed=st.integers(0, 3),
        fails_after=st.sampled_from([None] * 6 + [0, 2]),
    )
    def add(
        self,
        prompt: list[int],
        params: dict[str, object],
        priority: int,
        seed: int,
        fails_after: int | None,
    ) -> None:
        simulation = self.simulation
        request = make_request(
            str(len(simulation.requests)),
            prompt,
            priority=priority,
            seed=seed,
            fails_after=fails_after,
            **params,
        )
        needed = len(prompt) + (params["max_tokens"] != 0)
        if prompt and needed <= simulation.config.length_limit:
            simulation.add(request)
        else:
            try:
                simulation.add(request)
            except RequestError:
                return
            raise AssertionError("a request that can never fit was taken")

    @precondition(lambda self: self.simulation.num_in_flight < 2)
    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        """Schedule and update in turn, with as many steps in flight as there are now."""
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.num_in_flight < 2)
    @rule()
    def schedule(self) -> None:
        self.simulation.schedule()

    @precondition(lambda self: self.simulation.num_in_flight)
    @rule()
    def update(self) -> None:
        self.simulation.update()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.requests))))

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        index = data.draw(st.integers(0, self.simulation.requests[request_id].params.n - 1))
        self.simulation.finish(request_id, index, "a stop string")

    @rule()
    def reset_prefix_cache(self) -> None:
        self.simulation.scheduler.reset_prefix_cache()
        self.simulation.scheduler.check_invariants()

    @invariant()
    def partial_results_are_right(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check_results()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run(overlap=bool(self.simulation.num_in_flight))
            self.simulation.check_results()
            self.simulation.check_all_released()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("LLMRT_FUZZ_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
