"""Engines on a real Ray: the same answers as anywhere, and the variables that reach the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import ray_scenarios as scenarios
from tests.support.ray_driver import RayDriver


def test_mp_and_ray_alternate_with_equal_tokens(driver: RayDriver, tiny_model: Path) -> None:
    def scenario() -> list[Any]:
        from llmrt import Engine

        answers = []
        for backend in ("mp", "ray", "mp", "ray"):
            with Engine(tiny_model, tp=2, backend=backend, device="cpu") as llm:
                outputs = llm.generate(scenarios.PROMPTS, scenarios.GREEDY)
            answers.append([output.token_ids for output in outputs])
            assert scenarios.llmrt_processes() == []
        return answers

    first, *others = driver.run(scenario, timeout=100)
    assert others == [first] * 3


def test_only_listed_variables_reach_the_ranks_and_secrets_are_never_printed(
    driver: RayDriver, tiny_model: Path
) -> None:
    def scenario() -> tuple[Any, ...]:
        import os

        from llmrt import Engine

        # Set after Ray has started: what its processes inherited is not what is to be seen here.
        os.environ["HOSTILE"], os.environ["HF_ENDPOINT"] = "\n'\"$" * 1000, "http://of.mine"
        before = dict(os.environ)
        names = ("HF_TOKEN", "HF_ENDPOINT", "HOSTILE", "MINE")
        options = {"backend": "ray", "device": "cpu", "env": {"MINE": "also-secret"}}
        with Engine(tiny_model, tp=2, **options) as llm:
            found = llm.collective_rpc(lambda worker: [os.environ.get(name) for name in names])
            words = " ".join(map(repr, (llm, llm.workers, llm.timeline, llm.stats())))
        return found, words, dict(os.environ) == before

    found, words, is_same = driver.run(scenario)
    assert found == [["secret-of-mine", "http://of.mine", None, "also-secret"]] * 2
    assert is_same
    logs = scenarios.read_logs(driver.directory)
    assert len(logs) > 1000, "these are the logs"
    for secret in ("secret-of-mine", "also-secret"):
        assert secret not in words
        assert secret not in logs


def test_auto_goes_to_ray_for_more_than_this_machine_has(
    driver: RayDriver, tiny_model: Path
) -> None:
    def scenario() -> list[tuple[str, str]]:
        from llmrt.backend_choice import choose_backend
        from llmrt.config import EngineConfig
        from llmrt.runtime.cores import available_cores
        from llmrt.runtime.observe import observe

        few, many = EngineConfig(tp=1, device="cpu"), EngineConfig(tp=8, device="cpu")
        assert available_cores() < 8, "this test needs a smaller machine"
        chosen = [choose_backend(options, observe()) for options in (few, many)]
        return [(backend.name, backend.reason) for backend in chosen]

    few, many = driver.run(scenario)
    assert few[0] == "mp"
    assert many[0] == "ray"
    assert "tp=8 is more than the" in many[1]
