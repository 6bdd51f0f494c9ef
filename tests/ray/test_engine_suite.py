"""The suite of engines, over `backend="ray"`: one engine of two ranks for all of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import test_engine as suite
from tests.support.ray_driver import RayDriver

SUITE = [
    name
    for name, test in vars(suite).items()
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["llm"]
]


@pytest.fixture(scope="module")
def open_engine(driver: RayDriver, tiny_model: Path) -> Iterator[RayDriver]:
    """The driver, with an engine of two ranks on Ray open in it."""

    def begin() -> None:
        import builtins

        from llmrt import Engine

        builtins.llm = Engine(tiny_model, tp=2, backend="ray", device="cpu").open()  # type: ignore[attr-defined]

    def end() -> None:
        import builtins

        builtins.llm.close()  # type: ignore[attr-defined]

    driver.run(begin)
    yield driver
    driver.run(end)


@pytest.fixture
def leak_check() -> None:
    """Nothing to check while an engine is open; the tests of groups do it."""


@pytest.mark.parametrize("name", SUITE)
def test_the_suite_of_engines_passes_on_ray(open_engine: RayDriver, name: str) -> None:
    def scenario() -> None:
        import builtins

        from tests import test_engine

        getattr(test_engine, name)(builtins.llm)  # type: ignore[attr-defined]

    open_engine.run(scenario)
