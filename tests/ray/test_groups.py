"""Groups of fake workers on a real Ray: what is placed where, what ends how, what is left."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import ray_scenarios as scenarios
from tests.support.ray_driver import RayDriver
from tests.support.waiting import wait_until


def test_ranks_answer_and_everything_is_given_back(driver: RayDriver) -> None:
    def scenario() -> dict[str, Any]:
        from tests.support.fake_workers import Ask, Echo

        with scenarios.ray_group(1):
            pass  # what Ray opens for its first actor stays open
        environ, descriptors = dict(os.environ), scenarios.descriptors_not_rays()
        group = scenarios.new_ray_group(2, shared_memory_bytes=4096, rendezvous=True)
        group.start()
        facts = {
            "echo": group.call(Echo(value=7), 10),
            "names": group.call(Ask(what="name"), 10),
            "shared": group.call(Ask(what="shared"), 10),
            "meeting": group.call(Ask(what="rendezvous"), 10),
            "pids": group.call(Ask(what="pid"), 10) == [w.pid for w in group.workers],
            "hosts": {w.host for w in group.workers},
        }
        group.call(Ask(what="write_shared", arguments=(4096, b"both")), 10)
        facts["read"] = group.call(Ask(what="read_shared", arguments=(4096, 4)), 10)
        report = group.close()
        facts["ended_by"] = [w.ended_by for w in report.workers]
        facts["exits"] = [w.exit_code for w in report.workers]
        facts["environ"] = dict(os.environ) == environ
        facts["descriptors"] = scenarios.descriptors_not_rays() - descriptors
        import ray

        facts["address"] = ray.util.get_node_ip_address()
        return facts

    facts = driver.run(scenario)
    assert facts["echo"] == [7, 7]
    assert facts["names"] == ["llmrt-rank0", "llmrt-rank1"]
    assert facts["pids"]
    assert facts["hosts"] == {facts["address"]}
    assert [size for _, size in facts["shared"]] == [8192, 8192]
    assert facts["read"] == [b"both", b"both"], "ranks of one node map the same memory"
    assert [(host, listens) for host, _, listens in facts["meeting"]] == [
        (facts["address"], True),
        (facts["address"], False),
    ]
    assert facts["ended_by"] == ["asked", "asked"]
    assert facts["exits"] == [0, 0]
    assert facts["environ"]
    assert not facts["descriptors"]


def test_a_cluster_that_fits_one_engine_fits_five_in_turn(driver: RayDriver) -> None:
    def scenario() -> list[str]:
        import ray

        for _ in range(5):
            with scenarios.ray_group(2, num_cpus=4.0):
                pass
        return [g["state"] for g in ray.util.placement_group_table().values()]

    assert set(driver.run(scenario)) == {"REMOVED"}


def test_a_group_that_is_given_stays_its_owners(driver: RayDriver) -> None:
    def scenario() -> tuple[str, str]:
        import ray

        with scenarios.placement_group([{"CPU": 1}] * 2) as mine:
            for _ in range(2):
                with scenarios.ray_group(2, placement_group=mine):
                    table = ray.util.placement_group_table()
            alive = [g for g in table.values() if g["state"] == "CREATED"]
            assert len(alive) == 1, "no second group was made"
            return alive[0]["placement_group_id"], mine.id.hex()

    theirs, mine = driver.run(scenario)
    assert theirs == mine


@pytest.mark.parametrize(
    ("strategy", "bundles"),
    [
        ("SPREAD", [{"CPU": 1}] * 5),
        ("STRICT_PACK", [{"CPU": 0.5, "memory": 1_000_000}] * 2),
        ("PACK", [{"GPU": 1}] * 2),
        ("SPREAD", [{"CPU": 2}, {"CPU": 1, "GPU": 0.5}]),
        ("STRICT_PACK", [{"of_mine": 0.1}] * 2),
    ],
    ids=["more than ranks", "fractions", "no CPU", "uneven", "custom"],
)
def test_groups_of_every_make_serve(
    driver: RayDriver, strategy: str, bundles: list[dict[str, float]]
) -> None:
    def scenario() -> list[object]:
        from tests.support.fake_workers import Echo

        with (
            scenarios.placement_group(bundles, strategy=strategy) as group,
            scenarios.ray_group(2, placement_group=group) as ranks,
        ):
            return ranks.call(Echo(value=1), 10)

    assert driver.run(scenario) == [1, 1]


def test_too_few_resources_are_an_error_with_both_numbers(driver: RayDriver) -> None:
    def scenario() -> str:
        from llmrt.config import Timeouts
        from llmrt.errors import EngineStartError

        try:
            with scenarios.ray_group(3, num_cpus=4.0, timeouts=Timeouts(start_progress=2.0)):
                return "it started"
        except EngineStartError as error:
            return str(error)

    message = driver.run(scenario)
    assert "3 workers of 4 CPU each within" in message
    assert "8 CPU available of 8 CPU" in message


def test_a_group_with_too_few_bundles_is_an_error_with_both_numbers(driver: RayDriver) -> None:
    def scenario() -> str:
        from llmrt.errors import EngineStartError

        with scenarios.placement_group([{"CPU": 1}] * 2) as group:
            try:
                with scenarios.ray_group(3, placement_group=group):
                    return "it started"
            except EngineStartError as error:
                return str(error)

    assert "tp=3 workers, one bundle each; the placement group has 2 bundles" in driver.run(
        scenario
    )


def test_a_removed_group_is_an_error_that_says_so(driver: RayDriver) -> None:
    def scenario() -> str:
        from llmrt.errors import EngineStartError

        with scenarios.placement_group([{"CPU": 1}] * 2) as group:
            pass
        try:
            with scenarios.ray_group(2, placement_group=group):
                return "it started"
        except EngineStartError as error:
            return str(error)

    assert "was removed" in driver.run(scenario)


def test_closing_while_ray_has_not_placed_anything_is_quick(driver: RayDriver) -> None:
    def scenario() -> tuple[float, str]:
        import threading
        import time

        group = scenarios.new_ray_group(3, num_cpus=4.0)
        errors: list[str] = []

        def start() -> None:
            try:
                group.start()
            except Exception as error:
                errors.append(type(error).__name__)

        thread = threading.Thread(target=start)
        thread.start()
        wait_until(lambda: any("waiting" in p for _, p, _ in group.heard.phases))
        started_at = time.monotonic()
        group.interrupt()
        thread.join()
        return time.monotonic() - started_at, errors[0]

    seconds, error = driver.run(scenario)
    assert error == "Interrupted"
    assert seconds < 5


def test_two_groups_live_side_by_side_and_one_closes_while_the_other_answers(
    driver: RayDriver,
) -> None:
    def scenario() -> list[object]:
        from tests.support.fake_workers import Echo

        with scenarios.placement_group([{"CPU": 1}] * 2) as mine, scenarios.ray_group(2) as one:
            with scenarios.ray_group(2, placement_group=mine) as two:
                assert two.call(Echo(value=2), 10) == [2, 2]
            return one.call(Echo(value=1), 10)

    assert driver.run(scenario) == [1, 1]


# ---- devices and variables ----


def test_every_rank_uses_the_gpu_that_ray_gave_it(driver: RayDriver) -> None:
    def scenario() -> list[list[object]]:
        from tests.support.fake_workers import Ask

        ask = Ask(what="env", arguments=("CUDA_VISIBLE_DEVICES",))
        with scenarios.ray_group(2, device="cuda") as group:
            on_gpus = group.call(ask, 10)
        with scenarios.ray_group(2, device="cpu") as group:
            return [on_gpus, group.call(ask, 10)]

    on_gpus, on_cpus = driver.run(scenario)
    assert sorted(on_gpus) == ["0", "1"]
    assert on_cpus == ["", ""], "an actor without GPUs sees none"


def test_threads_are_the_cores_of_the_actor(driver: RayDriver) -> None:
    def scenario(num_cpus: float) -> list[object]:
        from tests.support.fake_workers import Ask

        with scenarios.ray_group(2, num_cpus=num_cpus) as group:
            return group.call(Ask(what="env", arguments=("OMP_NUM_THREADS",)), 10)

    assert driver.run(scenario, 3.0) == ["3", "3"]


def test_no_engine_process_listens_on_every_address(driver: RayDriver) -> None:
    def scenario() -> list[set[int]]:
        rays_own = scenarios.wildcard_ports(os.getpid())
        with scenarios.ray_group(2, rendezvous=True) as group:
            ranks = [scenarios.wildcard_ports(worker.pid) for worker in group.workers]
            return [*ranks, scenarios.wildcard_ports(os.getpid()) - rays_own]

    assert driver.run(scenario) == [set(), set(), set()]


# ---- deaths ----


def test_a_dead_rank_is_named_with_its_signal(driver: RayDriver) -> None:
    def scenario() -> tuple[Any, ...]:
        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        with scenarios.ray_group(2) as group:
            try:
                group.call(Misbehave(fault="exit", argument=3, rank=1), 20)
            except WorkerDiedError as error:
                return error.rank, error.exit_code, error.stderr_tail, error.host
        return ()

    rank, exit_code, tail, host = driver.run(scenario)
    assert (rank, exit_code, tail) == (1, 3, ("last words",))
    assert host


def test_a_killed_actor_is_a_dead_worker_with_the_cause_that_ray_gives(driver: RayDriver) -> None:
    def scenario() -> tuple[str, int, float, list[str]]:
        import signal
        import time

        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        group = scenarios.new_ray_group(2)
        group.start()
        try:
            call = group.submit(Misbehave(fault="hang"))
            os.kill(scenarios.actor_pid_of(group.workers[1].pid), signal.SIGKILL)
            started_at = time.monotonic()
            group.wait(call, 20)
        except WorkerDiedError as error:
            seconds = time.monotonic() - started_at
            return str(error), error.rank or 0, seconds, [w.ended_by for w in group.close().workers]
        finally:
            group.close()
        raise AssertionError("nobody died")

    message, rank, seconds, ended_by = driver.run(scenario)
    assert rank == 1
    assert "Ray says (ActorDiedError)" in message
    assert "worker process has died" in message
    assert seconds < 1.0
    assert ended_by[1] == "already gone"


def test_a_dead_guard_takes_its_rank_along_and_is_named(driver: RayDriver) -> None:
    def scenario() -> str:
        import signal

        import psutil

        from llmrt.errors import WorkerDiedError
        from tests.support.fake_workers import Misbehave

        with scenarios.ray_group(2) as group:
            call = group.submit(Misbehave(fault="hang"))
            guard = psutil.Process(group.workers[0].pid).ppid()
            os.kill(guard, signal.SIGKILL)
            try:
                group.wait(call, 20)
            except WorkerDiedError as error:
                return str(error)
        return ""

    assert "Worker 0" in (message := driver.run(scenario))
    assert "guard process" in message


def test_a_hung_rank_says_where_it_is(driver: RayDriver) -> None:
    def scenario() -> dict[int, str]:
        from llmrt.errors import WorkerHungError
        from tests.support.fake_workers import Misbehave

        with scenarios.ray_group(2) as group:
            try:
                group.call(Misbehave(fault="hang", rank=1), 0.5)
            except WorkerHungError as error:
                return error.stacks
        return {}

    stacks = driver.run(scenario)
    assert list(stacks) == [1]
    assert "fault_hang" in stacks[1]


def test_a_rank_that_prints_without_end_blocks_nobody(driver: RayDriver) -> None:
    def scenario() -> int:
        from tests.support.fake_workers import Misbehave

        with scenarios.ray_group(1) as group:
            group.call(Misbehave(fault="print", argument=30_000), 30)

            def num_lines() -> int:
                group.poll(0.05)
                dropped = sum(output.num_dropped_lines for output in group.heard.output)
                return dropped + group.heard.text("stdout").count("\n")

            wait_until(lambda: num_lines() >= 30_001, 20)
            return num_lines()

    assert driver.run(scenario) == 30_001


def test_ranks_that_ignore_everything_are_killed_in_time(driver: RayDriver) -> None:
    def scenario() -> tuple[list[str], float]:
        from tests.support.fake_workers import Misbehave

        group = scenarios.new_ray_group(2)
        group.start()
        group.submit(Misbehave(fault="spin"))
        report = group.close(timeout=3.0)
        return [w.ended_by for w in report.workers], report.seconds

    ended_by, seconds = driver.run(scenario)
    assert ended_by == ["SIGKILL", "SIGKILL"]
    assert seconds < 8


def test_frozen_actors_are_killed_in_time(driver: RayDriver) -> None:
    def scenario() -> float:
        import signal

        group = scenarios.new_ray_group(2)
        group.start()
        for worker in group.workers:
            os.kill(scenarios.actor_pid_of(worker.pid), signal.SIGSTOP)
        return group.close(timeout=4.0).seconds

    assert driver.run(scenario) < 10


def test_a_worker_that_cannot_start_is_the_error_of_open(driver: RayDriver) -> None:
    def scenario() -> str:
        from llmrt.errors import EngineStartError
        from tests.support.fake_workers import FakeConfig

        config = FakeConfig(fault="raise", phase="start", rank=1)
        try:
            with scenarios.ray_group(2, config=config):
                return "it started"
        except EngineStartError as error:
            return str(error)

    assert "rank 1: ValueError: rank 1 was told to fail" in driver.run(scenario)


def test_a_module_that_cannot_be_imported_is_the_error_of_open(driver: RayDriver) -> None:
    def scenario() -> str:
        from llmrt.errors import EngineStartError

        try:
            with scenarios.ray_group(2, preload=("no_such_module",)):
                return "it started"
        except EngineStartError as error:
            return str(error)

    assert "importing no_such_module failed" in driver.run(scenario)


def test_a_group_that_is_dropped_gives_everything_back(driver: RayDriver) -> None:
    def scenario() -> None:
        import gc

        group = scenarios.new_ray_group(1)
        group.start()
        del group
        gc.collect()

    driver.run(scenario)  # the check after every test is what this is about
