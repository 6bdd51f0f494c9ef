"""Engines inside what Ray runs: actors in placement groups, Serve deployments, Data pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ray_scenarios as scenarios
from tests.support.ray_driver import RayDriver


@pytest.mark.parametrize("backend", ["mp", "ray", "auto"])
def test_an_engine_opens_in_the_first_bundle_of_somebody_elses_group(
    driver: RayDriver, tiny_model: Path, backend: str
) -> None:
    def scenario() -> tuple[Any, ...]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with scenarios.placement_group([{"CPU": 1}] * 3, name=f"theirs-{backend}") as group:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            host = scenarios.host_class().options(num_cpus=1, scheduling_strategy=strategy).remote()
            result = ray.get(host.answer.remote(tiny_model, backend, 2), timeout=50)
            groups = ray.util.placement_group_table().values()
            num_groups = sum(g["state"] == "CREATED" for g in groups)
            ray.kill(host)
        return (*result, num_groups)

    tokens, chosen, method, num_threads, num_groups = driver.run(scenario)
    assert [len(t) for t in tokens] == [12] * 3
    assert chosen == ("ray" if backend == "auto" else backend)
    assert method == "spawn"
    assert num_threads == [1, 1]
    assert num_groups == 1, "the workers sit in the group that was there"


def test_an_engine_opens_beside_a_host_that_asked_for_no_bundle(
    driver: RayDriver, tiny_model: Path
) -> None:
    def scenario() -> int:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        num_opened = 0
        for attempt in range(4):  # Ray picks a bundle for its place and one for its CPU at random
            with scenarios.placement_group([{"CPU": 1}] * 3, name=f"any-{attempt}") as group:
                strategy = PlacementGroupSchedulingStrategy(
                    group, placement_group_capture_child_tasks=True
                )
                options = {"num_cpus": 1, "scheduling_strategy": strategy}
                host = scenarios.host_class().options(**options).remote()
                ray.get(host.answer.remote(tiny_model, "ray", 2), timeout=60)
                num_opened += 1
                ray.kill(host)
        return num_opened

    assert driver.run(scenario, timeout=110) == 4


def test_a_group_travels_in_an_environment_variable(driver: RayDriver, tiny_model: Path) -> None:
    def scenario() -> tuple[Any, ...]:
        import ray

        from llmrt.ray import PLACEMENT_GROUP_VARIABLE, placement_group_to_env

        with scenarios.placement_group([{"CPU": 1}] * 2, name="by-variable") as group:
            variables = {PLACEMENT_GROUP_VARIABLE: placement_group_to_env(group)}
            host = scenarios.host_class().options(runtime_env={"env_vars": variables}).remote()
            result = ray.get(host.answer.remote(tiny_model, "auto", 2), timeout=50)
            groups = ray.util.placement_group_table().values()
            num_groups = sum(g["state"] == "CREATED" for g in groups)
            ray.kill(host)
        return (*result, num_groups)

    _, chosen, _, _, num_groups = driver.run(scenario)
    assert chosen == "ray"
    assert num_groups == 1


@pytest.mark.parametrize("end", ["ray.kill", "SIGSEGV", "exit_actor", "cycle"])
@pytest.mark.parametrize("lifetime", ["detached", None])
def test_workers_end_with_the_actor_that_opened_them(
    driver: RayDriver, end: str, lifetime: str | None
) -> None:
    def scenario() -> float:
        import os
        import signal

        import ray

        from tests.support.leaks import wait_until_gone

        name = f"host-{end}-{lifetime}"
        host = scenarios.fake_host_class().options(name=name, lifetime=lifetime).remote()
        pids = ray.get(host.open.remote(in_a_cycle=end == "cycle"), timeout=40)
        if end == "ray.kill":
            ray.kill(host, no_restart=True)
        elif end == "SIGSEGV":
            os.kill(pids[0], signal.SIGSEGV)
        else:
            host.leave.remote()
        return wait_until_gone(pids, 8)

    assert driver.run(scenario) < 5


def test_actors_of_a_ray_engine_end_with_the_actor_that_opened_it(driver: RayDriver) -> None:
    def scenario() -> float:
        import ray

        from tests.support.leaks import wait_until_gone

        host = scenarios.fake_host_class().remote()
        pids = ray.get(host.open.remote(backend="ray"), timeout=40)
        ray.kill(host, no_restart=True)
        return wait_until_gone(pids, 8)

    assert driver.run(scenario) < 5


def test_serve_answers_http_requests_and_streams(driver: RayDriver, tiny_model: Path) -> None:
    def scenario() -> tuple[Any, ...]:
        from tests.support.serve_app import ask, run

        with run(str(tiny_model)) as url:
            return ask(url, "complete"), ask(url, "stream"), scenarios.llmrt_processes() != []

    whole, streamed, was_up = driver.run(scenario, timeout=110)
    assert len(whole["token_ids"]) == 12
    assert streamed["text"] == whole["text"]
    assert streamed["num_parts"] > 1
    assert was_up


def test_data_maps_batches_with_an_engine(driver: RayDriver, tiny_model: Path) -> None:
    def scenario() -> list[str]:
        import ray
        from ray.data import ActorPoolStrategy

        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"prompt": prompt} for prompt in scenarios.PROMPTS]
        data = ray.data.from_items(rows).map_batches(
            scenarios.Completer,
            fn_constructor_args=(tiny_model,),
            compute=ActorPoolStrategy(size=1),
            batch_size=2,
            num_cpus=1,
        )
        return [row["text"] for row in data.take_all()]

    assert len(driver.run(scenario, timeout=110)) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_engines_in_eight_actors_start_at_once(driver: RayDriver, tiny_model: Path) -> None:
    def scenario() -> set[Any]:
        import ray

        hosts = [scenarios.host_class().options(num_cpus=1).remote() for _ in range(8)]
        refs = [host.answer.remote(tiny_model, "mp", 1) for host in hosts]
        results = ray.get(refs, timeout=200)
        for host in hosts:
            ray.kill(host)
        return {tokens for tokens, *_ in results}

    assert len(driver.run(scenario, timeout=240)) == 1
