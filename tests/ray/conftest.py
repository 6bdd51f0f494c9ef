"""One Ray for all tests of this folder, in a driver process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from tests.support import ray_scenarios
from tests.support.ray_driver import RayDriver

collect_ignore_glob = [] if find_spec("ray") is not None else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.nodeid:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def driver() -> Iterator[RayDriver]:
    """A driver of a Ray with eight CPUs and two GPUs, none of which need exist."""
    driver = RayDriver({"HF_TOKEN": "secret-of-mine"})
    try:
        driver.init(num_cpus=8, num_gpus=2, resources={"of_mine": 1})
        yield driver
    finally:
        driver.close()


@pytest.fixture
def make_driver() -> Iterator[Callable[..., RayDriver]]:
    """Make drivers that are ended when the test is over."""
    with ExitStack() as stack:

        def make(**env: str) -> RayDriver:
            driver = RayDriver(env)
            stack.callback(driver.close)
            return driver

        yield make


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a test leaves a group, an actor or a process in the cluster that all share.

    Ray starts and ends processes of its own as it likes, so the check for any process whatever
    that other tests end with cannot be made here.
    """
    yield
    if "driver" in request.fixturenames:
        driver: RayDriver = request.getfixturevalue("driver")
        assert driver.run(ray_scenarios.left_in_cluster) == []
