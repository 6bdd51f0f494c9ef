"""Two nodes with addresses of their own, on one machine: rank order, gloo, the loss of a node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ray_scenarios as scenarios
from tests.support.ray_driver import RayDriver
from tests.support.waiting import wait_until

HEAD, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayDriver]:
    """A driver on the first of two nodes; `cluster_of` there gives the cluster."""
    driver = RayDriver()
    try:
        driver.run(scenarios.start_two_nodes, HEAD, OTHER, timeout=110)
        yield driver
    finally:
        driver.close()


def test_ranks_go_node_by_node_and_this_one_comes_first(two_nodes: RayDriver) -> None:
    def scenario() -> tuple[Any, ...]:
        from tests.support.fake_workers import Ask

        bundles = [{"CPU": 1, node: 0.1} for node in ("other", "head", "other", "head")]
        with (
            scenarios.placement_group(bundles, strategy="SPREAD") as group,
            scenarios.ray_group(
                4, placement_group=group, rendezvous=True, shared_memory_bytes=4096
            ) as ranks,
        ):
            return (
                [worker.host for worker in ranks.workers],
                ranks.call(Ask(what="rendezvous"), 10),
                ranks.call(Ask(what="shared"), 10),
            )

    hosts, meetings, shared = two_nodes.run(scenario)
    assert hosts == [HEAD, HEAD, OTHER, OTHER]
    assert {host for host, _, _ in meetings} == {HEAD}
    assert [listens for _, _, listens in meetings] == [True, False, False, False]
    assert shared == [None] * 4, "memory is not shared between nodes"


def test_fewer_ranks_than_bundles_stay_on_one_node(two_nodes: RayDriver) -> None:
    def scenario() -> list[str]:
        bundles = [{"CPU": 1, node: 0.1} for node in ("other", "head", "other", "head")]
        with (
            scenarios.placement_group(bundles, strategy="SPREAD") as group,
            scenarios.ray_group(2, placement_group=group) as ranks,
        ):
            return [worker.host for worker in ranks.workers]

    assert two_nodes.run(scenario) == [HEAD, HEAD]


def test_an_engine_over_two_nodes_gives_the_same_tokens(
    two_nodes: RayDriver, tiny_model: Path
) -> None:
    def scenario() -> tuple[Any, ...]:
        from llmrt import Engine

        answers = []
        with Engine(tiny_model, tp=2, backend="mp") as llm:
            answers.append([o.token_ids for o in llm.generate(scenarios.PROMPTS, scenarios.GREEDY)])
        bundles = [{"CPU": 1, "other": 0.1}, {"CPU": 1, "head": 0.1}]
        with scenarios.placement_group(bundles, strategy="SPREAD") as group:
            for _ in range(2):
                with Engine(tiny_model, tp=2, backend="ray", placement_group=group) as llm:
                    outputs = llm.generate(scenarios.PROMPTS, scenarios.GREEDY)
                    hosts = [worker.host for worker in llm.workers]
                    groups = llm.collective_rpc(lambda worker: type(worker._group).__name__)
                answers.append([o.token_ids for o in outputs])
        return answers, hosts, groups

    answers, hosts, groups = two_nodes.run(scenario, timeout=110)
    assert answers[1:] == [answers[0]] * 2
    assert hosts == [HEAD, OTHER]
    assert groups == ["TorchGroup"] * 2


def test_a_lost_node_is_a_dead_worker_in_time(two_nodes: RayDriver) -> None:
    def scenario() -> tuple[Any, ...]:
        import time

        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        bundles = [{"CPU": 1, "head": 0.1}, {"CPU": 1, "other": 0.1}]
        with scenarios.placement_group(bundles, strategy="SPREAD") as group:
            ranks = scenarios.new_ray_group(2, placement_group=group)
            ranks.start()
            pids = [worker.pid for worker in ranks.workers]
            call = ranks.submit(Misbehave(fault="hang"))
            scenarios.remove_node(OTHER)
            started_at = time.monotonic()
            try:
                ranks.wait(call, 30)
            except WorkerDiedError as error:
                found = error.rank, error.host, time.monotonic() - started_at, str(error)
            report = ranks.close()
        wait_until(lambda: not any(scenarios.is_alive(pid) for pid in pids))
        return (*found, report.seconds)

    rank, host, seconds, message, close_seconds = two_nodes.run(scenario)
    assert (rank, host) == (1, OTHER)
    assert seconds < 5, message
    assert close_seconds < 10
