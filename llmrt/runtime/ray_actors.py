"""The actors of an engine as Ray holds them: create, kill, and what Ray says of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from llmrt.runtime.placement import Bundle
from llmrt.runtime.ray_actor import RankActor

KILL_SECONDS = 5.0
ANSWER_SECONDS = 20.0


def create(group: Any | None, bundle: Bundle, *, on_gpu: bool) -> Any:
    """Have Ray start an actor for one rank, in a bundle of a group or anywhere."""
    strategy: Any = "DEFAULT"
    if group is not None:
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=bundle.index,
            placement_group_capture_child_tasks=False,
        )
    options: dict[str, Any] = {
        "num_cpus": bundle.num_cpus,
        "num_gpus": min(1.0, bundle.num_gpus) if on_gpu else 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": strategy,
    }
    return import_module("ray").remote(RankActor).options(**options).remote()


def kill(actors: Sequence[Any]) -> None:
    """Kill actors and wait until Ray says that they are dead."""
    ray = import_module("ray")
    for actor in actors:
        ray.kill(actor, no_restart=True)
    refs = [actor.where.remote() for actor in actors]
    ray.wait(refs, num_returns=len(refs), timeout=KILL_SECONDS)


def error_of(ref: Any) -> BaseException | None:
    """Return what the call behind a reference raised, or None; it must have ended."""
    try:
        import_module("ray").get(ref, timeout=ANSWER_SECONDS)
    except Exception as error:
        return error
    return None


def describe(error: BaseException | None) -> str:
    """Return what Ray says of an end, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    return f"Ray says ({type(error).__name__}): {' '.join(filter(None, lines))}"
