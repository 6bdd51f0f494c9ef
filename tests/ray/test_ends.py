"""Drivers and clusters that end, and the Ray that llmrt starts itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ray_scenarios as scenarios
from tests.support.leaks import wait_until_gone
from tests.support.ray_driver import INIT, DriverError, RayDriver

MakeDriver = Callable[..., RayDriver]


def test_workers_of_a_killed_driver_are_gone_and_its_group_too(
    driver: RayDriver, make_driver: MakeDriver
) -> None:
    def address() -> str:
        import ray

        return ray.get_runtime_context().gcs_address

    def hang(address: str) -> list[int]:
        import ray

        ray.init(address, log_to_driver=False)
        group = scenarios.new_ray_group(2)
        group.start()
        scenarios.KEPT.append(group)
        from tests.support.fake_workers import Misbehave

        group.submit(Misbehave(fault="spin"))
        pids = [worker.pid for worker in group.workers]
        return pids + [scenarios.actor_pid_of(pid) for pid in pids]

    victim = make_driver()
    pids = victim.run(hang, driver.run(address))
    victim.kill()
    assert wait_until_gone(pids, 10) < 5
    # That nothing of it is left in the cluster is checked after every test.


def test_the_end_of_the_cluster_is_the_end_of_the_engine_in_time(make_driver: MakeDriver) -> None:
    def scenario() -> tuple[Any, ...]:
        import time

        from ray._private import worker as ray_worker

        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        group = scenarios.new_ray_group(2)
        group.start()
        pids = [worker.pid for worker in group.workers]
        call = group.submit(Misbehave(fault="hang"))
        started_at = time.monotonic()
        ray_worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)
        try:
            group.wait(call, 30)
        except WorkerDiedError as error:
            died_after, message = time.monotonic() - started_at, str(error)
        group.close()
        return died_after, time.monotonic() - started_at, pids, message

    driver = make_driver()
    driver.init(num_cpus=2)
    died_after, closed_after, pids, message = driver.run(scenario)
    assert died_after < 10
    # Ray's own code may end an actor before that has said anything.
    assert "raylet" in message or "Ray says" in message or "Ray does not say why" in message
    assert closed_after < 45
    assert wait_until_gone(pids, 10) < 5
    driver.process.send_signal(signal.SIGKILL)  # Ray would wait for its cluster


def test_a_killed_actor_of_which_ray_says_nothing_is_a_dead_worker_all_the_same(
    make_driver: MakeDriver,
) -> None:
    def scenario() -> tuple[float, str]:
        import os
        import time

        from ray._private import worker as ray_worker

        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        (gcs,) = ray_worker._global_node.all_processes["gcs_server"]
        with scenarios.ray_group(2) as group:
            call = group.submit(Misbehave(fault="hang"))
            gcs.process.send_signal(signal.SIGSTOP)  # all of Ray's news of actors comes from there
            try:
                os.kill(scenarios.actor_pid_of(group.workers[1].pid), signal.SIGKILL)
                started_at = time.monotonic()
                group.wait(call, 20)
            except WorkerDiedError as error:
                return time.monotonic() - started_at, str(error)
            finally:
                gcs.process.send_signal(signal.SIGCONT)
        raise AssertionError("nobody died")

    driver = make_driver()
    driver.init(num_cpus=2)
    seconds, message = driver.run(scenario)
    assert seconds < 1.0
    assert "Worker 1" in message
    assert "Ray does not say why" in message


def test_a_ray_that_nobody_started_is_started_counted_and_shut_down(
    make_driver: MakeDriver, tiny_model: Path
) -> None:
    def scenario() -> dict[str, Any]:
        import os

        before = dict(os.environ), signal.getsignal(signal.SIGTERM)
        from llmrt import Engine

        options: dict[str, Any] = {"backend": "ray", "device": "cpu"}
        facts: dict[str, Any] = {}
        with Engine(tiny_model, **options) as one:
            import ray

            with Engine(tiny_model, **options) as two:
                facts["tokens"] = [
                    llm.generate("a", scenarios.GREEDY)[0].token_ids for llm in (one, two)
                ]
            facts["up_with_one"] = ray.is_initialized()
            one.generate("a", scenarios.GREEDY)
        facts["up_with_none"] = ray.is_initialized()
        facts["unchanged"] = (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
        return facts

    driver = make_driver()
    facts = driver.run(scenario, timeout=110)
    assert len(set(facts["tokens"])) == 1
    assert facts["up_with_one"]
    assert not facts["up_with_none"]
    assert facts["unchanged"]


def test_a_cluster_that_the_environment_names_is_joined(
    driver: RayDriver, make_driver: MakeDriver
) -> None:
    def address() -> str:
        import ray

        return ray.get_runtime_context().gcs_address

    def scenario() -> tuple[str, bool]:
        import ray

        with scenarios.ray_group(2):
            found = ray.get_runtime_context().gcs_address
        return found, ray.is_initialized()

    theirs = driver.run(address)
    assert make_driver(RAY_ADDRESS=theirs).run(scenario) == (theirs, False)


def test_a_ray_of_ours_that_somebody_uses_is_left_running(make_driver: MakeDriver) -> None:
    def scenario() -> bool:
        import ray

        with scenarios.ray_group(1):
            keeper = ray.remote(scenarios.FakeHost).remote()
            ray.get(keeper.open.remote(), timeout=40)
        is_up = ray.is_initialized()
        ray.kill(keeper)
        return is_up

    assert make_driver().run(scenario, timeout=110)


def test_a_client_of_ray_is_refused_before_anything_starts(
    make_driver: MakeDriver, tiny_model: Path
) -> None:
    def scenario() -> None:
        from llmrt import Engine

        Engine(tiny_model, backend="ray").open()

    driver = make_driver(RAY_ADDRESS="ray://127.0.0.1:10001")
    with pytest.raises(DriverError, match="outside the cluster"):
        driver.run(scenario)


def test_a_worker_that_ray_kills_for_memory_is_said_to_be(make_driver: MakeDriver) -> None:
    def scenario() -> str:
        from llmrt.errors import LlmrtError
        from tests.support.fake_workers import Misbehave

        group = scenarios.new_ray_group(1)
        try:
            group.start()
            group.call(Misbehave(fault="hang"), 25)
        except LlmrtError as error:
            return str(error)
        finally:
            group.close()
        return "it went on"

    driver = make_driver(RAY_memory_monitor_refresh_ms="100", RAY_memory_usage_threshold="0.01")
    driver.run(scenarios.init_ray, {**INIT, "num_cpus": 2})
    assert "OutOfMemoryError" in driver.run(scenario)
